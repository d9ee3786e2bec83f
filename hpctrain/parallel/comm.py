"""Collectives over one axis. All traffic of ours between ranks goes through here, so it is counted once.

None of these know autograd (`parallel/autograd.py` does). All leave their inputs unchanged unless the name
ends in an underscore. On an axis of one rank they do nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.telemetry.meter import Meter

T = TypeVar("T")

EXCHANGE_LIMIT = 1 << 20
"""gloo, two ranks: up to this many bytes a pairwise exchange beats its all-reduce (0.4 ms against 2 ms)."""

# torch 2.13 deprecates the older names.
_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Axis:
    """The ranks along one or more parallel axes, seen from one of them.

    Attributes:
        name: for counters and messages, for example `tp` or `dp+cp`.
        ranks: global ranks, ascending.
        index: position of this rank among them.
        group: process group; None where there is one rank.
        meter: where traffic is counted.
    """

    name: str
    ranks: tuple[int, ...]
    index: int
    group: dist.ProcessGroup | None
    meter: Meter

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def others(self) -> list[int]:
        """Positions of the other ranks."""
        return [i for i in range(self.size) if i != self.index]

    @property
    def direct(self) -> bool:
        """Gathers and scatters are sent rank to rank: over gloo, where that beats its collectives at every size."""
        return self.group is not None and dist.get_backend(self.group) == "gloo"

    @property
    def pairwise(self) -> bool:
        """Two ranks over gloo."""
        return self.size == 2 and self.direct


class Pending(Generic[T]):
    """A collective under way. `wait` returns its result; waiting twice is allowed."""

    def __init__(self, axis: Axis, operation: str, works: list[dist.Work], finish: Callable[[], T]) -> None:
        self._axis, self._operation, self._works, self._finish = axis, operation, works, finish
        self._result: T | None = None

    def wait(self) -> T:
        if self._result is None:
            start = time.perf_counter()
            for work in self._works:
                work.wait()
            self._result = self._finish()
            if self._works:
                self._axis.meter.waited(self._operation, self._axis.name, start)
            self._works = []
        return self._result


def ready(result: T, axis: Axis) -> Pending[T]:
    """What needs no collective, in the form of one that has ended."""
    return Pending(axis, "nothing", [], lambda: result)


def _nbytes(t: Tensor) -> int:
    return t.numel() * t.element_size()


def start_all_reduce_(t: Tensor, axis: Axis, op: str = "sum") -> Pending[Tensor]:
    """Begin to sum (or take the maximum of) `t` over the axis, in place. `t` must be contiguous.

    Every rank ends with the same bits: reductions do not depend on who asks.
    """
    assert t.is_contiguous()
    if axis.size == 1:
        return ready(t, axis)
    axis.meter.sent("all_reduce", axis.name, _nbytes(t))
    if axis.pairwise and _nbytes(t) <= EXCHANGE_LIMIT:
        return _exchange(t, axis, op)
    reduce_op = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[op]
    work = dist.all_reduce(t, reduce_op, group=axis.group, async_op=True)
    return Pending(axis, "all_reduce", [work], lambda: t)


def _exchange(t: Tensor, axis: Axis, op: str) -> Pending[Tensor]:
    """All-reduce between two ranks as one swap; a + b is b + a bit for bit, so both end equal."""
    other = torch.empty_like(t)
    works = _trade(t, other, 1 - axis.index, axis)

    def combine() -> Tensor:
        if op == "sum":
            return t.add_(other)
        return torch.maximum(t, other, out=t)

    return Pending(axis, "all_reduce", works, combine)


def _trade(t: Tensor, into: Tensor, i: int, axis: Axis) -> list[dist.Work]:
    """Send a tensor to rank i of the axis and receive another from it. Both contiguous."""
    peer, group = axis.ranks[i], axis.group
    return dist.batch_isend_irecv([dist.P2POp(dist.isend, t, peer, group), dist.P2POp(dist.irecv, into, peer, group)])


def start_all_gather(t: Tensor, axis: Axis) -> Pending[list[Tensor]]:
    """Begin to collect the equally shaped tensors of all ranks of the axis, in their order; each contiguous."""
    t = t.contiguous()
    if axis.size == 1:
        return ready([t], axis)
    axis.meter.sent("all_gather", axis.name, _nbytes(t))
    if axis.direct:
        parts = [t if i == axis.index else torch.empty_like(t) for i in range(axis.size)]
        works = [work for i in axis.others for work in _trade(t, parts[i], i, axis)]
        return Pending(axis, "all_gather", works, lambda: parts)
    stacked = t.new_empty((axis.size, *t.shape))
    work = _gather_single(stacked.view(-1), t.view(-1), group=axis.group, async_op=True)
    return Pending(axis, "all_gather", [work], lambda: list(stacked.unbind()))


def start_reduce_scatter(part: Callable[[int], Tensor], axis: Axis) -> Pending[Tensor]:
    """Begin to sum tensors over the axis of which each rank keeps one.

    Args:
        part: gives what this rank adds to the tensor of rank i of the axis; all equally shaped and contiguous. Where
            ranks send to each other, one is computed while those before it travel, and the rank's own last.
    """
    if axis.size == 1:
        return ready(part(0), axis)
    if not axis.direct:
        stacked = torch.stack([part(i) for i in range(axis.size)])
        axis.meter.sent("reduce_scatter", axis.name, _nbytes(stacked))
        own = torch.empty_like(stacked[0])
        work = _scatter_single(own.view(-1), stacked.view(-1), group=axis.group, async_op=True)
        return Pending(axis, "reduce_scatter", [work], lambda: own)
    works: list[dist.Work] = []
    parts: dict[int, Tensor] = {}
    for i in axis.others:
        outgoing = part(i)
        parts[i] = torch.empty_like(outgoing)
        works += _trade(outgoing, parts[i], i, axis)
    parts[axis.index] = part(axis.index)
    axis.meter.sent("reduce_scatter", axis.name, axis.size * _nbytes(parts[axis.index]))

    def total() -> Tensor:
        out = parts[0] + parts[1]
        for i in range(2, axis.size):
            out += parts[i]
        return out

    return Pending(axis, "reduce_scatter", works, total)


def all_reduce_(t: Tensor, axis: Axis, op: str = "sum") -> Tensor:
    """Sum (or maximum) over the axis, in place."""
    return start_all_reduce_(t, axis, op).wait()


def all_reduce(t: Tensor, axis: Axis, op: str = "sum") -> Tensor:
    """Sum (or maximum) over the axis, as a new tensor; `t` itself on an axis of one rank."""
    if axis.size == 1:
        return t
    return all_reduce_(t.contiguous().clone(), axis, op)


def all_gather(t: Tensor, axis: Axis) -> list[Tensor]:
    """The equally shaped tensors of all ranks of the axis, in their order."""
    return start_all_gather(t, axis).wait()


def gather_objects(value: T, axis: Axis) -> list[T]:
    """The values of all ranks of the axis, in their order. For small, rare things: names, verdicts, errors."""
    if axis.size == 1:
        return [value]
    out: list[Any] = [None] * axis.size
    dist.all_gather_object(out, value, group=axis.group)
    return out


def broadcast_object(value: T, axis: Axis) -> T:
    """The value of the first rank of the axis, on all of them."""
    if axis.size == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=axis.ranks[0], group=axis.group)
    return box[0]


def barrier(axis: Axis) -> None:
    """Wait until every rank of the axis is here."""
    if axis.size > 1:
        all_reduce_(torch.zeros(1, device="cpu" if dist.get_backend(axis.group) == "gloo" else "cuda"), axis)
