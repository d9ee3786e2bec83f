"""Collectives over one axis. All traffic of ours between ranks goes through here, so it is counted once.

None of these know autograd (`parallel/autograd.py` does). All leave their inputs unchanged unless the name
ends in an underscore. On an axis of one rank they do nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.telemetry.meter import Collective, Meter

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
        """Gathers and scatters are sent rank to rank: over gloo, where parts are then worked on while others travel."""
        return self.group is not None and dist.get_backend(self.group) == "gloo"

    @property
    def pairwise(self) -> bool:
        """Two ranks over gloo."""
        return self.size == 2 and self.direct

    def begin(self, operation: str, size: int | None = None) -> Collective:
        """Take note that this rank begins a collective, and count its payload of `size` bytes if there is one."""
        if size is not None:
            self.meter.sent(operation, self.name, size)
        return self.meter.began(operation, self.name, self.ranks)


class Leg(NamedTuple):
    """One end of a tensor's way between two ranks of an axis: contiguous; overwritten if it is not `send`."""

    tensor: Tensor
    peer: int
    send: bool


class Pending(Generic[T]):
    """A collective under way. `wait` returns its result; waiting twice is allowed.

    Args:
        meter: where waiting is counted.
        collective: which one; None where there is nothing to wait for.
        works: of the backend.
        finish: makes the result once they are done.
    """

    def __init__(
        self, meter: Meter, collective: Collective | None, works: list[dist.Work], finish: Callable[[], T]
    ) -> None:
        self._meter, self._collective, self._works = meter, collective, works
        self._finish: Callable[[], T] | None = finish
        self._begun = time.perf_counter()
        if meter.asynchronous and works:
            meter.in_flight = works
        self._result: T | None = None

    @property
    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._result is not None or all(work.is_completed() for work in self._works)

    def wait(self) -> T:
        if self._finish is not None and self._collective is None:
            self._result = self._finish()
        elif self._finish is not None and self._collective is not None:
            with self._meter.waiting(self._collective, self._begun):
                for work in self._works:
                    work.wait()
                self._result = self._finish()
        self._works, self._finish = [], None  # and the buffers that they hold
        assert self._result is not None
        return self._result


def ready(result: T, axis: Axis) -> Pending[T]:
    """What needs no collective, in the form of one that has ended."""
    return Pending(axis.meter, None, [], lambda: result)


def _nbytes(t: Tensor) -> int:
    return t.numel() * t.element_size()


def start_all_reduce_(t: Tensor, axis: Axis, op: str = "sum") -> Pending[Tensor]:
    """Begin to sum (or take the maximum of) `t` over the axis, in place. `t` must be contiguous.

    Every rank ends with the same bits: reductions do not depend on who asks.
    """
    assert t.is_contiguous()
    if axis.size == 1:
        return ready(t, axis)
    begun = axis.begin("all_reduce", _nbytes(t))
    if axis.pairwise and _nbytes(t) <= EXCHANGE_LIMIT:
        return _exchange(t, axis, op, begun)
    reduce_op = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[op]
    work = dist.all_reduce(t, reduce_op, group=axis.group, async_op=True)
    return Pending(axis.meter, begun, [work], lambda: t)


def _exchange(t: Tensor, axis: Axis, op: str, begun: Collective) -> Pending[Tensor]:
    """All-reduce between two ranks as one swap; a + b is b + a bit for bit, so both end equal."""
    other = torch.empty_like(t)
    works = _trade(t, other, 1 - axis.index, axis)

    def combine() -> Tensor:
        if op == "sum":
            return t.add_(other)
        return torch.maximum(t, other, out=t)

    return Pending(axis.meter, begun, works, combine)


def _trade(t: Tensor, into: Tensor, i: int, axis: Axis) -> list[dist.Work]:
    """Send a tensor to rank i of the axis and receive another from it, both contiguous; what is empty is not sent."""
    peer, group = axis.ranks[i], axis.group
    legs = [dist.P2POp(call, leg, peer, group) for call, leg in ((dist.isend, t), (dist.irecv, into)) if leg.numel()]
    return dist.batch_isend_irecv(legs) if legs else []


