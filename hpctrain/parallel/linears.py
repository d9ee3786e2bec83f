"""The linears of tensor parallelism in a model without it, for engines that need more of a linear than torch's does."""

from __future__ import annotations

from torch import nn

from hpctrain.model.adapters import AdaptedLinear
from hpctrain.model.mlp import FanOut
from hpctrain.model.transformer import Head
from hpctrain.parallel.adapters import AdaptedFanOut, AdaptedRowLinear, Sums
from hpctrain.parallel.comm import Axis
from hpctrain.parallel.deferred import Deferred
from hpctrain.parallel.tensor import ColumnFanOut, ColumnHead, Region, RowLinear


def use_own_linears(root: nn.Module, alone: Axis) -> None:
    """Swap torch's linears, which tensor parallelism would have replaced, for its own on an axis of one rank."""
    for parent in list(root.modules()):
        for name, child in list(parent.named_children()):
            replacement = _own(child, alone) if not isinstance(parent, FanOut) else child
            if replacement is not child:
                setattr(parent, name, replacement)


def _own(module: nn.Module, alone: Axis) -> nn.Module:
    region = Region(alone)
    if type(module) is FanOut and any(isinstance(linear, AdaptedLinear) for linear in module.values()):
        return AdaptedFanOut(module, region, dict.fromkeys(module, Sums.none(alone)), alone)
    if type(module) is AdaptedLinear:
        return AdaptedRowLinear(module, region, Sums.none(alone), alone)
    if type(module) is FanOut:
        return ColumnFanOut(module, region, (alone,) * len(module))
    if type(module) is Head:
        return ColumnHead(module, region, alone)
    if type(module) is nn.Linear:
        return RowLinear(module, region)
    return module


def defer_weights(root: nn.Module, alone: Axis) -> Deferred:
    """Make all linears of a model able to leave their weights' gradients for later.

    Not so a head without a weight of its own: the embedding's gradient has to be complete when that is accumulated.
    """
    use_own_linears(root, alone)
    deferred = Deferred()
    for module in root.modules():
        if isinstance(module, ColumnFanOut | RowLinear | AdaptedRowLinear) or (
            isinstance(module, ColumnHead) and module.weight is not None
        ):
            module.deferred = deferred
    return deferred
