"""Making a model's modules fit for ZeRO-3, which fetches a module's parameters when its forward is called and
lets them go when it has run.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from hpctrain.model.mlp import FanOut
from hpctrain.model.transformer import Transformer
from hpctrain.parallel.comm import Axis
from hpctrain.parallel.linears import use_own_linears


def make_fetchable(root: nn.Module, alone: Axis) -> None:
    """Change a model in place so that ZeRO-3 can fetch and free its parameters.

    - A `FanOut` reads the weights of its children without calling them: it is fetched as one module.
    - `torch.nn.functional.linear` keeps a transposed view of the weight for backward, which keeps the gathered
      values alive after DeepSpeed has let them go. The tensor-parallel layers keep the parameter itself, so
      they are used on an axis of one rank too.
    - The gradients of a module that is fetched as one are taken in its backward hook. PyTorch runs that before they are
      there if no input of the module needs a gradient, as in the first layer over an embedding that is not trained. So
      what layers are given always needs one.
    """
    use_own_linears(root, alone)
    for module in root.modules():
        if isinstance(module, FanOut):
            module._z3_leaf = True  # type: ignore[assignment]
        embedding = module.embedding if isinstance(module, Transformer) else None
        if embedding is not None and not embedding.weight.requires_grad:
            assert isinstance(module.dropout, nn.Module)
            module.dropout.register_forward_hook(_needs_gradient)


def _needs_gradient(module: nn.Module, inputs: Any, out: Tensor) -> Tensor:
    return out.requires_grad_(module.training)
