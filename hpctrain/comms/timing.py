"""Times of iterations: percentiles, their spread, and when there are enough of them. Plain arithmetic.

Times are seconds, one list a rank; an iteration takes as long as its slowest rank.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

Times = Sequence[Sequence[float]]
"""Of each rank, of each iteration."""


@dataclass(frozen=True)
class Spread:
    """Of iterations by their slowest rank, seconds; percentiles by nearest rank, as in nccl-tests.

    Attributes:
        deviation: standard deviation, of a population.
    """

    min: float
    max: float
    mean: float
    p50: float
    p95: float
    p99: float
    deviation: float

    @property
    def variation(self) -> float:
        """Deviation over mean, per cent."""
        return 100 * self.deviation / self.mean if self.mean else 0.0


def slowest(times: Times) -> list[float]:
    """Each iteration's time on its slowest rank."""
    return [max(iteration) for iteration in zip(*times)]


def percentile(ordered: Sequence[float], percent: int) -> float:
    """By nearest rank; of ascending values."""
    return ordered[min(len(ordered) - 1, math.ceil(len(ordered) * percent / 100) - 1)]


def spread(iterations: Sequence[float]) -> Spread:
    """Of one time an iteration. The median is the upper one of two, as in nccl-tests."""
    ordered = sorted(iterations)
    return Spread(
        ordered[0],
        ordered[-1],
        statistics.fmean(ordered),
        ordered[len(ordered) // 2],
        percentile(ordered, 95),
        percentile(ordered, 99),
        statistics.pstdev(ordered),
    )


AVERAGES = ("mean", "max", "min", "rank0")
"""How the mean times of ranks become one, as nccl-tests' -a; its default is the mean."""


def average(times: Times, how: str = "mean") -> float:
    """Seconds of an iteration."""
    means = [statistics.fmean(of_rank) for of_rank in times]
    if how == "rank0":
        return means[0]
    return {"mean": statistics.fmean(means), "max": max(means), "min": min(means)}[how]


def half_width(iterations: Sequence[float]) -> float:
    """Half of the 95 % confidence interval of the median, over the median."""
    if len(iterations) < 2:
        return math.inf
    middle = statistics.median(iterations)
    return 1.96 * standard_error(iterations) / middle if middle else math.inf


def standard_error(iterations: Sequence[float]) -> float:
    """Of the median, seconds.

    It is 1.253 sigma / sqrt(n) of a normal distribution, and sigma is 1.4826 times the median absolute deviation,
    which outliers do not move (Rousseeuw and Croux, JASA 88, 1993).
    """
    middle = statistics.median(iterations)
    deviation = 1.4826 * statistics.median(abs(time - middle) for time in iterations)
    return 1.2533 * deviation / math.sqrt(len(iterations))


@dataclass(frozen=True)
class Stop:
    """When to stop iterating.

    Attributes:
        iterations: exactly so many; with a target, the first round of them.
        confidence: the median is to be known to this share of itself with 95 % confidence; None: no target.
        most: iterations, whatever the target says.
    """

    iterations: int = 20
    confidence: float | None = None
    most: int = 2000

    def more(self, done: int, groups: Sequence[Sequence[float]]) -> int:
        """How many iterations to add after `done`; 0: enough. `groups`: iterations' times of each group."""
        if not done:
            return self.iterations
        if self.confidence is None or done >= self.most:
            return 0
        if max(map(half_width, groups)) <= self.confidence:
            return 0
        return min(done, self.most - done)
