"""Latency and bandwidth of an operation, out of its times by size: t = min over lines of (latency + bytes / rate).

A library takes another protocol or algorithm as messages grow, and takes the fastest it knows: so the time is the least
of a few lines. Bytes are those that leave a rank (`layout.bus`), so rates are what nccl-tests calls busbw.

The fit minimizes relative errors, since times span several powers of ten: sizes are cut into runs of consecutive ones
in every way there is, each run has its line of weighted least squares with no negative latency, and the best cut is
kept. One more line has to earn its place: it must lower the largest of (mean error, noise) by a fifth.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from hpctrain.comms.formulas import OPERATIONS
from hpctrain.comms.result import Row
from hpctrain.layout.bus import factor

MOST_LINES = 3
FEWEST = 2
"""Sizes that a line is fitted to, at the least."""

WORTH = 0.8
NOISE = 0.01
"""Relative errors below this are not worth a line."""

Point = tuple[float, float]
"""Bytes that leave a rank, and seconds."""


@dataclass(frozen=True)
class Line:
    """Seconds before the first byte, and bytes/s: infinite where times do not grow with bytes."""

    latency: float
    rate: float

    def seconds(self, bytes_: float) -> float:
        return self.latency + bytes_ / self.rate


@dataclass(frozen=True)
class Fit:
    """What an operation takes in one kind of group.

    Attributes:
        operation, algorithm, backend, groups, dtype: of the rows.
        ranks, hosts: of a group; of an operation of pairs, of a pair. The most, where groups that ran at once differ.
        lines: the operation takes the fastest.
        points: that it was fitted to.
        line: `Row.line` of the rows.
        held: those that were held out to see how well it predicts.
    """

    operation: str
    algorithm: str
    backend: str
    groups: str
    dtype: str
    ranks: int
    hosts: int
    lines: tuple[Line, ...]
    points: tuple[Point, ...]
    held: tuple[Point, ...] = ()
    line: tuple[str, ...] = ()

    def seconds(self, bytes_: float) -> float:
        """Predicted."""
        return predict(self.lines, bytes_)

    def errors(self, points: Iterable[Point]) -> list[float]:
        """Predicted over measured, less one."""
        return [self.seconds(bytes_) / seconds - 1 for bytes_, seconds in points]

    @property
    def noise(self) -> float:
        """Relative, of the times that it was fitted to, by what is left over of their number."""
        free = max(1, len(self.points) - 2 * len(self.lines))
        return _error(self.lines, self.points) * math.sqrt(len(self.points) / free)

    @property
    def rated(self) -> bool:
        """Whether it tells a rate: of the largest size bytes must take half of the time, or a share of it that is more
        than noise."""
        bytes_, _ = self.points[-1]
        fastest = min(self.lines, key=lambda line: line.seconds(bytes_))
        return bytes_ / fastest.rate > min(max(NOISE, 2 * self.noise), 0.5) * fastest.seconds(bytes_)

    @property
    def median_error(self) -> float | None:
        """Of the sizes held out; None if none was."""
        found = [abs(error) for error in self.errors(self.held)]
        return statistics.median(found) if found else None


def predict(lines: Sequence[Line], bytes_: float) -> float:
    """Seconds, by the fastest line."""
    return min(line.seconds(bytes_) for line in lines)


def sent(row: Row) -> float:
    """Bytes that leave a rank: S times what busbw is of algbw; of messages both ways, those of one."""
    return row.size * (1.0 if OPERATIONS[row.operation].paired else factor(row.operation, len(row.ranks)))


def fits(rows: Sequence[Row], hosts: Sequence[str], hold: int = 3) -> list[Fit]:
    """A fit of every operation, algorithm, kind of group, backend and dtype that has three sizes or more.

    Args:
        hosts: of every rank of the world.
        hold: every so many-th size, from the second on, is held out; 0: none.
    """
    by_line: dict[tuple[str, ...], dict[int, list[Row]]] = {}
    for row in rows:
        if row.size and len(row.ranks) > 1:
            by_line.setdefault(row.line, {}).setdefault(row.size, []).append(row)
    found = []
    for sizes in by_line.values():
        # The whole group waits for the slowest: of groups that ran at once the slowest is what a step waits for.
        points = [_point(several) for _, several in sorted(sizes.items())]
        held = [p for i, p in enumerate(points) if hold and 0 < i < len(points) - 1 and i % hold == 1]
        held = held if len(points) - len(held) >= 3 else []
        kept = [p for p in points if p not in held]
        if len(kept) >= 3:
            every = [row for several in sizes.values() for row in several]
            together = [ranks for row in every for ranks in talking(row)]
            row, ranks = every[0], max(map(len, together))
            spans = max(len({hosts[rank] for rank in several}) for several in together)
            head = (row.operation, row.algorithm, row.backend, row.groups, row.dtype, ranks, spans)
            found.append(Fit(*head, best_lines(kept), tuple(kept), tuple(held), row.line))
    return found


def talking(row: Row) -> list[tuple[int, ...]]:
    """The ranks that talk to each other: all of the group, or its pairs."""
    if not OPERATIONS[row.operation].paired:
        return [row.ranks]
    return [row.ranks[i : i + 2] for i in range(0, len(row.ranks) - 1, 2)]


def _point(several: Sequence[Row]) -> Point:
    slowest = max(several, key=lambda row: row.spread.p50)
    return sent(slowest), slowest.spread.p50


def best_lines(points: Sequence[Point], most: int = MOST_LINES) -> tuple[Line, ...]:
    """The lines of the best fit to points in ascending order."""
    best: tuple[Line, ...] = (line_through(points),)
    error = _error(best, points)
    for number in range(2, most + 1):
        made = min(_cuts(points, number), key=lambda lines: _error(lines, points), default=best)
        found = _error(made, points)
        if max(found, NOISE) > WORTH * max(error, NOISE):
            continue
        best, error = made, found
    return tuple(sorted(_used(best, points), key=lambda line: line.latency))


def _cuts(points: Sequence[Point], number: int) -> Iterable[tuple[Line, ...]]:
    """Lines of every cut into so many runs."""
    places = range(FEWEST, len(points) - FEWEST + 1)
    for cuts in itertools.combinations(places, number - 1):
        edges = (0, *cuts, len(points))
        if all(b - a >= FEWEST for a, b in itertools.pairwise(edges)):
            yield tuple(line_through(points[a:b]) for a, b in itertools.pairwise(edges))


def line_through(points: Sequence[Point]) -> Line:
    """The line of least relative squares, with latency and time of a byte of at least 0."""
    bytes_, seconds = (np.array(column, dtype=float) for column in zip(*points))
    matrix = np.stack([1 / seconds, bytes_ / seconds], axis=1)
    scale = np.maximum(np.abs(matrix).max(axis=0), 1e-300)
    (latency, a_byte), *_ = np.linalg.lstsq(matrix / scale, np.ones(len(points)), rcond=None)
    latency, a_byte = latency / scale[0], a_byte / scale[1]
    if latency < 0:
        latency, a_byte = 0.0, _one(matrix[:, 1])
    elif a_byte <= 0:
        latency, a_byte = _one(matrix[:, 0]), 0.0
    return Line(float(latency), float(1 / a_byte) if a_byte > 0 else math.inf)


def _one(column: np.ndarray) -> float:
    return float(column.sum() / (column**2).sum())


def _error(lines: Sequence[Line], points: Sequence[Point]) -> float:
    """Root mean square of the relative errors."""
    return float(np.sqrt(np.mean([(predict(lines, b) / s - 1) ** 2 for b, s in points])))


def _used(lines: Sequence[Line], points: Sequence[Point]) -> list[Line]:
    """Those that are the fastest for some point."""
    chosen = {min(range(len(lines)), key=lambda i: lines[i].seconds(b)) for b, _ in points}
    return [lines[i] for i in sorted(chosen)]
