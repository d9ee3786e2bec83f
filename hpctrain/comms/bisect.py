"""Who is slow: a member (a node, or a rank) or the way between two, found by measuring few pairs. Plain.

First a few rounds of disjoint pairs, all at once, so that every member is seen with several others. Whoever was fast
with anybody is well. A member that was slow with everybody is measured again with members that are well: if it is slow
with each of them, in every repetition, it is slow. A slow pair of two that are well is measured again itself: if it
stays slow, it is the way between them. Whoever is not measured again talks meanwhile, in pairs as before, so that what
is measured again has the load beside it under which the others were. So a cluster takes a number of rounds that does
not grow with its size, and nobody is named for a few bad measurements. Where nobody is well, nobody is named: there is
nothing to hold it against.
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from hpctrain.comms.groups import rounds

Pair = tuple[int, int]
"""Of members, by index, the lower first."""

Lanes = tuple[float, ...]
"""Seconds of a pair on each of its lanes: the rails of two nodes, or one."""

Kind = Callable[[Pair], int]
"""Pairs that are held against each other have the same: those inside a host and those between hosts have not."""

Measure = Callable[[Sequence[Pair]], Mapping[Pair, Lanes]]
"""Measures disjoint pairs, all at the same time."""

SLOW = 1.5
"""A pair is slow that takes so many times the usual time."""

ROUNDS = 3
WITNESSES = 3
"""Members that are well, with whom a suspect is measured again."""


@dataclass(frozen=True)
class Evidence:
    """A measurement that tells: a pair, how often it was measured, and its fastest time over the usual one by lane."""

    pair: Pair
    times: int
    ratios: tuple[float, ...]


@dataclass(frozen=True)
class Culprit:
    """A member, or two members between whom it is slow, on which lanes, and why that is said."""

    members: tuple[int, ...]
    lanes: tuple[int, ...]
    evidence: tuple[Evidence, ...]


@dataclass(frozen=True)
class Finding:
    """What came of it.

    Attributes:
        culprits: members, then ways.
        usual: seconds of a pair that is well, by lane; of the first kind of pairs.
        ratios: every pair's times over what is usual for its kind, by lane.
        measured: every pair and the fastest of its times, by lane.
        lanes: lanes that are slow for everybody: by what was expected, or beside the fastest of them.
        unclear: why nothing can be said, if so.
        everybody: all pairs are slow by what was expected of them.
    """

    culprits: tuple[Culprit, ...]
    usual: Lanes
    measured: Mapping[Pair, Lanes]
    lanes: tuple[int, ...] = ()
    unclear: str = ""
    everybody: bool = False
    ratios: Mapping[Pair, tuple[float, ...]] = field(default_factory=dict)

    @property
    def bad(self) -> bool:
        """Whether anything is slow."""
        return bool(self.culprits or self.everybody or self.lanes)


class Search:
    """See the module's docstring.

    Args:
        members: how many there are.
        measure: of pairs.
        slow: a pair is slow whose time is so many times the usual one.
        repeat: how often a suspect is measured again.
        expected: seconds of a pair that is well; by default what the faster quarter of pairs of its kind take.
        kind: of a pair, where they are of several: each is searched by itself.
    """

    def __init__(
        self,
        members: int,
        measure: Measure,
        slow: float = SLOW,
        repeat: int = 3,
        expected: float | None = None,
        kind: Kind | None = None,
    ) -> None:
        self.members, self.measure, self.slow, self.repeat, self.expected = members, measure, slow, repeat, expected
        self.kind: Kind = kind or (lambda pair: 0)
        self._several = kind is not None
        self._found: dict[Pair, list[Lanes]] = {}
        self._usual: dict[int, Lanes] = {}
        self._of_all: set[int] = set()

    def run(self) -> Finding:
        """Measure, and say who is slow. A pair counts with its fastest time: what disturbs a measurement adds to it."""
        if self.members < 3 and self.expected is None:
            return Finding((), (), {}, unclear="two members have one pair: there is nothing to hold it against")
        self._meet()
        kinds = sorted(self._usual)
        well = {kind: {m for pair in self._of(kind) if not self._lanes(pair) for m in pair} for kind in kinds}
        if not all(well.values()) and self.expected is not None:
            return self._finding((), everybody=True)
        if not all(well.values()):
            return self._finding((), "every pair is slow, or none is like another: nothing is known to be well")
        culprits = [c for kind in kinds for c in self._confirm(kind, well[kind]) if c]
        named = {m for culprit in culprits for m in culprit.members}
        ways = [pair for pair in self._found if self._lanes(pair) and not named & set(pair)]
        return self._finding((*culprits, *self._ways(ways, well)))

    def _meet(self) -> None:
        """Everybody with a few others: what is usual. A lane that seems to be slow for everybody is measured again."""
        first = self._first()
        for turn in range(1 + self.repeat):
            if turn and not self._of_all:
                break
            for pairs in first:
                self._take(pairs)
            kinds = sorted({self.kind(pair) for pair in self._found})
            self._usual = {kind: self._reference(kind) for kind in kinds}
            self._of_all = self._slow_for_all()

    def _slow_for_all(self) -> set[int]:
        """Lanes that are slow for everybody, by which nobody is told from the others; not all of them."""
        if self.expected is None:
            usual = self._usual[min(self._usual)]
            return {lane for lane, seconds in enumerate(usual) if seconds > SLOW * min(usual)}
        slow = set.intersection(*map(self._above, self._found))
        return slow if len(slow) < len(self._usual[min(self._usual)]) else set()

    def _first(self) -> list[Sequence[Pair]]:
        """A few rounds of disjoint pairs. Of several kinds one after the other, with every member in a few pairs of
        each."""
        plan = rounds(range(self.members))
        if not self._several:
            return list(plan[:ROUNDS])
        of_kind: dict[int, list[list[Pair]]] = {}
        seen: Counter[tuple[int, int]] = Counter()
        for pair in itertools.chain.from_iterable(plan):
            kind = self.kind(pair)
            if min(seen[kind, m] for m in pair) < ROUNDS:
                seen.update((kind, m) for m in pair)
                made = of_kind.setdefault(kind, [])
                free = next((pairs for pairs in made if not {*pair} & {*itertools.chain(*pairs)}), None)
                made.append([pair]) if free is None else free.append(pair)
        return [pairs for kind in sorted(of_kind) for pairs in of_kind[kind]]

    def _of(self, kind: int) -> list[Pair]:
        """Pairs of a kind that were measured."""
        return [pair for pair in self._found if self.kind(pair) == kind]

    def _finding(self, culprits: Sequence[Culprit], unclear: str = "", everybody: bool = False) -> Finding:
        measured = {pair: self._best(pair) for pair in self._found}
        ratios = {pair: self._ratios(pair) for pair in self._found}
        usual, lanes = self._usual[min(self._usual)], tuple(sorted(self._of_all))
        return Finding(tuple(culprits), usual, measured, lanes, unclear, everybody, ratios)

    def _take(self, pairs: Sequence[Pair]) -> None:
        for pair, lanes in self.measure(pairs).items():
            self._found.setdefault(pair, []).append(lanes)

    def _reference(self, kind: int) -> Lanes:
        """Of each lane: the quartile of the faster pairs of a kind."""
        lanes = list(zip(*(self._best(pair) for pair in self._of(kind))))
        if self.expected is not None:
            return (self.expected,) * len(lanes)
        return tuple(sorted(times)[(len(times) - 1) // 4] for times in lanes)

    def _best(self, pair: Pair) -> Lanes:
        return tuple(min(times) for times in zip(*self._found[pair]))

    def _ratios(self, pair: Pair) -> tuple[float, ...]:
        return tuple(time / usual for time, usual in zip(self._best(pair), self._usual[self.kind(pair)]))

    def _lanes(self, pair: Pair) -> set[int]:
        """Lanes on which a pair is slow, but for those that are slow for everybody by what was expected."""
        slow = self._above(pair)
        return slow if self.expected is None else slow - self._of_all

    def _above(self, pair: Pair) -> set[int]:
        return {lane for lane, ratio in enumerate(self._ratios(pair)) if ratio > self.slow}

    def _confirm(self, kind: int, well: set[int]) -> list[Culprit | None]:
        """Measure those who were slow in all pairs of a kind with members that are well in it, all suspects at once
        where there are enough of those."""
        suspects = sorted({m for pair in self._of(kind) for m in pair} - well)
        pairs: dict[int, list[Pair]] = {suspect: [] for suspect in suspects}
        for turn in range(WITNESSES):
            left = suspects
            while left:
                now = self._with_witnesses(kind, left, sorted(well), turn, pairs)
                if not now:
                    break
                beside = self._beside(kind, now.values(), well)
                for _ in range(self.repeat):
                    self._take([*now.values(), *beside])
                for suspect, pair in now.items():
                    pairs[suspect].append(pair)
                left = [suspect for suspect in left if suspect not in now]
        return [self._judge((suspect,), pairs[suspect]) for suspect in suspects if pairs[suspect]]

    def _with_witnesses(
        self, kind: int, suspects: Sequence[int], well: Sequence[int], turn: int, before: Mapping[int, Sequence[Pair]]
    ) -> dict[int, Pair]:
        """Disjoint pairs of suspects, each with a member that is well and was not with it before."""
        made: dict[int, Pair] = {}
        free = dict.fromkeys(well)
        for i, suspect in enumerate(suspects):
            for k in range(len(well)):
                witness = well[(i + turn + k) % len(well)]
                pair = (min(suspect, witness), max(suspect, witness))
                if witness in free and self.kind(pair) == kind and pair not in before[suspect]:
                    made[suspect] = pair
                    del free[witness]
                    break
        return made

    def _beside(self, kind: int, pairs: Iterable[Pair], well: set[int]) -> list[Pair]:
        """Pairs of a kind among those members that are well and in none of these: they make the load that there was
        when everybody was measured."""
        left = sorted(well - {m for pair in pairs for m in pair})
        made: list[Pair] = []
        while left:
            first = left.pop(0)
            other = next((m for m in left if self.kind((first, m)) == kind), None)
            if other is not None:
                left.remove(other)
                made.append((first, other))
        return made

    def _ways(self, pairs: Sequence[Pair], well: Mapping[int, set[int]]) -> list[Culprit]:
        """Slow pairs of members that are not slow themselves, measured again one at a time, as often as a member is."""
        found = []
        for pair in pairs:
            kind = self.kind(pair)
            beside = [other for other in self._beside(kind, [pair], well[kind]) if other not in pairs]
            for _ in range(self.repeat * WITNESSES):
                if self._lanes(pair):  # else it was fast once, and that settles it
                    self._take([pair, *beside])
            if culprit := self._judge(pair, [pair]):
                found.append(culprit)
        return found

    def _judge(self, members: tuple[int, ...], pairs: Sequence[Pair]) -> Culprit | None:
        """The culprit, if all these pairs are slow on some lane."""
        lanes = set.intersection(*(self._lanes(pair) for pair in pairs))
        if not lanes:
            return None
        evidence = tuple(Evidence(pair, len(self._found[pair]), self._ratios(pair)) for pair in pairs)
        return Culprit(members, tuple(sorted(lanes)), evidence)


def sentences(
    finding: Finding, names: Sequence[str], size: int, expected: bool = False, lane: str = "rail"
) -> list[str]:
    """What was found, a sentence each.

    Args:
        size: of a message, bytes.
        expected: what a pair is to take was given, and not only how the others do is known.
    """
    if finding.unclear:
        return [f"undecided: {finding.unclear}."]
    number, usual = len(finding.measured), finding.usual
    slowest = [max(ratios) for ratios in finding.ratios.values()]
    if finding.everybody:
        slow = [ratio for ratio in slowest if ratio > SLOW]  # all, or all of a kind
        return [f"everybody is slow: of {len(slow)} pairs the fastest takes {min(slow):.1f} times the expected time."]
    found = [f"{lane} {i} is slow for everybody: {_of_all(finding, i, expected, lane)}." for i in finding.lanes]
    found += [_sentence(culprit, finding, names, lane) for culprit in finding.culprits]
    if found:
        return found
    if expected:
        return [f"nobody is slow: of {number} pairs the slowest takes {max(slowest):.2f} times the expected time."]
    return [
        f"nobody is slower than the others: of {number} pairs the slowest takes {max(slowest):.2f} times the usual one,"
        f" {size / statistics.median(usual) / 1e9:.3g} GB/s each way; what links should do, they do not tell."
    ]


def _of_all(finding: Finding, number: int, expected: bool, lane: str) -> str:
    if expected:
        least = min(ratios[number] for ratios in finding.ratios.values())
        return f"{least:.1f} times the expected time at the least"
    return f"{finding.usual[number] / min(finding.usual):.1f} times the time of the fastest {lane}"


def _sentence(culprit: Culprit, finding: Finding, names: Sequence[str], lane: str) -> str:
    who = " - ".join(names[m] for m in culprit.members)
    every = len(culprit.lanes) == len(finding.usual)
    where = "" if every else f" on {lane} {', '.join(map(str, culprit.lanes))}"
    what = "is slow" if len(culprit.members) == 1 else "is a slow way, though both ends are fast with others"

    def told(evidence: Evidence) -> str:
        ratio = statistics.median(evidence.ratios[i] for i in culprit.lanes)
        others = [m for m in evidence.pair if (m,) != culprit.members] if len(culprit.members) == 1 else []
        beside = f"with {names[others[0]]} " if others else ""
        return f"{beside}{ratio:.1f} times as long as usual ({evidence.times} measurements)"

    return f"{who} {what}{where}: {'; '.join(map(told, culprit.evidence))}."
