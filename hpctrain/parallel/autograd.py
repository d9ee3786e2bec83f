"""Collectives that autograd understands. The group is always an argument; inputs and gradients are never changed.

Words: a tensor is *replicated* over an axis (equal on its ranks), *partial* (its sum over the ranks is meant),
or *sharded*.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hpctrain.parallel.comm import Axis, all_reduce_


class _ReduceFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        return all_reduce_(x.contiguous().clone(), axis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None


def reduce_from(x: Tensor, axis: Axis) -> Tensor:
    """in: partial, out: replicated, summed; backward: replicated, unchanged."""
    return x if axis.size == 1 else _ReduceFrom.apply(x, axis)  # type: ignore[no-any-return, no-untyped-call]
