"""What each operation is in MPI, on arrays of numpy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from hpctrain.comms.backend import Act, Legs, Task, by_messages, nothing, unknown
from hpctrain.comms.memory import Buffer
from hpctrain.errors import ConfigError

HALVES = ("float16", "bfloat16")
"""No MPI standard has them; they are moved as bytes, and not added up."""

_TYPES = {
    "int8": "INT8_T",
    "uint8": "UINT8_T",
    "int32": "INT32_T",
    "int64": "INT64_T",
    "float32": "FLOAT",
    "float64": "DOUBLE",
}
_OPS = {"sum": "SUM", "prod": "PROD", "max": "MAX", "min": "MIN"}


@dataclass(frozen=True)
class MpiGroup:
    """A communicator."""

    ranks: tuple[int, ...]
    index: int
    comm: Any
    mpi: Any

    def call(self, task: Task) -> Act:
        return by_messages(self, task) or _CALLS.get(task.operation, _refuse)(self, task)

    def exchange(self, sends: Legs, receives: Legs) -> Act:
        out = [(self.spec(data), to) for data, to in sends]
        into = [(self.spec(data), of) for data, of in receives]
        if len(out) == len(into) == 1:
            return partial(self.comm.Sendrecv, *out[0], 0, *into[0], 0)
        if len(out) == 1 and not into:
            return partial(self.comm.Send, *out[0])
        if len(into) == 1 and not out:
            return partial(self.comm.Recv, *into[0])
        begin = [partial(self.comm.Irecv, *leg) for leg in into] + [partial(self.comm.Isend, *leg) for leg in out]
        return (lambda: self.mpi.Request.Waitall([one() for one in begin])) if begin else nothing

    def spec(self, data: Buffer) -> list[Any]:
        """An array as mpi4py takes it; of halves, their bytes."""
        name = str(data.dtype)
        return [data, getattr(self.mpi, _TYPES[name])] if name in _TYPES else [data.view("uint8"), self.mpi.BYTE]

    def ends(self, task: Task) -> tuple[list[Any], list[Any]]:
        """Both buffers of an operation."""
        return self.spec(task.buffers.send), self.spec(task.buffers.receive)

    def op(self, task: Task) -> Any:
        """The reduction of a task.

        Raises:
            ConfigError: MPI has none.
        """
        name = task.buffers.dtype
        if name in HALVES:
            raise ConfigError("--dtype", name, "MPI adds up no such numbers", f"use one of {', '.join(_TYPES)}")
        if task.reduction not in _OPS:
            raise ConfigError("--redop", task.reduction, f"MPI has {', '.join(_OPS)}", "use one of these")
        return getattr(self.mpi, _OPS[task.reduction])


def _refuse(group: MpiGroup, task: Task) -> Act:
    raise unknown("MPI", task)


def _all_reduce(group: MpiGroup, task: Task) -> Act:
    send, receive = group.ends(task)
    return partial(group.comm.Allreduce, group.mpi.IN_PLACE if task.buffers.in_place else send, receive, group.op(task))


def _all_gather(group: MpiGroup, task: Task) -> Act:
    send, receive = group.ends(task)
    return partial(group.comm.Allgather, group.mpi.IN_PLACE if task.buffers.in_place else send, receive)


def _reduce_scatter(group: MpiGroup, task: Task) -> Act:
    return partial(group.comm.Reduce_scatter_block, *group.ends(task), group.op(task))


def _all_to_all(group: MpiGroup, task: Task) -> Act:
    send, receive = group.ends(task)
    if not task.matrix:
        return partial(group.comm.Alltoall, send, receive)
    times = 2 if task.buffers.dtype in HALVES else 1  # bytes of an element, where bytes are sent
    out = [n * times for n in task.matrix[group.index]]
    into = [row[group.index] * times for row in task.matrix]
    return partial(group.comm.Alltoallv, [send[0], (out, None), send[1]], [receive[0], (into, None), receive[1]])


def _broadcast(group: MpiGroup, task: Task) -> Act:
    return partial(group.comm.Bcast, group.ends(task)[1], task.root)


def _reduce(group: MpiGroup, task: Task) -> Act:
    send, receive = group.ends(task)
    at_root = group.index == task.root
    first = group.mpi.IN_PLACE if at_root and task.buffers.in_place else send
    return partial(group.comm.Reduce, first, receive if at_root else None, group.op(task), task.root)


def _gather(group: MpiGroup, task: Task) -> Act:
    send, receive = group.ends(task)
    at_root = group.index == task.root
    first = group.mpi.IN_PLACE if at_root and task.buffers.in_place else send
    return partial(group.comm.Gather, first, receive if at_root else None, task.root)


def _scatter(group: MpiGroup, task: Task) -> Act:
    send, receive = group.ends(task)
    at_root = group.index == task.root
    second = group.mpi.IN_PLACE if at_root and task.buffers.in_place else receive
    return partial(group.comm.Scatter, send if at_root else None, second, task.root)


def _barrier(group: MpiGroup, task: Task) -> Act:
    act: Act = group.comm.Barrier
    return act


_CALLS: dict[str, Callable[[MpiGroup, Task], Act]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "all_to_all_v": _all_to_all,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "gather": _gather,
    "scatter": _scatter,
    "barrier": _barrier,
}
