"""What a rank spends its step on, and what it sends: seconds by phase, calls and bytes by collective and axis."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol


class Event(NamedTuple):
    """Something that happened, for traces: name, start and end, seconds of `time.perf_counter`."""

    name: str
    start: float
    end: float


class Collective(NamedTuple):
    """One collective of a rank, so that two ranks can tell whether they mean the same one.

    Attributes:
        operation: for example all_reduce.
        axis: its name.
        ranks: those that take part.
        number: how many there were over these ranks before it.
    """

    operation: str
    axis: str
    ranks: tuple[int, ...]
    number: int


@dataclass
class Traffic:
    """Collectives of one kind over one axis.

    Attributes:
        calls: how many.
        bytes: of payload.
        seconds: waited for them.
        beside: seconds that they were under way before, while the rank did something else.
    """

    calls: int = 0
    bytes: int = 0
    seconds: float = 0.0
    beside: float = 0.0


class Work(Protocol):
    """A part of a collective that was begun."""

    def is_completed(self) -> bool: ...


@dataclass
class Meter:
    """Counters of one rank. Passed to whoever has something to count; never global.

    Seconds are counted once: a phase does not include the phases inside it, nor what was waited for a
    collective in it, so the phases and `communication()` add up to the wall time they cover. They are the
    host's: work queued on a GPU is charged to the phase that waits for it. One thread has phases, the rank's.

    Attributes:
        seconds: time by phase (data, forward, backward, optimizer, ...).
        traffic: by (operation, axis name).
        events: a trace, kept only while `tracing`.
        asynchronous: the device runs behind the host, which goes on before a collective has ended.
        in_flight: where it does, the parts of the last collective.
        step: of the optimizer, that is under way; whoever runs the steps says so.
        doing: the phase that is open.
        blocked: the collective that the rank waits in.
        last: the collective begun last.
        changes: grows whenever one of the four above changes. Another thread may read them all.
    """

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    traffic: dict[tuple[str, str], Traffic] = field(default_factory=lambda: defaultdict(Traffic))
    events: list[Event] = field(default_factory=list)
    tracing: bool = False
    asynchronous: bool = False
    in_flight: Sequence[Work] = ()
    step: int = 0
    doing: str = "start"
    blocked: Collective | None = None
    last: Collective | None = None
    changes: int = 0
    _numbers: dict[tuple[int, ...], int] = field(default_factory=lambda: defaultdict(int), repr=False)
    _charged: float = field(default=0.0, repr=False)
    """Seconds inside the open phase that are counted elsewhere."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of the block to a phase."""
        outer, self._charged = self._charged, 0.0
        before, self.doing = self.doing, name
        self.changes += 1
        start = time.perf_counter()
        try:
            yield
        finally:
            end = time.perf_counter()
            self.doing = before
            self.changes += 1
            self.seconds[name] += end - start - self._charged
            self._charged = outer + end - start
            if self.tracing:
                self.events.append(Event(name, start, end))

    def began(self, operation: str, axis: str, ranks: tuple[int, ...]) -> Collective:
        """Take note of a collective that this rank begins."""
        self.last = Collective(operation, axis, ranks, self._numbers[ranks])
        self._numbers[ranks] += 1
        self.changes += 1
        return self.last

    def sent(self, operation: str, axis: str, size: int) -> None:
        """Count a collective of `size` payload bytes (its input on this rank)."""
        traffic = self.traffic[operation, axis]
        traffic.calls += 1
        traffic.bytes += size
        self.mark(f"sent {operation}[{axis}]")

    def mark(self, name: str) -> None:
        """Put a moment into the trace."""
        if self.tracing:
            now = time.perf_counter()
            self.events.append(Event(name, now, now))

    def awaited(self) -> Collective | None:
        """The collective that the rank waits in, or that its device does."""
        if self.blocked is None and any(not work.is_completed() for work in self.in_flight):
            return self.last
        return self.blocked

    @contextmanager
    def waiting(self, collective: Collective, since: float | None = None) -> Iterator[None]:
        """Add the time of the block to what is waited for collectives. It is blocked no more when the block raises:
        what `last` says remains.

        Args:
            collective: that the block waits for.
            since: when it was begun, by the clock of events, where that was before.
        """
        self.blocked = collective
        self.changes += 1
        start = time.perf_counter()
        try:
            yield
        finally:
            end = time.perf_counter()
            self.blocked = None
            self.changes += 1
            counted = self.traffic.get((collective.operation, collective.axis))
            if counted is not None:  # objects are no traffic: rare, small, and of no formula
                counted.seconds += end - start
                counted.beside += start - since if since is not None else 0.0
            else:
                self.seconds[collective.operation] += end - start
            self._charged += end - start
            if self.tracing:
                self.events.append(Event(f"{collective.operation}[{collective.axis}]", start, end))

    def communication(self) -> float:
        """Seconds waited for all collectives."""
        return sum(t.seconds for t in self.traffic.values())

    def hidden(self) -> float:
        """Seconds that collectives were under way before they were waited for, each counted by itself."""
        return sum(t.beside for t in self.traffic.values())

    def reset(self) -> None:
        """Start again from zero."""
        self.seconds.clear()
        self.traffic.clear()
        self.events.clear()
