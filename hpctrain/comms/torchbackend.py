"""NCCL and gloo, through torch.distributed."""

from __future__ import annotations

import datetime
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from hpctrain.comms.backend import IN, OUT, Act, Group, Legs, Task, by_messages, nothing, unknown
from hpctrain.comms.torchmemory import TorchMemory
from hpctrain.errors import ConfigError
from hpctrain.launch.life.identity import Identity
from hpctrain.launch.rank.bootstrap import World, process_group

T = TypeVar("T")

# torch 2.13 deprecates the older names.
_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

REDUCTIONS = {
    "sum": dist.ReduceOp.SUM,
    "prod": dist.ReduceOp.PRODUCT,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "avg": dist.ReduceOp.AVG,
}
PLACEMENTS = {
    **dict.fromkeys(("all_reduce", "broadcast", "reduce"), (IN,)),
    **dict.fromkeys(("all_gather", "reduce_scatter"), (OUT, IN)),
}
"""torch.distributed has one buffer for the first three."""


@dataclass(frozen=True)
class TorchGroup:
    """A process group."""

    ranks: tuple[int, ...]
    index: int
    group: dist.ProcessGroup
    device: torch.device

    def call(self, task: Task) -> Act:
        return by_messages(self, task) or _CALLS.get(task.operation, _refuse)(self, task)

    def exchange(self, sends: Legs, receives: Legs) -> Act:
        if not sends and not receives:
            return nothing
        begin: Callable[[], Sequence[Any]]
        if self.device.type == "cuda":  # one group of sends and receives, or they wait for each other
            legs = [dist.P2POp(dist.isend, t, self.ranks[to], self.group) for t, to in sends]
            legs += [dist.P2POp(dist.irecv, t, self.ranks[of], self.group) for t, of in receives]
            begin = partial(dist.batch_isend_irecv, legs)
        else:  # less on the way than through P2POp
            several = [partial(self.group.send, [t], to, 0) for t, to in sends]
            several += [partial(self.group.recv, [t], of, 0) for t, of in receives]
            begin = partial(_begun, several)

        def act() -> None:
            for work in begin():
                work.wait()

        return act


def _begun(several: Sequence[Callable[[], Any]]) -> list[Any]:
    return [one() for one in several]


def _refuse(group: TorchGroup, task: Task) -> Act:
    raise unknown(dist.get_backend(group.group), task)


def _all_reduce(group: TorchGroup, task: Task) -> Act:
    op, data, pg = REDUCTIONS[task.reduction], task.buffers.receive, group.group
    return lambda: dist.all_reduce(data, op, pg)


def _all_gather(group: TorchGroup, task: Task) -> Act:
    send, receive, pg = task.buffers.send, task.buffers.receive, group.group
    return lambda: _gather_single(receive, send, group=pg)


def _reduce_scatter(group: TorchGroup, task: Task) -> Act:
    op, send, receive, pg = REDUCTIONS[task.reduction], task.buffers.send, task.buffers.receive, group.group
    return lambda: _scatter_single(receive, send, op, group=pg)


def _all_to_all(group: TorchGroup, task: Task) -> Act:
    send, receive, pg = task.buffers.send, task.buffers.receive, group.group
    if not task.matrix:
        return lambda: dist.all_to_all_single(receive, send, group=pg)
    into, out = [row[group.index] for row in task.matrix], list(task.matrix[group.index])
    return lambda: dist.all_to_all_single(receive, send, into, out, group=pg)


def _broadcast(group: TorchGroup, task: Task) -> Act:
    data, root, pg = task.buffers.receive, group.ranks[task.root], group.group
    return lambda: dist.broadcast(data, root, pg)


def _reduce(group: TorchGroup, task: Task) -> Act:
    op, data, root, pg = REDUCTIONS[task.reduction], task.buffers.send, group.ranks[task.root], group.group
    return lambda: dist.reduce(data, root, op, pg)


