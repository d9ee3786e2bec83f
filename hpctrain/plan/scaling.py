"""Scaling curves: rates with their confidence, efficiency, and what stops a curve. Pure arithmetic over numbers."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

T95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131),
    *(2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
"""Student's t for 95% between -t and t, by degrees of freedom from 1 on."""

BLOCKS = 5
"""Runs of consecutive steps that a single run is cut into. Steps after one another are not independent; means of blocks
are, nearly (batch means: Law and Kelton, Simulation Modeling and Analysis, chapter 9)."""


@dataclass(frozen=True)
class Mean:
    """A mean and half the width of its 95% confidence interval; None where there is one value alone.

    It is of what is never below 0, a time or a rate, and so are both ends.
    """

    value: float
    half: float | None = None

    @property
    def low(self) -> float | None:
        return None if self.half is None else max(0.0, self.value - self.half)

    @property
    def high(self) -> float | None:
        return None if self.half is None else self.value + self.half

    @property
    def relative(self) -> float:
        """Half the width over the mean; 0 where it is not known."""
        return (self.half or 0.0) / self.value


def student(freedom: int) -> float:
    """Student's t for 95%; beyond the table by its expansion, to 3 digits."""
    return T95[freedom - 1] if freedom <= len(T95) else 1.96 + 2.4 / freedom


def mean_of(values: Sequence[float]) -> Mean:
    """Of independent values."""
    middle = statistics.fmean(values)
    if len(values) < 2:
        return Mean(middle)
    return Mean(middle, student(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values)))


