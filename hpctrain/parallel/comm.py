"""Collectives over one axis. All traffic of ours between ranks goes through here, so it is counted once.

None of these know autograd (`parallel/autograd.py` does). All leave their inputs unchanged unless the name
ends in an underscore. On an axis of one rank they do nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

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
    def direct(self) -> bool:
        """Gathers and scatters are sent rank to rank: over gloo, where that beats its collectives at every size."""
        return self.group is not None and dist.get_backend(self.group) == "gloo"

    @property
    def pairwise(self) -> bool:
        """Two ranks over gloo."""
        return self.size == 2 and self.direct


class Leg(NamedTuple):
    """One end of a tensor's way between two ranks of an axis: contiguous; overwritten if it is not `send`."""

    tensor: Tensor
    peer: int
    send: bool


class Pending:
    """A collective under way. `wait` returns its result; waiting twice is allowed."""

    def __init__(self, axis: Axis, operation: str, works: list[dist.Work], finish: Callable[[], Tensor]) -> None:
        self._axis, self._operation, self._works, self._finish = axis, operation, works, finish
        self._result: Tensor | None = None

    @property
    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._result is not None or all(work.is_completed() for work in self._works)

    def wait(self) -> Tensor:
        if self._result is None:
            start = time.perf_counter()
            for work in self._works:
                work.wait()
            self._result = self._finish()
            if self._works:
                self._axis.meter.waited(self._operation, self._axis.name, start)
            self._works = []
        return self._result


def ready(t: Tensor, axis: Axis) -> Pending:
    """What needs no collective, in the form of one that has ended."""
    return Pending(axis, "nothing", [], lambda: t)


def _nbytes(t: Tensor) -> int:
    return t.numel() * t.element_size()


def start_all_reduce_(t: Tensor, axis: Axis, op: str = "sum") -> Pending:
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


def _exchange(t: Tensor, axis: Axis, op: str) -> Pending:
    """All-reduce between two ranks as one swap; a + b is b + a bit for bit, so both end equal."""
    other = torch.empty_like(t)
    works = _swap([t, t], [other, other], axis)

    def combine() -> Tensor:
        if op == "sum":
            return t.add_(other)
        return torch.maximum(t, other, out=t)

    return Pending(axis, "all_reduce", works, combine)


def _swap(outgoing: Sequence[Tensor], incoming: Sequence[Tensor], axis: Axis) -> list[dist.Work]:
    """Send every other rank of the axis its tensor and receive one from it. All contiguous."""
    swaps = []
    for i, peer in enumerate(axis.ranks):
        if i != axis.index:
            swaps.append(dist.P2POp(dist.isend, outgoing[i], peer, axis.group))
            swaps.append(dist.P2POp(dist.irecv, incoming[i], peer, axis.group))
    return dist.batch_isend_irecv(swaps)


def start_all_gather(t: Tensor, axis: Axis, dim: int) -> Pending:
    """Begin to join the equally shaped tensors of all ranks of the axis along a dim, in their order."""
    if axis.size == 1:
        return ready(t, axis)
    axis.meter.sent("all_gather", axis.name, _nbytes(t))
    t = t.contiguous()
    if axis.direct:
        parts = [t if i == axis.index else torch.empty_like(t) for i in range(axis.size)]
        return Pending(axis, "all_gather", _swap([t] * axis.size, parts, axis), lambda: torch.cat(parts, dim))
    stacked = t.new_empty((axis.size, *t.shape))
    work = _gather_single(stacked.flatten(0, 1), t, group=axis.group, async_op=True)
    return Pending(axis, "all_gather", [work], lambda: stacked.movedim(0, dim).flatten(dim, dim + 1))


def start_reduce_scatter(t: Tensor, axis: Axis, dim: int) -> Pending:
    """Begin to sum `t` over the axis and to keep this rank's part of the sum: one of equal parts along a dim."""
    if axis.size == 1:
        return ready(t, axis)
    assert t.shape[dim] % axis.size == 0, (t.shape, dim, axis.size)
    axis.meter.sent("reduce_scatter", axis.name, _nbytes(t))
    if not axis.direct:
        stacked = torch.stack(t.chunk(axis.size, dim))
        part = torch.empty_like(stacked[0])
        work = _scatter_single(part, stacked.flatten(0, 1), group=axis.group, async_op=True)
        return Pending(axis, "reduce_scatter", [work], lambda: part)
    outgoing = [part.contiguous() for part in t.chunk(axis.size, dim)]
    parts = [t if i == axis.index else torch.empty_like(t) for i, t in enumerate(outgoing)]

    def total() -> Tensor:
        out = parts[0] + parts[1]
        for part in parts[2:]:
            out += part
        return out

    return Pending(axis, "reduce_scatter", _swap(outgoing, parts, axis), total)


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
    return list(start_all_gather(t[None], axis, 0).wait().unbind())


def start_exchange(legs: Sequence[Leg], axis: Axis) -> list[Pending]:
    """Begin to send and receive tensors between ranks of the axis, all at once; `peer` is an index of it.

    Two ranks send to each other in the order in which they receive. Returns one pending for each leg.
    """
    for leg in legs:
        assert leg.tensor.is_contiguous()
        if leg.send:
            axis.meter.sent("send", axis.name, _nbytes(leg.tensor))
    call = {True: dist.isend, False: dist.irecv}
    works = dist.batch_isend_irecv(
        [dist.P2POp(call[leg.send], leg.tensor, axis.ranks[leg.peer], axis.group) for leg in legs]
    )
    if len(works) < len(legs):  # NCCL has one for all
        works = works * len(legs)
    names = {True: "send", False: "receive"}
    return [
        Pending(axis, names[leg.send], [work], lambda leg=leg: leg.tensor)  # type: ignore[misc]
        for leg, work in zip(legs, works)
    ]


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
