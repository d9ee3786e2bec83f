"""Collectives over one axis. All traffic of ours between ranks goes through here, so it is counted once.

None of these know autograd (`parallel/autograd.py` does). All leave their inputs unchanged unless the name
ends in an underscore. On an axis of one rank they do nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.telemetry.meter import Collective, Meter

T = TypeVar("T")

EXCHANGE_LIMIT = 1 << 20
"""gloo, two ranks: up to this many bytes a pairwise exchange beats its all-reduce (0.4 ms against 2 ms)."""


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
    def pairwise(self) -> bool:
        """Two ranks over gloo."""
        return self.size == 2 and self.group is not None and dist.get_backend(self.group) == "gloo"

    def begin(self, operation: str, size: int | None = None) -> Collective:
        """Take note that this rank begins a collective, and count its payload of `size` bytes if there is one."""
        if size is not None:
            self.meter.sent(operation, self.name, size)
        return self.meter.began(operation, self.name, self.ranks)


class Pending:
    """A collective under way. `wait` returns its result; waiting twice is allowed.

    Args:
        meter: where waiting is counted.
        collective: which one; None where there is nothing to wait for.
        works: of the backend.
        finish: makes the result once they are done.
    """

    def __init__(
        self, meter: Meter, collective: Collective | None, works: list[dist.Work], finish: Callable[[], Tensor]
    ) -> None:
        self._meter, self._collective, self._works, self._finish = meter, collective, works, finish
        self._result: Tensor | None = None

    def wait(self) -> Tensor:
        if self._result is None and self._collective is None:
            self._result = self._finish()
        elif self._result is None and self._collective is not None:
            with self._meter.waiting(self._collective):
                for work in self._works:
                    work.wait()
                self._result = self._finish()
            self._works = []
        assert self._result is not None
        return self._result


def _nbytes(t: Tensor) -> int:
    return t.numel() * t.element_size()


def start_all_reduce_(t: Tensor, axis: Axis, op: str = "sum") -> Pending:
    """Begin to sum (or take the maximum of) `t` over the axis, in place. `t` must be contiguous.

    Every rank ends with the same bits: reductions do not depend on who asks.
    """
    assert t.is_contiguous()
    if axis.size == 1:
        return Pending(axis.meter, None, [], lambda: t)
    begun = axis.begin("all_reduce", _nbytes(t))
    if axis.pairwise and _nbytes(t) <= EXCHANGE_LIMIT:
        return _exchange(t, axis, op, begun)
    reduce_op = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[op]
    work = dist.all_reduce(t, reduce_op, group=axis.group, async_op=True)
    return Pending(axis.meter, begun, [work], lambda: t)


def _exchange(t: Tensor, axis: Axis, op: str, begun: Collective) -> Pending:
    """All-reduce between two ranks as one swap; a + b is b + a bit for bit, so both end equal."""
    peer = axis.ranks[1 - axis.index]
    other = torch.empty_like(t)
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, t, peer, axis.group), dist.P2POp(dist.irecv, other, peer, axis.group)]
    )

    def combine() -> Tensor:
        if op == "sum":
            return t.add_(other)
        return torch.maximum(t, other, out=t)

    return Pending(axis.meter, begun, works, combine)


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
    if axis.size == 1:
        return [t]
    t = t.contiguous()
    out = [torch.empty_like(t) for _ in axis.ranks]
    with axis.meter.waiting(axis.begin("all_gather", _nbytes(t))):
        if axis.pairwise and _nbytes(t) <= EXCHANGE_LIMIT:
            peer = 1 - axis.index
            out[axis.index] = t
            swap = [
                dist.P2POp(dist.isend, t, axis.ranks[peer], axis.group),
                dist.P2POp(dist.irecv, out[peer], axis.ranks[peer], axis.group),
            ]
            for work in dist.batch_isend_irecv(swap):
                work.wait()
        else:
            dist.all_gather(out, t, group=axis.group)
    return out


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