def start_all_gather(t: Tensor, axis: Axis) -> Pending[list[Tensor]]:
    """Begin to collect the equally shaped tensors of all ranks of the axis, in their order; each contiguous."""
    t = t.contiguous()
    if axis.size == 1:
        return ready([t], axis)
    begun = axis.begin("all_gather", _nbytes(t))
    if axis.direct:
        parts = [t if i == axis.index else torch.empty_like(t) for i in range(axis.size)]
        works = [work for i in axis.others for work in _trade(t, parts[i], i, axis)]
        return Pending(axis.meter, begun, works, lambda: parts)
    stacked = t.new_empty((axis.size, *t.shape))
    work = _gather_single(stacked.view(-1), t.view(-1), group=axis.group, async_op=True)
    return Pending(axis.meter, begun, [work], lambda: list(stacked.unbind()))


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
        begun = axis.begin("reduce_scatter", _nbytes(stacked))
        own = torch.empty_like(stacked[0])
        work = _scatter_single(own.view(-1), stacked.view(-1), group=axis.group, async_op=True)
        return Pending(axis.meter, begun, [work], lambda: own)
    begun = axis.begin("reduce_scatter")
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

    return Pending(axis.meter, begun, works, total)


def start_all_gather_into(whole: Tensor, axis: Axis) -> Pending[Tensor]:
    """Begin to collect the parts of all ranks of the axis in one flat tensor, in which this rank's lies already."""
    parts = whole.view(axis.size, -1)
    own = parts[axis.index]
    begun = axis.begin("all_gather", _nbytes(own))
    if axis.direct:
        works = [work for i in axis.others for work in _trade(own, parts[i], i, axis)]
    else:
        works = [_gather_single(whole, own, group=axis.group, async_op=True)]
    return Pending(axis.meter, begun, works, lambda: whole)


def start_reduce_scatter_into(own: Tensor, whole: Tensor, axis: Axis) -> Pending[Tensor]:
    """Begin to sum a flat tensor over the axis, of which `own` is to be this rank's part; `whole` stays as it is.

    Ranks that send to each other add in the order of the ranks, wherever an element lies.
    """
    begun = axis.begin("reduce_scatter", _nbytes(whole))
    if not axis.direct:
        works = [_scatter_single(own, whole, group=axis.group, async_op=True)]
        return Pending(axis.meter, begun, works, lambda: own)
    parts = whole.view(axis.size, -1)
    coming = [part if i == axis.index else torch.empty_like(own) for i, part in enumerate(parts)]
    works = [work for i in axis.others for work in _trade(parts[i], coming[i], i, axis)]

    def total() -> Tensor:
        torch.add(coming[0], coming[1], out=own)
        for part in coming[2:]:
            own.add_(part)
        return own

    return Pending(axis.meter, begun, works, total)


def start_all_to_all(t: Tensor, axis: Axis) -> Pending[Tensor]:
    """Begin to send `t[i]` to rank i of the axis, and to receive from it what becomes row i of the result.

    Args:
        t: [size of the axis, ...], equally shaped on all ranks.
    """
    ones = [1] * axis.size
    return start_exchange_rows(t, ones, ones, axis)


def start_exchange_rows(x: Tensor, sends: Sequence[int], receives: Sequence[int], axis: Axis) -> Pending[Tensor]:
    """Begin to send rows (of dim 0) to every rank of the axis, to each its own number of them.

    Args:
        x: the rows for rank 0 of the axis, then those for rank 1, and so on.
        sends: how many go to each rank, this one included.
        receives: how many come from each.

    Returns:
        the rows that came, in the order of the ranks.
    """
    assert sum(sends) == len(x) and len(sends) == len(receives) == axis.size, (len(x), sends, receives)
    if axis.size == 1:
        return ready(x, axis)
    begun = axis.begin("all_to_all", _nbytes(x))
    return _swap(x.contiguous(), sends, receives, axis, begun)