def blocks(values: Sequence[float], number: int = BLOCKS) -> list[float]:
    """Means of consecutive blocks of about equal length; fewer where there are not two values for each."""
    number = max(1, min(number, len(values) // 2))
    edges = [round(i * len(values) / number) for i in range(number + 1)]
    return [statistics.fmean(values[a:b]) for a, b in itertools.pairwise(edges)]


@dataclass(frozen=True)
class Point:
    """One size of a study.

    Attributes:
        nodes, devices: of a run.
        tokens: of a step.
        seconds: of a step.
        exposed: seconds of it that wait for other ranks.
        parts: what a step is made of, seconds by name.
        mfu: causal, 0 to 1; None where no peak is known.
        runs, steps: measured; 0 where it is predicted.
        needs, room: bytes of the fullest device, and those that a device has for it; None where they are not known.
    """

    nodes: int
    devices: int
    tokens: int
    seconds: Mean
    exposed: Mean
    parts: dict[str, float]
    mfu: float | None = None
    runs: int = 0
    steps: int = 0
    needs: float | None = None
    room: float | None = None

    @property
    def fits(self) -> bool | None:
        """Whether devices have the memory for it; None where that is not known."""
        return None if self.needs is None or self.room is None else self.needs <= self.room

    @property
    def rate(self) -> Mean:
        """Tokens/s of all devices."""
        rate = self.tokens / self.seconds.value
        return Mean(rate, None if self.seconds.half is None else rate * self.seconds.relative)

    @property
    def waits(self) -> float:
        """Share of a step that waits for other ranks."""
        return self.exposed.value / self.seconds.value


def efficiency(points: Sequence[Point]) -> list[Mean]:
    """Tokens/s a device over those of the first point. 1 at the first, where there is nothing to be uncertain of."""
    first = points[0]
    out = []
    for point in points:
        share = point.rate.value / first.rate.value * first.devices / point.devices
        known = point.seconds.half is not None and first.seconds.half is not None and point is not first
        wide = math.hypot(point.seconds.relative, first.seconds.relative) if known else None
        out.append(Mean(share, None if wide is None else share * wide))
    return out


@dataclass(frozen=True)
class Law:
    """How a rate grows with size: C(n) = n / (1 + contention (n - 1) + coherence n (n - 1)), in units of the smallest
    size. Gunther's universal scalability law (arXiv 0808.1431); without coherence it is Amdahl's, and contention the
    serial share.

    Attributes:
        error: root mean square of its relative errors.
    """

    contention: float
    coherence: float
    error: float

    def rate(self, size: float) -> float:
        """Times the rate of the smallest size."""
        return size / (1 + self.contention * (size - 1) + self.coherence * size * (size - 1))

    @property
    def peak(self) -> float | None:
        """Size beyond which the rate falls; None where it grows for ever."""
        if self.coherence <= 0:
            return None
        return math.sqrt(max(0.0, 1 - self.contention) / self.coherence)


def law(points: Sequence[Point], coherent: bool = True) -> Law | None:
    """The law of a measured curve, by least squares of relative errors, with no negative coefficient.

    Args:
        coherent: fit coherence too, which takes three sizes; two give Amdahl's law.

    Returns:
        None for fewer than two sizes.
    """
    first = points[0]
    sizes = np.array([p.devices / first.devices for p in points[1:]])
    rates = np.array([p.rate.value / first.rate.value for p in points[1:]])
    if not len(sizes):
        return None
    lost = sizes / rates - 1  # contention (n - 1) + coherence n (n - 1)
    columns = [sizes - 1] + ([sizes * (sizes - 1)] if coherent and len(sizes) > 1 else [])
    weight = rates / sizes
    found = not_negative(np.stack(columns, axis=1) * weight[:, None], lost * weight)
    made = Law(found[0], found[1] if len(found) > 1 else 0.0, 0.0)
    errors = [made.rate(float(n)) / c - 1 for n, c in zip(sizes, rates)]
    return Law(made.contention, made.coherence, math.sqrt(statistics.fmean(e * e for e in errors)))


def not_negative(matrix: np.ndarray, target: np.ndarray) -> list[float]:
    """Least squares in one or two unknowns that are not negative."""
    number = matrix.shape[1]
    tries: list[list[float]] = [[0.0] * number]
    for chosen in ([*range(number)], *([i] for i in range(number))):
        part = matrix[:, chosen]
        if np.linalg.matrix_rank(part) < len(chosen):
            continue
        values = np.linalg.lstsq(part, target, rcond=None)[0]
        if (values >= 0).all():
            full = [0.0] * number
            for place, value in zip(chosen, values):
                full[place] = float(value)
            tries.append(full)
    return min(tries, key=lambda values: float(((matrix @ np.array(values) - target) ** 2).sum()))


@dataclass(frozen=True)
class Wire:
    """What the waiting of a curve is made of: seconds = messages x latency + bytes / rate.

    Attributes:
        latency: seconds of a message.
        rate: bytes/s of a rank; infinite where bytes do not show.
    """

    latency: float
    rate: float

    def seconds(self, messages: float, bytes_: float) -> float:
        return messages * self.latency + bytes_ / self.rate


def wire_of(exposed: Sequence[float], messages: Sequence[float], bytes_: Sequence[float]) -> Wire | None:
    """Latency and bandwidth by least squares of relative errors, neither negative.

    Args:
        exposed: seconds that steps wait.
        messages, bytes_: that leave a rank in a step.

    Returns:
        None where fewer than two sizes wait at all.
    """
    some = [(t, m, b) for t, m, b in zip(exposed, messages, bytes_) if t > 0 and m > 0]
    if len(some) < 2:
        return None
    times, counts, sizes = (np.array(column, dtype=float) for column in zip(*some))
    scale = sizes.max() or 1.0
    latency, of_scale = not_negative(np.stack([counts / times, sizes / scale / times], axis=1), np.ones(len(times)))
    return Wire(latency, scale / of_scale if of_scale > 0 else math.inf)


def growth(first: Point, last: Point, strong: bool) -> dict[str, float]:
    """Seconds by which each part of the last point's step is longer than an ideal curve would have it, the largest
    first: than at the first point, or, in strong scaling, than its share of that."""
    ideal = first.devices / last.devices if strong else 1.0
    names = dict.fromkeys([*last.parts, *first.parts])
    more = {name: last.parts.get(name, 0.0) - ideal * first.parts.get(name, 0.0) for name in names}
    return dict(sorted(more.items(), key=lambda item: -item[1]))
