"""A rank from its first line to its process group, and out again."""

from __future__ import annotations

import datetime
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import psutil

from hpctrain.errors import LaunchError
from hpctrain.launch.life.identity import Identity, threads_per_rank
from hpctrain.launch.life.process import fail_now
from hpctrain.launch.meet.rendezvous import meet, rendezvous_file
from hpctrain.launch.meet.rollcall import Arrival
from hpctrain.launch.meet.watchdog import FAILURE, SILENCE_S, PeerLost, Watchdog, tell_failure
from hpctrain.launch.place.bind import Binding, bind, settled
from hpctrain.launch.place.device import addresses, choose, names_of
from hpctrain.launch.place.machine import allowed_cpus
from hpctrain.launch.place.tablefile import JobTable
from hpctrain.launch.proof.witness import Witness
from hpctrain.telemetry.meter import Meter

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Store

FAREWELL_S = 20.0
"""How long rank 0 keeps the store for ranks on their way out, and others stay for those on their way in."""

ALL_JOINED = "all in group"
"""In the store once every rank has joined the group."""

ANSWER_S = 1.0
"""How long rank 0, having lost a peer, keeps the store for others that ask why."""

MARGIN_S = 15.0
"""The groups' own timeout is longer by so much than `cluster.timeout_s`, so that the watchdog, which can name the rank
that is missing, comes first."""

STORE_S = 5.0
"""How long the store may take to answer a rank that is on its way out."""


@dataclass(frozen=True)
class World:
    """What a rank stands on.

    Attributes:
        identity: who it is.
        device: where it computes.
        threads: CPU threads it uses.
        store: shared by all ranks of this life of the job.
        meter: counters of this rank, which the watchdog reads too.
        group_timeout_s: for further process groups.
        seconds: phase -> its duration: `import` from the start of the process until torch was there,
            `rendezvous` until all ranks had met, `init` until the process group stood.
        proof: what rank 0 says about where all ranks are; "" on others, and where none was made.
    """

    identity: Identity
    device: torch.device
    threads: int
    store: Store
    meter: Meter
    group_timeout_s: float
    seconds: dict[str, float]
    proof: str = ""


@contextmanager
def process_group(
    identity: Identity,
    folder: Path,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    timeout_s: float = 600.0,
    threads: int = 0,
    silence_s: float = SILENCE_S,
    proves: bool = True,
    bound: tuple[JobTable, Binding] | None = None,
) -> Iterator[World]:
    """The default process group: gloo on the CPU, NCCL on GPUs. Collective.

    Before anything of torch, each rank takes the place that the rank table has for it, if there is one
    (`launch/place/bind.py`); and before the group is made, rank 0 holds all of them against it
    (`launch/proof/verdict.py`).

    While the body runs, the ranks watch each other (`launch/meet/watchdog.py`): one that hangs is named and ends
    the job.

    A rank whose body raises should leave with `launch.life.process.exit_now`: its connections close and its peers
    see `PeerLost` at once. An ordinary exit may wait for collectives in flight, and the peers with it.

    Args:
        identity: from `identity.detect`, or `identity.ALONE`.
        folder: run folder, shared by all nodes.
        device: `cluster.device`.
        timeout_s: longest wait for other ranks, here and in every collective.
        threads: `cluster.threads`.
        silence_s: after which a rank that others wait for counts as hung.
        proves: whether ranks that are not where they are to be stop the job.
        bound: the place that this rank has taken already; None: it takes it now.

    Raises:
        LaunchError: no such device, the ranks did not find each other, or are not where they are to be.
        PeerLost: a collective of the body failed because a peer is gone; names the first failure if known.
    """
    clock = _Clock()
    bound = bound or bind(identity)
    import torch
    import torch.distributed as dist

    clock.done("import")
    bound, place = settle(identity, device, bound)
    witness = Witness(identity, folder, bound, proves)
    uuid, pci = names_of(place)
    report = witness.report(uuid, pci)
    arrival = Arrival(identity.world, socket.gethostname(), allowed_cpus(), uuid, report)
    store, verdict = meet(identity, folder, arrival, timeout_s, witness.examine)
    clock.done("rendezvous")
    share = verdict.sharing[identity.rank]
    count = threads_per_rank(threads, len(arrival.cpus), share)
    torch.set_num_threads(count)
    if identity.one_host:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    elif verdict.route:  # left to itself gloo looks its own host up by name, which may be known to other hosts alone
        os.environ.setdefault("GLOO_SOCKET_IFNAME", verdict.route)
    cuda = place.type == "cuda"
    backend = "nccl" if cuda else "gloo"
    try:
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("groups", store),  # type: ignore[attr-defined]
            rank=identity.rank,
            world_size=identity.world,
            timeout=datetime.timedelta(seconds=timeout_s + MARGIN_S),
            device_id=place if cuda else None,
        )
    except RuntimeError as error:
        variable = f"{backend.upper()}_SOCKET_IFNAME"
        raise LaunchError(
            f"rank {identity.rank} on {socket.gethostname()} cannot join the process group "
            f"({str(error).splitlines()[0]}): check {variable}={os.environ.get(variable, '')!r}, which must name a "
            "network interface of this node that the other nodes reach."
        ) from None
    _joined(store, identity)
    clock.done("init")
    meter = Meter(asynchronous=cuda)
    dog: Watchdog | None = None
    if identity.world > 1:
        dog = Watchdog(store, identity.rank, identity.world, meter, timeout_s, fail_now, silence_s)
        dog.start()
    try:
        yield World(identity, place, count, store, meter, timeout_s + MARGIN_S, clock.seconds, witness.summary)
    except BaseException as error:
        lost = _report(error, store, identity, dog)
        if lost is not None:
            raise lost from error
        raise
    if dog is not None:
        dog.stop()
    _part(store, identity, folder, timeout_s)