def start_gather_rows(x: Tensor, sizes: Sequence[int], axis: Axis) -> Pending[Tensor]:
    """Begin to collect the rows of all ranks, of which each has its own number, in the order of the ranks."""
    assert sizes[axis.index] == len(x), (len(x), sizes)
    if axis.size == 1:
        return ready(x, axis)
    begun = axis.begin("all_gather", _nbytes(x))
    return _swap(x.contiguous(), None, sizes, axis, begun)


def start_scatter_rows(x: Tensor, sizes: Sequence[int], axis: Axis) -> Pending[Tensor]:
    """Begin to sum equally shaped tensors over the axis, of which each rank keeps its own number of rows."""
    assert sum(sizes) == len(x), (len(x), sizes)
    if axis.size == 1:
        return ready(x, axis)
    begun, own = axis.begin("reduce_scatter", _nbytes(x)), sizes[axis.index]
    coming = _swap(x.contiguous(), sizes, [own] * axis.size, axis, begun)
    return Pending(axis.meter, None, [], lambda: coming.wait().view(axis.size, own, *x.shape[1:]).sum(0))


def _swap(
    x: Tensor, sends: Sequence[int] | None, receives: Sequence[int], axis: Axis, begun: Collective
) -> Pending[Tensor]:
    """Begin to send each rank its rows of x, or all of them where `sends` is None, and to receive as many as said."""
    out = x.new_empty((sum(receives), *x.shape[1:]))
    if axis.direct:
        parts = [x] * axis.size if sends is None else list(torch.split(x, list(sends)))
        into = torch.split(out, list(receives))
        into[axis.index].copy_(parts[axis.index])
        works = [work for i in axis.others for work in _trade(parts[i], into[i], i, axis)]
    else:
        whole = torch.cat([x] * axis.size) if sends is None else x
        sizes = [len(x)] * axis.size if sends is None else list(sends)
        works = [dist.all_to_all_single(out, whole, list(receives), sizes, axis.group, async_op=True)]
    return Pending(axis.meter, begun, works, lambda: out)


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


def start_exchange(legs: Sequence[Leg], axis: Axis) -> list[Pending[Tensor]]:
    """Begin to send and receive tensors between ranks of the axis, all at once; `peer` is an index of it.

    Two ranks send to each other in the order in which they receive. Returns one pending for each leg.
    """
    call, begun = {True: dist.isend, False: dist.irecv}, []
    for leg in legs:
        assert leg.tensor.is_contiguous()
        here, there = axis.ranks[axis.index], axis.ranks[leg.peer]
        if leg.send:
            axis.meter.sent("send", axis.name, _nbytes(leg.tensor))
        way = (here, there) if leg.send else (there, here)
        begun.append(axis.meter.began("send" if leg.send else "receive", axis.name, way))
    works = dist.batch_isend_irecv(
        [dist.P2POp(call[leg.send], leg.tensor, axis.ranks[leg.peer], axis.group) for leg in legs]
    )
    if len(works) < len(legs):  # NCCL has one for all
        works = works * len(legs)
    return [
        Pending(axis.meter, collective, [work], lambda leg=leg: leg.tensor)  # type: ignore[misc]
        for leg, collective, work in zip(legs, begun, works)
    ]


def gather_objects(value: T, axis: Axis) -> list[T]:
    """The values of all ranks of the axis, in their order. For small, rare things: names, verdicts, errors."""
    if axis.size == 1:
        return [value]
    out: list[Any] = [None] * axis.size
    with axis.meter.waiting(axis.begin("gather_objects")):
        dist.all_gather_object(out, value, group=axis.group)
    return out


def broadcast_object(value: T, axis: Axis) -> T:
    """The value of the first rank of the axis, on all of them."""
    if axis.size == 1:
        return value
    box = [value]
    with axis.meter.waiting(axis.begin("broadcast_object")):
        dist.broadcast_object_list(box, src=axis.ranks[0], group=axis.group)
    return box[0]


def barrier(axis: Axis) -> None:
    """Wait until every rank of the axis is here."""
    if axis.size > 1:
        all_reduce_(torch.zeros(1, device="cpu" if dist.get_backend(axis.group) == "gloo" else "cuda"), axis)
