"""Initial values, without ever holding all parameters that a rank computes with in master precision.

DeepSpeed is given parameters that take no memory, makes its flat buffers and partitions of them, and only then
does each rank draw the values of the fragments it keeps. Beyond what stays, building needs room for the largest
parameter.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hpctrain.config.schema import RunConfig
from hpctrain.layout.parameters import parameter_specs
from hpctrain.layout.placement import Box, Index
from hpctrain.model.random import initial_values
from hpctrain.sharding.state import WEIGHT


def make_hollow(root: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Replace every parameter by one of the same shape whose elements are all one and the same zero."""
    for module in root.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            zero = torch.zeros((), dtype=dtype, device=device)
            module.register_parameter(name, nn.Parameter(zero.expand(parameter.shape)))


class InitialValues:
    """The state that a run begins with, to be read like a checkpoint. It has master weights only."""

    def __init__(self, config: RunConfig) -> None:
        self._specs = {spec.name: spec for spec in parameter_specs(config.model)}
        self._seed = config.train.seed

    def read(self, name: str, kind: str, start: Index, shape: Index) -> Tensor:
        assert kind == WEIGHT, kind
        return initial_values(self._specs[name], self._seed, Box(start, (0,) * len(shape), shape))

    def scalars(self) -> dict[str, float]:
        return {"step": 0.0}
