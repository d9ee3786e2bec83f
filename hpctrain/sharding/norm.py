"""The global gradient norm, every logical parameter counted once."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hpctrain.parallel.comm import Axis, all_reduce_


def sum_of_squares(gradients: Sequence[Tensor], counted: Tensor) -> Tensor:
    """Sum of the squares of the gradients that this rank counts, a float64 scalar.

    It is NaN if any gradient here is not finite, also one that another rank counts: a replica gone wrong must
    not be stepped on.

    Args:
        gradients: none where nothing on this rank is trained.
        counted: [gradients] bool, on their device.
    """
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=counted.device)
    squares = torch.stack([n.double() for n in torch._foreach_norm(list(gradients))]).square()
    return torch.where(squares.isfinite().all(), squares[counted].sum(), torch.nan)


def global_norm(squares: Tensor, model: Axis) -> float:
    """The root of the sum over the ranks that together hold one copy of the parameters.

    Args:
        squares: of the gradients this rank counts, float64 scalar, complete over the data-parallel ranks.
        model: pp x tp.

    Returns:
        The same number on every rank; not finite if it is so anywhere.
    """
    total = all_reduce_(squares.clone(), model).item()
    return math.nan if math.isnan(total) else math.sqrt(total)


def clip_factor(norm: float, limit: float) -> float:
    """What gradients are multiplied by so that their norm is at most `limit` (0: no limit)."""
    return min(1.0, limit / (norm + 1e-6)) if limit else 1.0
