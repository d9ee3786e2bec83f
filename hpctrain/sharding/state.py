"""Training state as logical tensors cut into boxes: what an engine hands out and takes back.

The checkpoint writes pieces and reads regions; it does not know which engine or layout is behind them.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from hpctrain.layout.placement import Box, Index

if TYPE_CHECKING:  # so that checkpoints can be looked at without the seconds that importing torch takes
    import torch
    from torch import Tensor

WEIGHT = "weight"
MOMENTS = ("exp_avg", "exp_avg_sq")
KINDS = (WEIGHT, *MOMENTS)
"""Kinds of state a parameter has: its master weight, and AdamW's first and second moments."""


@dataclass(frozen=True)
class Piece:
    """One box of one logical tensor, held by this rank and written by no other.

    Attributes:
        name: parameter name.
        kind: one of `KINDS`.
        global_shape: shape of the logical tensor.
        start: where the box begins in it.
        shape: shape of the box.
        dtype: of the stored values (master precision).
        fetch: gives the values, a contiguous CPU tensor of `shape`; called once, when it is written, so that
            not all pieces need be in memory together.
    """

    name: str
    kind: str
    global_shape: Index
    start: Index
    shape: Index
    dtype: torch.dtype
    fetch: Callable[[], Tensor]


class StateReader(Protocol):
    """Reads any region of any logical tensor of a checkpoint, whatever wrote it."""

    def read(self, name: str, kind: str, start: Index, shape: Index) -> Tensor:
        """The values of a box, a contiguous CPU tensor in the dtype stored.

        Raises:
            CheckpointError: the checkpoint has no such tensor, or another global shape, or holes.
        """
        ...

    def scalars(self) -> dict[str, float]:
        """Numbers that were saved beside the tensors; see `Engine.scalars`."""
        ...


class StateSource(Protocol):
    """Whatever can be saved: an engine."""

    def pieces(self) -> Iterable[Piece]: ...

    def scalars(self) -> dict[str, float]: ...

    def load(self, reader: StateReader) -> None: ...


def region(local: Tensor, box: Box) -> Tensor:
    """The view of a rank's local tensor that a box describes."""
    return local[tuple(slice(a, a + n) for a, n in zip(box.local, box.shape))]


def balance(sizes: Sequence[int], parts: int) -> list[int]:
    """Which of `parts` takes each item so that sums are about equal: largest first, to the least loaded."""
    loads = [(0, part) for part in range(parts)]
    out = [0] * len(sizes)
    for item in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        load, part = heapq.heappop(loads)
        out[item] = part
        heapq.heappush(loads, (load + sizes[item], part))
    return out
