"""One operation in groups that run at once: checked, warmed up, timed, checked again. The same steps on every rank,
collectively.

Of the results that are checked the last one is what the timed calls have left, those of a loop or of a graph; of a
reduction in place, which changes what it reduces, it is that of one more such call.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hpctrain.comms.backend import Fault, Party
from hpctrain.comms.clock import Clock, Turns, clock_of, to_the_end
from hpctrain.comms.formulas import OPERATIONS, counts
from hpctrain.comms.groups import Groups
from hpctrain.comms.result import Row
from hpctrain.comms.sizes import DTYPES
from hpctrain.comms.spec import Spec
from hpctrain.comms.timing import slowest
from hpctrain.comms.trial import Test, Trial, trial


@dataclass(frozen=True)
class Found:
    """What a rank found: S in bytes, and wrong elements of each result that was checked."""

    size: int
    wrong: tuple[int, ...]


def measure(party: Party, spec: Spec, groups: Groups, test: Test, fault: Fault | None = None) -> list[Row]:
    """Rows of all groups, on every rank.

    Raises:
        ConfigError: the backend has no such operation, dtype or reduction.
    """
    group = party.groups(groups.ranks)
    mine = trial(spec, party, group, test) if group else None
    size = mine.size if mine else 0
    if fault is not None and fault.kind == "absent" and fault.rank == party.rank and size >= fault.size:
        while True:
            time.sleep(1)
    run = _Run(party, spec, groups, test, mine, fault)
    checks, lost = spec.checks if test.operation != "barrier" else 0, []
    with party.meter.phase(test.operation):
        for _ in range(checks - 1):
            run.fill()
            run.make(run.single(), 1)
            lost.append(run.wrong())
        # Of a graph it must be known how long a call takes, after the first.
        run.make(run.single(), max(spec.warm_up, 2 * min(spec.graph, 1)))
        clock = run.clock(spec)
        run.make(clock, min(spec.graph, 1), spec.graph)  # a graph is laid out on the device by its first replay
        if checks:
            run.fill()
        every = run.timed(clock)
        if checks and not test.repeats:
            once = run.clock(replace(spec, graph=min(spec.graph, 1)))
            run.fill()  # not sooner: what is captured has been called
            run.make(once, 1)
        if checks:
            lost.append(run.wrong())
    return _rows(party, spec, groups, test, party.gather(Found(size, tuple(lost))), every)


@dataclass
class _Run:
    """A test on one rank, which has nothing to do in it where it is in no group."""

    party: Party
    spec: Spec
    groups: Groups
    test: Test
    mine: Trial | None
    fault: Fault | None

    def __post_init__(self) -> None:
        self.turns = Turns(self.party, self.spec.timeout_s)
        group = self.party.groups(self.groups.ranks)
        self.ranks = group.ranks if group else (self.party.rank,)
        self.label = f"{self.groups.name}, {self.mine.size if self.mine else self.test.size} bytes"

    def make(self, clock: Clock, times: int, each: int = 1) -> list[list[float]]:
        """So many calls, each of so many operations; seconds of each call, of every rank."""
        takes_part, each = self.mine is not None, max(1, each)
        return self.turns.run(clock, times, self.test.operation, self.label, self.ranks, takes_part, each)

    def timed(self, clock: Clock) -> list[list[float]]:
        """Seconds of those calls that count, of every rank, until there are enough."""
        every: list[list[float]] = [[] for _ in range(self.party.world)]
        trips = OPERATIONS[self.test.operation].trips * max(1, self.spec.graph)
        while more := self.spec.stop.more(len(every[0]), [slowest([every[r] for r in of]) for of in self.groups.ranks]):
            for times, now in zip(every, self.make(clock, more, self.spec.graph)):
                times += [seconds / trips for seconds in now]
        return every

    def clock(self, spec: Spec) -> Clock:
        if self.mine is None:
            return _idle
        meter = self.party.meter
        with meter.waiting(meter.began(self.test.operation, self.label, self.ranks)):  # to capture a graph is a call
            return clock_of(self.party.memory, spec, self.mine.act, self.mine.barrier)

    def single(self) -> Clock:
        return to_the_end(self.mine.act, self.party.memory) if self.mine else _idle

    def fill(self) -> None:
        if self.mine:
            self.mine.fill()

    def wrong(self) -> int:
        return self.mine.wrong(self.fault) if self.mine else 0


def _idle(calls: int) -> list[float]:
    return [0.0] * calls


def _rows(
    party: Party, spec: Spec, groups: Groups, test: Test, found: Sequence[Found], every: Sequence[Sequence[float]]
) -> list[Row]:
    rows = []
    for ranks in groups.ranks:
        n = len(ranks)
        lost = [sum(check) for check in zip(*(found[rank].wrong for rank in ranks))]
        rows.append(
            Row(
                operation=test.operation,
                backend=party.backend,
                algorithm=test.algorithm,
                groups=groups.name,
                ranks=ranks,
                size=max(found[rank].size for rank in ranks),
                count=counts(test.operation, test.size, n, DTYPES[test.dtype][1]).count,
                dtype=test.dtype,
                reduction=test.reduction if OPERATIONS[test.operation].reduces else "none",
                root=spec.root if OPERATIONS[test.operation].rooted else -1,
                placement=test.placement,
                times=tuple(tuple(every[rank]) for rank in ranks),
                checked=len(lost),
                wrong=sum(map(bool, lost)),
                elements=sum(lost),
                average=spec.average,
            )
        )
    return rows
