"""Two kinds of work at the same time: how much each slows the other down, and how much of them overlaps."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from hpctrain.comms.backend import Act, Party, T
from hpctrain.comms.clock import SHARE, repeat, to_the_end
from hpctrain.comms.memory import Memory
from hpctrain.comms.trial import Test, Trial


@dataclass(frozen=True)
class Overlap:
    """Seconds of some calls of two works, alone and at the same time.

    Attributes:
        first, second: alone.
        first_beside, second_beside: while the other goes on.
        together: from the beginning of both to the end of the later one.
    """

    first: float
    second: float
    first_beside: float
    second_beside: float
    together: float

    @property
    def fraction(self) -> float:
        """Share of the shorter work that cost nothing: 1 if both took as long as the longer one, 0 if as long as one
        after the other."""
        hidden = self.first + self.second - self.together
        return max(0.0, min(1.0, hidden / min(self.first, self.second)))

    @property
    def slowdowns(self) -> tuple[float, float]:
        """Of each, beside the other over alone."""
        return self.first_beside / self.first, self.second_beside / self.second


def overlap(party: Party, what: str, first: Act, second: Act, calls: tuple[int, int]) -> Overlap:
    """Measure both alone, then both at once, each with its number of calls. Collective over the world.

    Args:
        what: the name of the first, for others who wait for this rank.
    """
    both = _streams if party.memory.kind == "cuda" else _threads
    alone = met(party, what, partial(_alone, first, calls[0], party.memory))
    other = met(party, what, partial(_alone, second, calls[1], party.memory))
    return Overlap(alone, other, *met(party, what, partial(both, first, second, calls)))


def balanced(party: Party, what: str, first: Act, second: Act, most: int, limit_s: float) -> tuple[int, int]:
    """As many calls of each that both take about the same time, and not too long for a wait; the same on every rank.

    Args:
        most: of the first.
        limit_s: of a wait.
    """
    each = []
    for act in (first, second):
        times = met(party, what, partial(to_the_end(act, party.memory), 4))
        each.append(max(party.gather(statistics.median(times[1:]))))
    calls = max(1, min(most, int(SHARE * limit_s / each[0])))
    return calls, max(1, round(calls * each[0] / each[1]))


def left_wrong(party: Party, test: Test, mine: Trial | None) -> int:
    """Wrong elements, on all ranks, that calls after `Trial.fill` have left; of a reduction in place, of one more call.

    Args:
        mine: None where a rank does not take part.
    """
    if mine and not test.repeats:
        mine.fill()
        met(party, test.operation, partial(repeat, mine.act, 1, party.memory))
    elif not test.repeats:
        party.barrier()
    return sum(party.gather(mine.wrong(None) if mine and test.operation != "barrier" else 0))


def met(party: Party, what: str, measure: Callable[[], T]) -> T:
    """What is measured once all ranks are there."""
    party.barrier()
    with party.meter.waiting(party.meter.began(what, "overlap", tuple(range(party.world)))):
        return measure()


def _alone(act: Act, calls: int, memory: Memory) -> float:
    begin = time.perf_counter()
    repeat(act, calls, memory)
    return time.perf_counter() - begin


def _threads(first: Act, second: Act, calls: tuple[int, int]) -> tuple[float, float, float]:
    """On CPUs: the first in a thread of its own. What either does outside of Python goes on beside the other."""
    ends: dict[str, float] = {}
    failed: list[BaseException] = []

    def work(name: str, act: Act, times: int) -> Callable[[], None]:
        def run() -> None:
            try:
                for _ in range(times):
                    act()
            except BaseException as error:
                failed.append(error)
            ends[name] = time.perf_counter()

        return run

    thread = threading.Thread(target=work("first", first, calls[0]))
    begin = time.perf_counter()
    thread.start()
    work("second", second, calls[1])()
    thread.join()
    if failed:
        raise failed[0]
    return ends["first"] - begin, ends["second"] - begin, max(ends.values()) - begin


def _streams(first: Act, second: Act, calls: tuple[int, int]) -> tuple[float, float, float]:
    """On a GPU: each on a stream of its own, calls queued in turn."""
    import torch

    streams = [torch.cuda.Stream() for _ in range(2)]  # type: ignore[no-untyped-call]
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in streams]  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    for (begin, _), stream in zip(marks, streams):
        begin.record(stream)
    for turn in range(max(calls)):
        for act, stream, times in zip((first, second), streams, calls):
            if turn < times:
                with torch.cuda.stream(stream):
                    act()
    for (_, end), stream in zip(marks, streams):
        end.record(stream)
    torch.cuda.synchronize()
    spans = [begin.elapsed_time(end) / 1e3 for begin, end in marks]
    return spans[0], spans[1], max(marks[0][0].elapsed_time(end) / 1e3 for _, end in marks)