def settle(
    identity: Identity, device: Literal["auto", "cpu", "cuda"], bound: tuple[JobTable, Binding] | None
) -> tuple[tuple[JobTable, Binding] | None, torch.device]:
    """The place of a rank once torch is there, and the device that it computes on.

    Raises:
        LaunchError: there is no such device.
    """
    if bound is not None and device != "cpu" and (seen := addresses()):
        bound = settled(bound, identity, seen)
    return bound, choose(device, identity, bound[1] if bound else None)


class _Clock:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = psutil.Process().create_time()

    def done(self, phase: str) -> None:
        now = time.time()
        self.seconds[phase], self._last = now - self._last, now


def _report(error: BaseException, store: Store, identity: Identity, dog: Watchdog | None) -> PeerLost | None:
    """Tell the others why this rank leaves, or find out why one of them left."""
    if not _is_lost_peer(error):
        own = f"rank {identity.rank} failed first: {type(error).__name__}: {error}"
        _within(STORE_S, lambda: tell_failure(store, own))
        return None
    said = _within(STORE_S, lambda: _failure(store, identity))
    if not said and dog is not None and (said := dog.lost()):
        _within(STORE_S, lambda: tell_failure(store, said))
    if said:
        return PeerLost(f"rank {identity.rank} stopped because {said}")
    return PeerLost(f"rank {identity.rank} lost the connection to another rank: {error}")


def _failure(store: Store, identity: Identity) -> str:
    """What failed first, if that is known; rank 0, with which the store goes, waits until all have asked."""
    if not store.check([FAILURE]):
        return ""
    said = store.get(FAILURE).decode()
    asked = store.add("asked", 1)
    deadline = time.monotonic() + ANSWER_S
    while identity.rank == 0 and asked < identity.world - 1 and time.monotonic() < deadline:
        time.sleep(0.01)
        asked = store.add("asked", 0)
    return said


def _within(limit_s: float, action: Callable[[], str | None]) -> str:
    """What an action says; nothing where it fails or takes too long. The store does not answer where rank 0 is stopped,
    and goes with rank 0."""
    said: list[str] = []

    def run() -> None:
        with suppress(Exception):
            said.append(action() or "")

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(limit_s)
    return said[0] if said else ""


def _is_lost_peer(error: BaseException) -> bool:
    import torch.distributed as dist

    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo/transport" in str(error))


def _joined(store: Store, identity: Identity) -> None:
    """Count this rank among those that have joined; the last one tells all."""
    if identity.world > 1 and store.add("in group", 1) == identity.world:
        store.set(ALL_JOINED, "1")


def _part(store: Store, identity: Identity, folder: Path, timeout_s: float) -> None:
    """Take the group down; rank 0, which owns the store, is the last to go.

    One that has nothing to do may be done before others have joined, whose connections it would close under them.
    """
    import torch.distributed as dist

    patience = min(timeout_s, FAREWELL_S)
    if identity.world > 1:
        with suppress(RuntimeError):  # who has not joined by then has failed
            store.wait([ALL_JOINED], datetime.timedelta(seconds=patience))
    dist.destroy_process_group()
    if identity.world == 1:
        return
    if identity.rank != 0:
        with suppress(RuntimeError):  # rank 0 may have waited long enough
            store.add("left", 1)
        return
    deadline = time.monotonic() + patience
    while store.add("left", 0) < identity.world - 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    with suppress(OSError):
        rendezvous_file(folder, identity).unlink(missing_ok=True)
