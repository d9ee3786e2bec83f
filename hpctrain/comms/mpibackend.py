"""MPI, through mpi4py. Ranks are started by mpirun, or by srun with a PMI; no torch is loaded in them."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from hpctrain.comms.backend import IN, OUT, Group
from hpctrain.comms.mpicalls import MpiGroup
from hpctrain.comms.numpymemory import NumpyMemory
from hpctrain.comms.plainstore import PlainStore, serving
from hpctrain.errors import ConfigError, LaunchError
from hpctrain.launch.life.identity import Identity
from hpctrain.launch.life.process import at_most, fail_now
from hpctrain.launch.meet.rendezvous import addresses
from hpctrain.launch.meet.rollcall import Arrival, judge
from hpctrain.launch.meet.watchdog import SILENCE_S, Watchdog
from hpctrain.launch.place.bind import bind
from hpctrain.launch.place.machine import allowed_cpus
from hpctrain.launch.proof.witness import Witness
from hpctrain.mpi import settle
from hpctrain.telemetry.meter import Meter

T = TypeVar("T")

START_S = 300.0
"""In which MPI has to come up, and its ranks to hear of each other."""

_BOTH = ("all_reduce", "all_gather", "reduce", "gather", "scatter")
"""In place too. Of reduce_scatter MPI leaves the result at the beginning of the buffer, not at the rank's part."""


LEVELS = ("single", "funneled", "serialized", "multiple")
"""Of threads that MPI knows, from none beside the main one to several at once."""

ASKED = "MPI4PY_RC_THREAD_LEVEL"
"""The variable by which another level than `multiple` is asked for (mpi4py 4)."""


def load() -> Any:
    """The module `mpi4py.MPI`, which initializes MPI: with threads at any time, unless `ASKED` says otherwise.

    Raises:
        ConfigError: that is no level.
        LaunchError: it is not installed, or finds no library.
    """
    try:
        import mpi4py

        mpi4py.rc.thread_level = _asked()
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise LaunchError(
            f"--backend mpi needs mpi4py and an MPI library ({error}): install both, or use --backend gloo."
        ) from None
    if not MPI.Is_initialized():
        MPI.Init_thread(getattr(MPI, f"THREAD_{_asked().upper()}"))
    settle(MPI)
    return MPI


def _asked() -> str:
    asked = os.environ.get(ASKED, "multiple")
    if asked not in LEVELS:
        raise ConfigError(ASKED, asked, f"must be one of {', '.join(LEVELS)}")
    return asked


def level_of(mpi: Any, several: bool, asked: str) -> str:
    """What was asked of a library about threads and what it gave, in words.

    Args:
        several: two threads are to call it at the same time, and not one that is not the main one.

    Raises:
        ConfigError: it gave less than that needs.
    """
    known = (mpi.THREAD_SINGLE, mpi.THREAD_FUNNELED, mpi.THREAD_SERIALIZED, mpi.THREAD_MULTIPLE)
    got = LEVELS[known.index(mpi.Query_thread())]
    needed = "multiple" if several else "serialized"
    if LEVELS.index(got) < LEVELS.index(needed):
        raise ConfigError(
            "--backend", "mpi",
            f"MPI was asked for thread level {asked} and gave {got}, and what goes on beside something else needs "
            f"{needed}", f"use an MPI library that gives it, and leave {ASKED} unset",
        )  # fmt: skip
    return f"MPI thread level: {asked} asked for, {got} given, {needed} needed"


