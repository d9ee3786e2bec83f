"""Times of repeated calls, and in how many turns they are made."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from functools import partial

from hpctrain.comms.backend import Act, Party
from hpctrain.comms.memory import Memory
from hpctrain.comms.spec import Spec
from hpctrain.errors import ConfigError

Clock = Callable[[int], list[float]]
"""Seconds of each of so many calls."""

SHARE = 0.125
"""Of the limit of a wait, what a turn is to take at most."""


def timed(act: Act, iterations: int) -> list[float]:
    """Seconds of each of so many calls, one after the other: as a bare loop, and one look at the clock between."""
    clock = time.perf_counter
    marks = [clock()]
    mark = marks.append
    for _ in range(iterations):
        act()
        mark(clock())
    return [end - begin for begin, end in itertools.pairwise(marks)]


def timed_apart(act: Act, barrier: Act, iterations: int) -> list[float]:
    """The same with a barrier before each, which is not counted."""
    out = []
    for _ in range(iterations):
        barrier()
        begin = time.perf_counter()
        act()
        out.append(time.perf_counter() - begin)
    return out


def to_the_end(act: Act, memory: Memory) -> Clock:
    """A clock whose calls each end before the next begins."""

    def clock(calls: int) -> list[float]:
        out = []
        for _ in range(calls):
            begin = time.perf_counter()
            act()
            memory.finish()
            out.append(time.perf_counter() - begin)
        return out

    return clock


def clock_of(memory: Memory, spec: Spec, act: Act, barrier: Act) -> Clock:
    """The clock of a backend, by the settings. Of a graph it times replays.

    Args:
        act: on a GPU it must have run before it is captured in a graph.
        barrier: of the ranks that call.
    """
    if memory.kind == "cuda":
        from hpctrain.comms.cuda import graphed, timed_events, timed_events_apart

        call = graphed(act, spec.graph) if spec.graph else act
        return partial(timed_events_apart, call, barrier) if spec.barrier else partial(timed_events, call)
    return partial(timed_apart, act, barrier) if spec.barrier else partial(timed, act)


class Turns:
    """Makes calls in turns, after each of which all ranks meet: so no wait is longer than a part of its limit, however
    long all of them take, and one that is longer is one in vain.

    The first turn has one call, later ones as many as take a share of the limit by what the turn before has shown: a
    first call, which makes connections, says little of the others.

    Args:
        limit_s: of a wait.
    """

    def __init__(self, party: Party, limit_s: float) -> None:
        self.party, self.limit_s = party, limit_s
        self._slowest: float | None = None

    def next(self, wanted: int, each: int = 1) -> int:
        """Calls of the next turn, each of so many operations; the same on every rank.

        Raises:
            ConfigError: a single one, of several operations, takes longer than a wait may.
        """
        if self._slowest is None:
            return min(wanted, 1)
        seconds = max(self._slowest * each, 1e-9)
        if each > 1 and seconds > self.limit_s:
            raise ConfigError(
                "--graph", each, f"one replay takes some {seconds:.3g} s, and a wait may take {self.limit_s:g} s",
                "capture fewer calls, or give a longer --timeout",
            )  # fmt: skip
        return max(1, min(wanted, int(SHARE * self.limit_s / seconds)))

    def took(self, every: Sequence[Sequence[float]], each: int = 1) -> None:
        """Take note of the seconds of calls of all ranks in a turn, each of so many operations."""
        self._slowest = max((max(times) for times in every if times), default=0.0) / each

    def run(
        self,
        clock: Clock,
        times: int,
        operation: str,
        label: str,
        ranks: tuple[int, ...],
        takes_part: bool = True,
        each: int = 1,
    ) -> list[list[float]]:
        """Seconds of so many calls, of every rank of the world. Collective over it.

        Args:
            clock: makes calls.
            operation, label, ranks: what others are told who wait for this rank.
            takes_part: this rank calls; the others only meet.
            each: operations of one call: of a graph, as many as were captured.
        """
        out: list[list[float]] = [[] for _ in range(self.party.world)]
        if times:
            self.party.barrier()
        while (left := times - len(out[0])) > 0:
            calls = self.next(left, each)
            own = [0.0] * calls
            if takes_part:
                with self.party.meter.waiting(self.party.meter.began(operation, label, ranks)):
                    own = clock(calls)
            every = self.party.gather(own)
            self.took(every, each)
            for of, now in zip(out, every):
                of += now
        return out


def repeat(act: Act, times: int, memory: Memory) -> None:
    """Do it so many times, to the end."""
    for _ in range(times):
        act()
    memory.finish()
