"""The global gradient norm, every logical parameter counted once."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from hpctrain.parallel.comm import Axis, all_reduce_


def sum_of_squares(gradients: Iterable[Tensor]) -> Tensor:
    """Sum of the squares of all elements, a float64 scalar."""
    tensors = list(gradients)
    if not tensors:
        return torch.zeros((), dtype=torch.float64)
    norms = torch.stack([n.double() for n in torch._foreach_norm(tensors)])
    return norms.square().sum()


def global_norm(squares: Tensor, model: Axis) -> float:
    """The root of the sum over the ranks that together hold one copy of the parameters.

    Args:
        squares: of the gradients this rank counts, float64 scalar, complete over the data-parallel ranks.
        model: pp x tp.

    Returns:
        The same number on every rank; not finite if it is so anywhere.
    """
    return math.sqrt(total) if (total := all_reduce_(squares.clone(), model).item()) >= 0 else math.nan


def clip_factor(norm: float, limit: float) -> float:
    """What gradients are multiplied by so that their norm is at most `limit` (0: no limit)."""
    return min(1.0, limit / (norm + 1e-6)) if limit else 1.0
