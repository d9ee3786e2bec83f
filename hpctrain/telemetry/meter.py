"""What a rank spends its step on, and what it sends: seconds by phase, calls and bytes by collective and axis."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple


class Event(NamedTuple):
    """Something that happened, for traces: name, start and end, seconds of `time.perf_counter`."""

    name: str
    start: float
    end: float


@dataclass
class Traffic:
    """Collectives of one kind over one axis: how many, with how many payload bytes, waited for how long."""

    calls: int = 0
    bytes: int = 0
    seconds: float = 0.0


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
    """

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    traffic: dict[tuple[str, str], Traffic] = field(default_factory=lambda: defaultdict(Traffic))
    events: list[Event] = field(default_factory=list)
    tracing: bool = False
    _charged: float = field(default=0.0, repr=False)
    """Seconds inside the open phase that are counted elsewhere."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of the block to a phase."""
        outer, self._charged = self._charged, 0.0
        start = time.perf_counter()
        try:
            yield
        finally:
            end = time.perf_counter()
            self.seconds[name] += end - start - self._charged
            self._charged = outer + end - start
            if self.tracing:
                self.events.append(Event(name, start, end))

    def sent(self, operation: str, axis: str, size: int) -> None:
        """Count a collective of `size` payload bytes (its input on this rank)."""
        traffic = self.traffic[operation, axis]
        traffic.calls += 1
        traffic.bytes += size
        if self.tracing:
            now = time.perf_counter()
            self.events.append(Event(f"sent {operation}[{axis}]", now, now))

    def waited(self, operation: str, axis: str, start: float) -> None:
        """Add the time since `start` to what was waited for a collective."""
        end = time.perf_counter()
        self.traffic[operation, axis].seconds += end - start
        self._charged += end - start
        if self.tracing:
            self.events.append(Event(f"{operation}[{axis}]", start, end))

    def communication(self) -> float:
        """Seconds waited for all collectives."""
        return sum(t.seconds for t in self.traffic.values())

    def reset(self) -> None:
        """Start again from zero."""
        self.seconds.clear()
        self.traffic.clear()
        self.events.clear()
