"""How the ranks of a job find each other: one TCP store, and a roll call in it (`meet/gathering.py`).

Where the launcher names a store (torchrun), it is used. Elsewhere rank 0 binds a free port and tells the others
where: by an MPI broadcast where that is wanted and works, and always in a file of the shared run folder. The file's
name holds job, step and restart, and a reader believes it only when a store of the same key answers there, so
what an earlier life left behind is never used. Nobody falls back to its own host: that would make several
worlds of one.
"""

from __future__ import annotations

import datetime
import ipaddress
import json
import math
import os
import socket
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.errors import LaunchError
from hpctrain.files import write_whole
from hpctrain.launch.life.identity import Identity
from hpctrain.launch.life.process import at_most
from hpctrain.launch.meet.gathering import Examine, judged, roll_call, until
from hpctrain.launch.meet.knock import answers
from hpctrain.launch.meet.rollcall import Arrival, Verdict
from hpctrain.launch.place.routes import interface_of, own_address
from hpctrain.mpi import settle

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

PROBE_S = 3.0
"""How long one address of rank 0 may take to answer."""

_KEY = "hpctrain/key"
_MPI_BYTES = 4096


def meet(
    identity: Identity, folder: Path, arrival: Arrival, timeout_s: float, examine: Examine | None = None
) -> tuple[Store, Verdict]:
    """Find the other ranks. Collective; returns on all ranks, or raises on all that came.

    Args:
        identity: this rank.
        folder: run folder, shared by all nodes.
        arrival: what this rank says of itself.
        timeout_s: longest wait for the others.
        examine: called on rank 0, once all are here.

    Returns:
        A store of this life of the job, and what rank 0 concluded.

    Raises:
        LaunchError: rank 0 cannot be found, ranks are missing, or they do not fit together.
    """
    import torch.distributed as dist

    if identity.world == 1:
        now = time.time()
        verdict = judged({0: replace(arrival, clock=now, told=now)}, {0: now}, 1, 0.0, examine)
        if verdict.error:
            raise LaunchError(verdict.error)
        return dist.HashStore(), verdict  # type: ignore[attr-defined]
    deadline = time.monotonic() + timeout_s
    if identity.master:
        store, address = _named_store(identity, timeout_s), ""
    else:
        store, address = _own_store(identity, folder, deadline, timeout_s)
    store = dist.PrefixStore(f"hpctrain/{identity.key}", store)  # type: ignore[attr-defined]
    verdict = roll_call(store, identity, replace(arrival, address=address), deadline, timeout_s, examine)
    return store, replace(verdict, route=_route(address, verdict.other))


def _route(address: str, other: str) -> str:
    """The interface of this rank's way to rank 0, which on rank 0's host is inside it: then to another one."""
    for own in filter(None, (address, own_address(other) if other else "")):
        if (name := interface_of(own)) and not name.startswith("lo"):
            return name
    return ""


def rendezvous_file(folder: Path, identity: Identity) -> Path:
    """Where rank 0 says in which store to meet."""
    return folder / "rendezvous" / f"{identity.key}.json"


def _named_store(identity: Identity, timeout_s: float) -> Store:
    assert identity.master is not None
    host, port, hosted = identity.master
    serve = identity.rank == 0 and not hosted
    try:
        return _tcp_store(host, port, identity.world, serve, timeout_s)
    except RuntimeError as error:
        what = "serve the store on" if serve else "reach the store on"
        raise LaunchError(
            f"rank {identity.rank} cannot {what} {host}:{port} within {timeout_s:.0f} s "
            f"({str(error).splitlines()[0]}): check MASTER_ADDR and MASTER_PORT, and that rank 0 runs there."
        ) from None


def _tcp_store(host: str, port: int, world: int, serve: bool, timeout_s: float) -> Store:
    import torch.distributed as dist

    timeout = datetime.timedelta(seconds=timeout_s)
    store: Store = dist.TCPStore(host, port, world, serve, timeout, wait_for_workers=False)  # type: ignore[attr-defined]
    return store


