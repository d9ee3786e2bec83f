"""Initial values, without ever holding all parameters that a rank computes with in master precision.

DeepSpeed is given parameters that take no memory, makes its flat buffers and partitions of them, and only then
does each rank draw the values of the fragments it keeps (`sharding/initial.py`). Beyond what stays, building needs
room for the largest parameter.
"""

from __future__ import annotations

import torch
from torch import nn


def make_hollow(root: nn.Module, dtype: torch.dtype, device: torch.device, sharded: bool) -> None:
    """Replace every parameter by one of the same shape whose elements are all one and the same zero.

    Args:
        root: the model.
        dtype: of the parameters.
        device: where they are.
        sharded: also those that are not trained; otherwise they stay with the rank whole, and get their memory now.
    """
    for module in root.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            zero = torch.zeros((), dtype=dtype, device=device)
            values = zero.expand(parameter.shape)
            if not (parameter.requires_grad or sharded):
                values = values.contiguous()
            module.register_parameter(name, nn.Parameter(values, parameter.requires_grad))
