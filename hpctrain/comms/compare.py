"""Whether a measurement is worse than another, line by line, with the noise of both taken into account. Plain.

A line is slower when its median time is more than `tolerance` above the baseline's, and the difference is more than
the noise: three standard errors of the difference of the medians, of the iterations of both. Where there are several
baselines, they have medians of their own, and their spread counts as noise too: it shows how much runs differ on
another day, which the iterations of one run do not.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from hpctrain.comms.result import Key, Result, Row
from hpctrain.comms.timing import standard_error

SIGMAS = 3.0


@dataclass(frozen=True)
class Verdict:
    """One line.

    Attributes:
        key: which, as `Result.key` has it.
        word: same, slower, faster, new (not in the baseline) or gone (only there).
        before, after: median seconds, of the slowest rank.
        noise: three standard errors of their difference, over `before`.
        bus: busbw before and after, GB/s; None where there is none.
    """

    key: Key
    word: str
    before: float | None = None
    after: float | None = None
    noise: float = 0.0
    bus: tuple[float | None, float | None] = (None, None)

    @property
    def change(self) -> float | None:
        """Time after over time before, less one."""
        return None if self.before is None or self.after is None else self.after / self.before - 1


def compare(baselines: Sequence[Result], result: Result, tolerance: float = 0.1) -> list[Verdict]:
    """A verdict for every line of either.

    Args:
        baselines: one or more, of the same kind.
        result: held against them.
        tolerance: relative, of the time.
    """
    after = _by_key(result, ())
    before = [_by_key(baseline, after) for baseline in baselines]
    keys = list(dict.fromkeys([*after, *(key for found in before for key in found)]))
    return [_verdict(key, [found[key] for found in before if key in found], after.get(key), tolerance) for key in keys]


def _by_key(result: Result, others: Collection[Key]) -> dict[Key, list[Row]]:
    """Rows by what they are compared by. Where the others have a line in a placement that these lack, these stand for
    it: published figures and torch.distributed know in place alone for what nccl-tests lists as both."""
    found: dict[Key, list[Row]] = {}
    own = set(map(result.key, result.rows))
    theirs = {_anywhere(key): key.placement for key in others if key not in own}
    for row in result.rows:
        key = result.key(row)
        placed = theirs.get(_anywhere(key))
        if placed is not None and key not in others:
            key = key._replace(placement=placed)
        found.setdefault(key, []).append(row)
    return found


def _anywhere(key: Key) -> Key:
    return key._replace(placement="")


def _verdict(key: Key, before: Sequence[Sequence[Row]], after: Sequence[Row] | None, tolerance: float) -> Verdict:
    if not after:
        return Verdict(key, "gone", before=statistics.median(map(_middle, before)), bus=(_bus(before[0]), None))
    now = _middle(after)
    if not before:
        return Verdict(key, "new", after=now, bus=(None, _bus(after)))
    middles = [_middle(rows) for rows in before]
    then = statistics.median(middles)
    between = statistics.stdev(middles) if len(middles) > 1 else 0.0
    error = math.hypot(_error(after), statistics.fmean(map(_error, before)), between)
    noise = SIGMAS * error / then
    change = now / then - 1
    word = "same"
    if change > max(tolerance, noise):
        word = "slower"
    elif 1 / (1 + change) - 1 > max(tolerance, noise):
        word = "faster"
    return Verdict(key, word, then, now, noise, (_bus(before[0]), _bus(after)))


def _middle(rows: Sequence[Row]) -> float:
    """Median of the iterations; of several groups that ran at once, the slowest one's."""
    return max(statistics.median(row.iterations) for row in rows)


def _error(rows: Sequence[Row]) -> float:
    """Standard error of the median, seconds; of groups that ran at once, the slowest one's."""
    return standard_error(max(rows, key=lambda row: statistics.median(row.iterations)).iterations)


def _bus(rows: Sequence[Row]) -> float | None:
    found = [row.busbw for row in rows if row.busbw is not None]
    return min(found) if found else None


def tally(verdicts: Sequence[Verdict]) -> Mapping[str, int]:
    """How many of each word."""
    words = [verdict.word for verdict in verdicts]
    return {word: words.count(word) for word in ("slower", "same", "faster", "new", "gone") if word in words}
