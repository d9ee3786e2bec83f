"""Who builds: one process, or the ranks of an MPI job, each with workers of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from hpctrain.errors import DataError
from hpctrain.mpi import settle

T = TypeVar("T")


class Team:
    """One process alone.

    Attributes:
        rank: of this process.
        size: how many there are.
    """

    rank = 0
    size = 1

    def all(self, work: Callable[[], T]) -> list[T]:
        """What `work` returns on every rank, on every rank. If one fails, all raise what the first raised."""
        return [work()]

    def first(self, work: Callable[[], T]) -> T:
        """What `work` returns on rank 0, on every rank; the others wait."""
        return work()


class MpiTeam(Team):
    """The ranks of a communicator of mpi4py."""

    def __init__(self, communicator: Any) -> None:
        self._comm = communicator
        self.rank, self.size = communicator.Get_rank(), communicator.Get_size()

    def all(self, work: Callable[[], T]) -> list[T]:
        """See `Team.all`."""
        answers = self._comm.allgather(_attempt(work))
        for _, error in answers:
            if error is not None:
                raise error
        return [value for value, _ in answers]

    def first(self, work: Callable[[], T]) -> T:
        """See `Team.first`."""
        value, error = self._comm.bcast(_attempt(work) if self.rank == 0 else None)
        if error is not None:
            raise error
        return value  # type: ignore[no-any-return]


def _attempt(work: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    try:
        return work(), None
    except Exception as error:
        return None, error


def team(mpi: bool) -> Team:
    """The team that this process belongs to.

    Raises:
        DataError: MPI is asked for and not there.
    """
    if not mpi:
        return Team()
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise DataError(
            f"--mpi needs mpi4py and an MPI library ({error}); build on one node without it, or install them."
        ) from error
    settle(MPI)
    return MpiTeam(MPI.COMM_WORLD)
