"""What a backend has to offer: groups of ranks, and for each operation a call that can be repeated.

`torchbackend` is NCCL and gloo, `mpibackend` is MPI, `algorithms` makes collectives of ours out of any backend's sends.
A call ends when the rank's part is done; on a GPU when it is queued on the current stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from hpctrain.comms.buffers import Buffers
from hpctrain.comms.formulas import partner
from hpctrain.comms.memory import Buffer, Memory
from hpctrain.comms.pattern import Matrix
from hpctrain.errors import ConfigError
from hpctrain.telemetry.meter import Meter

T = TypeVar("T")
Act = Callable[[], Any]
Legs = Sequence[tuple[Buffer, int]]
"""What is sent or received, each with the index of the other rank."""

OUT, IN = "out_of_place", "in_place"


@dataclass(frozen=True)
class Task:
    """One operation, with everything that a call needs.

    Attributes:
        operation: a key of `formulas.OPERATIONS`.
        buffers: of this rank.
        count: elements, as `formulas.Counts` has it.
        reduction: one of `sizes.REDUCTIONS`.
        root: index in the group.
        matrix: elements from each to each, for all_to_all_v.
    """

    operation: str
    buffers: Buffers
    count: int
    reduction: str = "sum"
    root: int = 0
    matrix: Matrix = ()


class Group(Protocol):
    """Some ranks, seen from one of them."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks, ascending."""
        ...

    @property
    def index(self) -> int:
        """Of this rank among them."""
        ...

    def call(self, task: Task) -> Act:
        """What does the operation once.

        Raises:
            ConfigError: the backend has none such.
        """
        ...

    def exchange(self, sends: Legs, receives: Legs) -> Act:
        """What sends and receives contiguous parts of buffers, all at once, and returns when all is done; nothing where
        there are none."""
        ...


class Party(Protocol):
    """All ranks, seen from one of them.

    Attributes:
        backend: gloo, nccl or mpi.
        library: name and version of what sends.
        local_rank: among the ranks of this host.
        hosts: of every rank; whoever gathers them says so.
    """

    rank: int
    local_rank: int
    hosts: Sequence[str]
    world: int
    backend: str
    library: str
    meter: Meter

    @property
    def memory(self) -> Memory:
        """Where its buffers are."""
        ...

    def groups(self, partition: Sequence[tuple[int, ...]], apart: bool = False) -> Group | None:
        """The group of the partition that this rank is in. Collective over the world.

        Args:
            apart: not the one that is made for the same ranks otherwise, so that both may be used at the same time.
        """
        ...

    def threads(self, several: bool) -> str:
        """What is known of calls from a thread beside the main one, in words; "" where there is nothing to say.

        Args:
            several: the main thread calls too, at the same time.

        Raises:
            ConfigError: such calls are not safe.
        """
        ...

    def placements(self, operation: str) -> tuple[str, ...]:
        """Which of in place and out of place the backend has."""
        ...

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, on all of them."""
        ...

    def barrier(self) -> None: ...


def by_messages(group: Group, task: Task) -> Act | None:
    """Calls that are made of sends and receives, on every backend; None for other operations."""
    n, index, send, receive = len(group.ranks), group.index, task.buffers.send, task.buffers.receive
    if task.operation == "sendrecv" and n == 1:
        return lambda: receive.__setitem__(slice(None), send)
    if task.operation == "sendrecv":
        return group.exchange([(send, (index + 1) % n)], [(receive, (index - 1) % n)])
    if task.operation not in ("ping_pong", "bidirectional"):
        return None
    other = partner(index, n)
    if other is None:
        return nothing
    if task.operation == "bidirectional":
        return group.exchange([(send, other)], [(receive, other)])
    home = group.exchange([], [(receive, other)])
    if index < other:
        return in_turn(group.exchange([(send, other)], []), home)
    return in_turn(home, group.exchange([(receive, other)], []))


def in_turn(*acts: Act) -> Act:
    """One after the other."""

    def act() -> None:
        for one in acts:
            one()

    return act


def nothing() -> None:
    """What a rank does that has nothing to do."""


def unknown(backend: str, task: Task) -> ConfigError:
    """The sentence about what a backend has not."""
    return ConfigError("--op", task.operation, f"{backend} has no such operation", "use another backend")


@dataclass
class Fault:
    """Damage on purpose, for tests: the rank and what becomes of it.

    Attributes:
        kind: wrong (elements of results are changed) or absent (it never comes to the operation).
        rank: whose.
        size: from how many bytes on.
        every: how many results there are to one that is wrong.
    """

    kind: str
    rank: int
    size: int = 0
    every: int = 1
    _done: dict[int, int] = field(default_factory=dict)

    def strikes(self, rank: int, size: int) -> bool:
        """Whether a result of this rank is to be wrong now."""
        if self.kind != "wrong" or rank != self.rank or size < self.size:
            return False
        self._done[size] = self._done.get(size, 0) + 1
        return self._done[size] % self.every == 0