class MpiParty:
    """MPI_COMM_WORLD, and communicators in it."""

    backend = "mpi"

    def __init__(self, mpi: Any, local_rank: int, meter: Meter) -> None:
        self.local_rank = local_rank
        self.hosts: Sequence[str] = ()
        self.mpi, self.comm, self.meter, self.memory = mpi, mpi.COMM_WORLD, meter, NumpyMemory()
        self.rank, self.world = self.comm.Get_rank(), self.comm.Get_size()
        self.library = mpi.Get_library_version().split(",")[0].strip("\0\n ")
        self._made: dict[tuple[bool, tuple[tuple[int, ...], ...]], Group | None] = {}

    def groups(self, partition: Sequence[tuple[int, ...]], apart: bool = False) -> Group | None:
        key = apart, tuple(partition)
        if key not in self._made:
            mine = next((number for number, ranks in enumerate(partition) if self.rank in ranks), None)
            comm = self.comm.Split(self.mpi.UNDEFINED if mine is None else mine, self.rank)
            ranks = () if mine is None else partition[mine]
            self._made[key] = MpiGroup(ranks, ranks.index(self.rank), comm, self.mpi) if ranks else None
        return self._made[key]

    def threads(self, several: bool) -> str:
        return level_of(self.mpi, several, _asked())

    def placements(self, operation: str) -> tuple[str, ...]:
        return (OUT, IN) if operation in _BOTH else (IN,) if operation == "broadcast" else (OUT,)

    def gather(self, value: T) -> list[T]:
        with self.meter.waiting(self.meter.began("gather", "world", tuple(range(self.world)))):
            return list(self.comm.allgather(value))

    def barrier(self) -> None:
        with self.meter.waiting(self.meter.began("barrier", "world", tuple(range(self.world)))):
            self.comm.Barrier()


@contextmanager
def mpi_party(identity: Identity, folder: Path, timeout_s: float) -> Iterator[MpiParty]:
    """All ranks over MPI. Collective. They have a store besides, through which a rank that hangs is named.

    Each rank first takes its place of the rank table, if there is one, and a job's places are proved, as in a training.

    Raises:
        LaunchError: there is no MPI, the launcher and the library do not understand each other, or ranks are not where
            they are to be.
    """
    bound = bind(identity)
    witness = Witness(identity, folder, bound)
    late = (
        f"rank {identity.rank} of {identity.world} waited {START_S:.0f} s for MPI to come up: look at the other ranks."
    )
    with ExitStack() as stack:
        # Before MPI, whose libraries do not all bear a fork.
        kept = _store(identity, stack) if identity.rank == 0 else None
        with at_most(START_S, late):
            mpi = load()
            world = mpi.COMM_WORLD
            if (world.Get_rank(), world.Get_size()) != (identity.rank, identity.world):
                raise LaunchError(_strangers(mpi, identity))
            told = world.bcast(time.time())  # rank 0's
            clock = time.time()
            report = witness.report("", "") if identity.source == "srun" else {}
            said = Arrival(identity.world, socket.gethostname(), allowed_cpus(), report=report, clock=clock, told=told)
            came = world.gather(said.dump())
            error, where = world.bcast((_judged(witness, came), kept) if kept else None)
        if error:
            raise LaunchError(error)
        meter, store = Meter(), PlainStore(*where)
        dog = Watchdog(store, identity.rank, identity.world, meter, timeout_s, fail_now, SILENCE_S)  # type: ignore[arg-type]
        if identity.world > 1:
            dog.start()
        yield MpiParty(mpi, identity.local_rank, meter)
        world.Barrier()
        if identity.world > 1:
            dog.stop()
        world.Barrier()  # the store goes with rank 0


def _judged(witness: Witness, came: Sequence[str]) -> str:
    """On rank 0: why these ranks must not go on, or nothing."""
    arrivals = {rank: Arrival.load(text) for rank, text in enumerate(came)}
    heard = dict.fromkeys(arrivals, time.time())
    found = judge(arrivals, len(arrivals), 0.0).error
    return found or (witness.examine(arrivals, heard) if all(a.report for a in arrivals.values()) else "")


def _store(identity: Identity, stack: ExitStack) -> tuple[list[str], int, str]:
    """Where to reach the store that this rank keeps, and the key to it."""
    key = secrets.token_hex(16)
    port = stack.enter_context(serving(key))
    return addresses(identity), port, key


def _strangers(mpi: Any, identity: Identity) -> str:
    world, library = mpi.COMM_WORLD, mpi.Get_library_version().split(",")[0]
    return (
        f"{identity.source} says rank {identity.rank} of {identity.world} and MPI says rank {world.Get_rank()} of "
        f"{world.Get_size()}: start the ranks with the mpirun of {library}, or on Slurm with a profile whose mpi is "
        "what `srun --mpi=list` and that library both know."
    )
