"""A rank from its first line to its process group, and out again."""

from __future__ import annotations

import datetime
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import psutil

from hpctrain.errors import LaunchError
from hpctrain.launch.identity import Identity, threads_per_rank
from hpctrain.launch.rendezvous import meet, rendezvous_file
from hpctrain.launch.rollcall import Arrival

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Store

FAREWELL_S = 20.0
"""How long rank 0 keeps the store for ranks that are still on their way out."""

ANSWER_S = 1.0
"""How long rank 0, having lost a peer, keeps the store for others that ask why."""


class PeerLost(LaunchError):
    """A collective failed because another rank is gone: a consequence, never the cause."""


@dataclass(frozen=True)
class World:
    """What a rank stands on.

    Attributes:
        identity: who it is.
        device: where it computes.
        threads: CPU threads it uses.
        store: shared by all ranks of this life of the job.
        seconds: phase -> its duration: `import` from the start of the process until torch was there,
            `rendezvous` until all ranks had met, `init` until the process group stood.
    """

    identity: Identity
    device: torch.device
    threads: int
    store: Store
    seconds: dict[str, float]


@contextmanager
def process_group(
    identity: Identity,
    folder: Path,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    timeout_s: float = 600.0,
    threads: int = 0,
) -> Iterator[World]:
    """The default process group: gloo on the CPU, NCCL on GPUs. Collective.

    A rank whose body raises should leave with `launch.process.exit_now`: its connections close and its peers
    see `PeerLost` at once. An ordinary exit may wait for collectives in flight, and the peers with it.

    Args:
        identity: from `identity.detect`, or `identity.ALONE`.
        folder: run folder, shared by all nodes.
        device: `cluster.device`.
        timeout_s: longest wait for other ranks, here and in every collective.
        threads: `cluster.threads`.

    Raises:
        LaunchError: no such device, or the ranks did not find each other.
        PeerLost: a collective of the body failed because a peer is gone; names the first failure if known.
    """
    import torch
    import torch.distributed as dist

    clock = _Clock()
    clock.done("import")
    place = _device(device, identity)
    arrival = Arrival(identity.world, socket.gethostname(), tuple(available_cpus()), _uuid(place))
    store, verdict = meet(identity, folder, arrival, timeout_s)
    clock.done("rendezvous")
    share = verdict.sharing[identity.rank]
    count = threads_per_rank(threads, len(arrival.cpus), share)
    torch.set_num_threads(count)
    if identity.one_host:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    cuda = place.type == "cuda"
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        store=dist.PrefixStore("groups", store),  # type: ignore[attr-defined]
        rank=identity.rank,
        world_size=identity.world,
        timeout=datetime.timedelta(seconds=timeout_s),
        device_id=place if cuda else None,
    )
    clock.done("init")
    try:
        yield World(identity, place, count, store, clock.seconds)
    except BaseException as error:
        lost = _report(error, store, identity)
        if lost is not None:
            raise lost from error
        raise
    _part(store, identity, folder, timeout_s)


class _Clock:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = psutil.Process().create_time()

    def done(self, phase: str) -> None:
        now = time.time()
        self.seconds[phase], self._last = now - self._last, now


def available_cpus() -> list[int]:
    """CPUs this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _device(asked: str, identity: Identity) -> torch.device:
    import torch

    if asked == "cpu" or (asked == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count == 0:
        raise LaunchError(
            "cluster.device=cuda, but torch sees no GPU here: run on a GPU node, or set cluster.device=cpu or auto."
        )
    # One visible GPU is the rank's own where the launcher hides the others; the roll call sees if it is not.
    index = identity.local_rank if count > 1 else 0
    if index >= count:
        raise LaunchError(
            f"rank {identity.rank} is number {index} on {socket.gethostname()}, which has {count} visible GPUs: "
            "ask for as many GPUs as ranks on each node, or set cluster.device=cpu."
        )
    place = torch.device("cuda", index)
    torch.cuda.set_device(place)
    return place


def _uuid(place: torch.device) -> str:
    import torch

    return str(torch.cuda.get_device_properties(place).uuid) if place.type == "cuda" else ""


def _report(error: BaseException, store: Store, identity: Identity) -> PeerLost | None:
    """Tell the others why this rank leaves, or find out why one of them left."""
    peer_gone = _is_lost_peer(error)
    with suppress(Exception):  # the store dies with rank 0
        if not peer_gone:
            if store.add("failures", 1) == 1:
                store.set("failure", f"rank {identity.rank} failed first: {type(error).__name__}: {error}")
        elif store.check(["failure"]):
            said = store.get("failure").decode()
            asked = store.add("asked", 1)
            deadline = time.monotonic() + ANSWER_S
            while identity.rank == 0 and asked < identity.world - 1 and time.monotonic() < deadline:
                time.sleep(0.01)  # the others find out from the store, which goes with this rank
                asked = store.add("asked", 0)
            return PeerLost(f"rank {identity.rank} stopped because {said}")
    return PeerLost(f"rank {identity.rank} lost the connection to another rank: {error}") if peer_gone else None


def _is_lost_peer(error: BaseException) -> bool:
    import torch.distributed as dist

    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo/transport" in str(error))


def _part(store: Store, identity: Identity, folder: Path, timeout_s: float) -> None:
    """Take the group down; rank 0, which owns the store, is the last to go."""
    import torch.distributed as dist

    dist.destroy_process_group()
    if identity.world == 1:
        return
    if identity.rank != 0:
        with suppress(RuntimeError):  # rank 0 may have waited long enough
            store.add("left", 1)
        return
    deadline = time.monotonic() + min(timeout_s, FAREWELL_S)
    while store.add("left", 0) < identity.world - 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    with suppress(OSError):
        rendezvous_file(folder, identity).unlink(missing_ok=True)