def _gather(group: TorchGroup, task: Task) -> Act:
    send, root, pg = task.buffers.send, group.ranks[task.root], group.group
    parts = list(task.buffers.receive.split(task.count)) if group.index == task.root else None  # type: ignore[no-untyped-call]
    return lambda: dist.gather(send, parts, root, pg)


def _scatter(group: TorchGroup, task: Task) -> Act:
    receive, root, pg = task.buffers.receive, group.ranks[task.root], group.group
    parts = list(task.buffers.send.split(task.count)) if group.index == task.root else None  # type: ignore[no-untyped-call]
    return lambda: dist.scatter(receive, parts, root, pg)


def _barrier(group: TorchGroup, task: Task) -> Act:
    pg, ids = group.group, [group.device.index] if group.device.type == "cuda" else None
    return lambda: dist.barrier(pg, device_ids=ids)


_CALLS: dict[str, Callable[[TorchGroup, Task], Act]] = {
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


class TorchParty:
    """The default process group, and further ones in it."""

    def __init__(self, world: World | None, backend: str, device: torch.device, timeout_s: float) -> None:
        from hpctrain.telemetry.meter import Meter

        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.local_rank = world.identity.local_rank if world else self.rank
        self.hosts: Sequence[str] = ()
        self.backend, self.device, self.memory = backend, device, TorchMemory(device)
        self.meter = world.meter if world else Meter()
        self.timeout = datetime.timedelta(seconds=timeout_s)
        self._made: dict[tuple[bool, tuple[tuple[int, ...], ...]], Group | None] = {}
        nccl = torch.cuda.nccl.version() if backend == "nccl" else ()  # type: ignore[no-untyped-call]
        self.library = f"NCCL {'.'.join(map(str, nccl))}" if nccl else f"gloo of torch {torch.__version__}"

    def groups(self, partition: Sequence[tuple[int, ...]], apart: bool = False) -> Group | None:
        key = apart, tuple(partition)
        if key not in self._made:
            self._made[key] = None
            for ranks in partition:
                whole = not apart and ranks == tuple(range(self.world))
                made = dist.group.WORLD if whole else dist.new_group(list(ranks), timeout=self.timeout)
                if self.rank in ranks:
                    assert made is not None
                    self._made[key] = TorchGroup(ranks, ranks.index(self.rank), made, self.device)
        return self._made[key]

    def threads(self, several: bool) -> str:
        return ""  # process groups take calls of any thread; those that are used at once are apart

    def placements(self, operation: str) -> tuple[str, ...]:
        return PLACEMENTS.get(operation, (OUT,))

    def gather(self, value: T) -> list[T]:
        out: list[Any] = [None] * self.world
        with self.meter.waiting(self.meter.began("gather", "world", tuple(range(self.world)))):
            dist.all_gather_object(out, value)
        return out

    def barrier(self) -> None:
        with self.meter.waiting(self.meter.began("barrier", "world", tuple(range(self.world)))):
            dist.barrier(device_ids=[self.device.index] if self.device.type == "cuda" else None)


@contextmanager
def torch_party(identity: Identity, folder: Path, backend: str, timeout_s: float, threads: int) -> Iterator[TorchParty]:
    """All ranks over NCCL or gloo. Collective.

    Raises:
        ConfigError: NCCL where there are no GPUs, or more ranks than GPUs on a node.
    """
    if backend == "nccl" and torch.cuda.device_count() < identity.local_world:
        raise ConfigError(
            "--backend",
            "nccl",
            f"needs a GPU a rank, and {socket.gethostname()} has {torch.cuda.device_count()} "
            f"for {identity.local_world} ranks",
            "use --backend gloo, or fewer ranks a node",
        )
    kind = "cuda" if backend == "nccl" else "cpu"
    with process_group(identity, folder, kind, timeout_s, threads) as world:  # type: ignore[arg-type]
        yield TorchParty(world, backend, world.device, world.group_timeout_s)
