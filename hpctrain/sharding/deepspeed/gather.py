"""Making a model's modules fit for ZeRO-3, which fetches a module's parameters when its forward is called and
lets them go when it has run.
"""

from __future__ import annotations

from torch import nn

from hpctrain.model.mlp import FanOut
from hpctrain.parallel.comm import Axis
from hpctrain.parallel.linears import use_own_linears


def make_fetchable(root: nn.Module, alone: Axis) -> None:
    """Change a model in place so that ZeRO-3 can fetch and free its parameters.

    - A `FanOut` reads the weights of its children without calling them: it is fetched as one module.
    - `torch.nn.functional.linear` keeps a transposed view of the weight for backward, which keeps the gathered
      values alive after DeepSpeed has let them go. The tensor-parallel layers keep the parameter itself, so
      they are used on an axis of one rank too.
    """
    use_own_linears(root, alone)
    for module in root.modules():
        if isinstance(module, FanOut):
            module._z3_leaf = True  # type: ignore[assignment]
