"""Making a model's modules fit for ZeRO-3, which fetches a module's parameters when its forward is called and
lets them go when it has run.
"""

from __future__ import annotations

from torch import nn

from hpctrain.model.transformer import FanOut, Head
from hpctrain.parallel.comm import Axis
from hpctrain.parallel.tensor import ColumnFanOut, ColumnHead, Region, RowLinear


def make_fetchable(root: nn.Module, alone: Axis) -> None:
    """Change a model in place so that ZeRO-3 can fetch and free its parameters.

    - A `FanOut` reads the weights of its children without calling them: it is fetched as one module.
    - `torch.nn.functional.linear` keeps a transposed view of the weight for backward, which keeps the gathered
      values alive after DeepSpeed has let them go. The tensor-parallel layers keep the parameter itself, so
      they are used on an axis of one rank too.
    """
    for parent in list(root.modules()):
        for name, child in list(parent.named_children()):
            replacement = _fetchable(child, alone) if not isinstance(parent, FanOut) else child
            if replacement is not child:
                setattr(parent, name, replacement)
    for module in root.modules():
        if isinstance(module, FanOut):
            module._z3_leaf = True  # type: ignore[assignment]


def _fetchable(module: nn.Module, alone: Axis) -> nn.Module:
    region = Region(alone)
    if type(module) is FanOut:
        return ColumnFanOut(module, region, (alone,) * len(module))
    if type(module) is Head:
        return ColumnHead(module, region, alone)
    if type(module) is nn.Linear:
        return RowLinear(module, region)
    return module
