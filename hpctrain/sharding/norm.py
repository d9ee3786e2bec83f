"""The global gradient norm, every logical parameter counted once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hpctrain.layout.placement import EXPERT, Placement
from hpctrain.parallel.comm import Axis, all_reduce_
from hpctrain.parallel.mesh import Mesh


class GradientNorm:
    """The global norm of gradients that are complete over the ranks an engine reduces them over.

    Dense parameters and experts are spread over the ranks in two ways, so each kind has its own sum: the former over
    pp x tp, the latter over pp x ep x etp.

    Args:
        records: placements of what is trained on this rank, in the order of the gradients.
        mesh: this rank's view of all ranks.
        experts: whether the model has any, on this rank or on others.
        shards: where a rank has a part of each gradient, the ranks that have the others: of dense parameters, of
            experts.
        device: of the gradients, where it is not the rank's.
    """

    def __init__(
        self,
        records: Mapping[str, Placement],
        mesh: Mesh,
        experts: bool,
        shards: tuple[Axis, Axis] | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.mesh = mesh
        owned = [record.owner == mesh.rank for record in records.values()]
        self.counted = torch.tensor(owned, dtype=torch.bool, device=device or mesh.device)
        of_expert = [record.reduced_over == EXPERT for record in records.values()]
        axes = zip((mesh.model, mesh.experts), shards or (mesh.alone, mesh.alone), (False, True))
        self.sums = [
            (over, parts, [i for i, expert in enumerate(of_expert) if expert == kind])
            for over, parts, kind in list(axes)[: 1 + experts]
        ]

    def of(self, gradients: Sequence[Tensor]) -> float:
        """The same number on every rank; not finite if a gradient is so anywhere."""
        total = 0.0
        for over, parts, chosen in self.sums:
            squares = sum_of_squares([gradients[i] for i in chosen], self.counted[chosen]).to(self.mesh.device)
            total += all_reduce_(all_reduce_(squares, parts), over).item()
        return math.nan if math.isnan(total) else math.sqrt(total)


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


def clip_factor(norm: float, limit: float) -> float:
    """What gradients are multiplied by so that their norm is at most `limit` (0: no limit)."""
    return min(1.0, limit / (norm + 1e-6)) if limit else 1.0