def _own_store(identity: Identity, folder: Path, deadline: float, timeout_s: float) -> tuple[Store, str]:
    """The store that rank 0 serves, and the address by which this rank has reached it; "" on rank 0."""
    path = rendezvous_file(folder, identity)
    store: Store | None = None
    note = address = ""
    if identity.rank == 0:
        store = _tcp_store("127.0.0.1", 0, identity.world, True, timeout_s)
        store.set(_KEY, identity.key)
        note = json.dumps({"port": store.port, "hosts": addresses(identity)})  # type: ignore[attr-defined]
        _publish(path, note)
    told = _mpi_broadcast(identity, note, deadline) if identity.mpi else None
    if store is not None:
        return store, ""

    tried: list[str] = []

    def join() -> bool:
        nonlocal store, address
        text = told or _read(path)
        if text is not None:
            store, address = _join(identity, text, timeout_s, tried)
        return store is not None

    if not until(join, deadline) or store is None:
        if tried:
            raise LaunchError(
                f"rank {identity.rank} read {path} but reached rank 0 at none of {', '.join(tried)} within "
                f"{timeout_s:.0f} s: check that rank 0 is alive and that nodes may connect to each other on any port."
            )
        raise LaunchError(
            f"rank {identity.rank} found no {path} within {timeout_s:.0f} s: check that rank 0 is alive, and that "
            f"{folder} is on a file system that all nodes share."
        )
    return store, address


def addresses(identity: Identity) -> list[str]:
    """Where others may reach this host, the likeliest first: names, then addresses of its interfaces."""
    if identity.one_host:
        return ["127.0.0.1"]
    import psutil

    names = [os.environ.get("SLURMD_NODENAME", ""), socket.gethostname()]
    cards = [card for cards in psutil.net_if_addrs().values() for card in cards]
    found = [card.address for family in (socket.AF_INET, socket.AF_INET6) for card in cards if card.family == family]
    return [host for host in dict.fromkeys([*names, *found]) if host and not _is_near(host)]


def _is_near(host: str) -> bool:
    """Whether an address is of no use to other hosts: a loopback, or one that needs to be told an interface."""
    with suppress(ValueError):
        address = ipaddress.ip_address(host.partition("%")[0])
        return address.is_loopback or address.is_link_local
    return False


def _publish(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text, durable=True)
    except OSError as error:
        raise LaunchError(f"rank 0 cannot write {path} ({error.strerror}): the run folder must be writable.") from None


def _read(path: Path) -> str | None:
    # Listing the folder makes NFS look again; a failed open alone may be answered from its cache for a minute.
    with suppress(OSError):
        if path.name in os.listdir(path.parent):
            return path.read_text()
    return None


def _join(identity: Identity, text: str, timeout_s: float, tried: list[str]) -> tuple[Store | None, str]:
    """The store of this life of the job, or None where nobody, or somebody else, listens; and the own address by which
    it was reached."""
    try:
        note = json.loads(text)
        port, hosts = int(note["port"]), list(map(str, note["hosts"]))
    except (ValueError, KeyError, TypeError):
        return None, ""
    named = [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in hosts]
    tried += [where for where in named if where not in tried]
    # TCPStore retries, with warnings, until its timeout: see first whether anybody listens.
    for theirs, own in answers(hosts, port, PROBE_S):
        with suppress(OSError, RuntimeError):
            store = _tcp_store(theirs, port, identity.world, False, PROBE_S)
            if store.check([_KEY]) and store.get(_KEY).decode() == identity.key:
                store.set_timeout(datetime.timedelta(seconds=timeout_s))
                return store, own
    return None, ""


def _mpi_broadcast(identity: Identity, note: str, deadline: float) -> str | None:
    """Rank 0's note through MPI, or None where MPI is not to be had.

    Every call waits for all ranks, and on one of them the library may be missing: after the deadline this process ends.
    MPI is finalized straight away: left for the end, MPI_Finalize of a rank that failed would wait for the others, and
    they for it.
    """
    try:
        import mpi4py

        mpi4py.rc.initialize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError):
        return None
    if MPI.Is_initialized() or not _speaks(MPI.Get_library_version(), identity.mpi):
        return None
    left_s = deadline - time.monotonic()
    with at_most(
        left_s,
        f"rank {identity.rank} waited {left_s:.0f} s in MPI for ranks that did not come: it must work on every node; "
        "without mpi in the profile, ranks meet through the run folder alone.",
    ):
        MPI.Init()
        settle(MPI)
        world: Any = MPI.COMM_WORLD
        told = None
        # A library that does not understand its launcher makes every rank a world of one.
        if (world.Get_rank(), world.Get_size()) == (identity.rank, identity.world):
            buffer = bytearray(note.encode().ljust(_MPI_BYTES))
            until(world.Ibcast(buffer, 0).Test, math.inf)
            told = buffer.decode().strip()
        MPI.Finalize()
    return told


def _speaks(library: str, wire_up: str) -> bool:
    """Whether an MPI library can start under a launcher; one that cannot ends the process."""
    return wire_up == ("pmix" if "Open MPI" in library else "pmi")
