"""Which corpus each sample of a run comes from: a pure function of its global count, in O(1).

Weights are fractions `m_c / D` of whole numbers, exactly those that were written if D is at most `LONGEST`. Every D
samples the stream has exactly m_c of corpus c. Within these, samples are placed so that the number of those of c
among the first s differs from `s m_c / D` by less than one, for every s and c. That this is possible for any weights is
the chairman assignment problem; that the earliest deadline first gives it, is R. Tijdeman, "The chairman assignment
problem", Discrete Mathematics 32 (1980).

In a window that begins elsewhere the difference is less than two then, and at most one if there are two corpora. Less
than one in *every* window exists for hardly any weights of three corpora: such a sequence would be balanced, and three
letters of different frequencies have a balanced sequence only for 4/7, 2/7, 1/7 (Fraenkel's conjecture, which is proved
for three).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from heapq import heapify, heappop, heappush

import numpy as np
from numpy.typing import NDArray

from hpctrain.errors import ConfigError

LONGEST = 100_000
"""Samples of the longest period. Weights that need a longer one are rounded to it."""


@dataclass(frozen=True)
class Phase:
    """Weights from a global sample count on.

    Attributes:
        start: that count.
        weights: of each corpus, not negative, in any unit.
    """

    start: int
    weights: tuple[float, ...]


class Blend:
    """The corpora of a run's samples.

    Args:
        phases: the first starts at 0, the others later and later.

    Raises:
        ConfigError: weights that are no weights, or would be rounded to nothing.
    """

    def __init__(self, phases: Sequence[Phase]) -> None:
        self.corpora = len(phases[0].weights)
        self._starts = np.array([phase.start for phase in phases], np.int64)
        if self._starts[0] != 0 or (np.diff(self._starts) <= 0).any():
            raise ConfigError(
                "data.anneal", [p.start for p in phases[1:]], "must begin at sample counts that ascend from above 0"
            )
        self._numbers = [whole(phase.weights) for phase in phases]
        self._bases = [np.zeros(self.corpora, np.int64)]
        for number in range(len(phases) - 1):
            length = int(self._starts[number + 1] - self._starts[number])
            self._bases.append(self._bases[-1] + _counts(self._numbers[number], length))

    @property
    def starts(self) -> list[int]:
        """The sample count at which each phase begins."""
        return [int(start) for start in self._starts]

    @property
    def shares(self) -> list[list[Fraction]]:
        """The weights that are used, of every phase."""
        return [[Fraction(m, sum(numbers)) for m in numbers] for numbers in self._numbers]

    def constant(self) -> Blend:
        """The blend of a validation, which must mean the same at every step: of one phase, in which each corpus has the
        weight that it has first, in proportion. So one that comes in late is held against from the beginning."""
        first = [next((phase[c] for phase in self.shares if phase[c]), Fraction(0)) for c in range(self.corpora)]
        return Blend([Phase(0, tuple(_weights(first)))])

    def until(self, corpus: int, count: int) -> int | None:
        """After how many samples of the stream there were `count` of a corpus, to a few; None: never."""
        assert count > 0
        number = int(np.searchsorted([int(base[corpus]) for base in self._bases], count, "left")) - 1
        share = self.shares[number][corpus]  # of the phase in which it gets there
        if not share:
            return None
        left = count - int(self._bases[number][corpus])
        return int(self._starts[number]) - (-left * share.denominator // share.numerator) + 1

    def locate(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Where samples come from.

        Args:
            samples: global counts, any shape, not negative.

        Returns:
            which corpus, and how many samples of it come before: its own count. Both in the shape of `samples`.
        """
        phase = self._starts.searchsorted(samples, "right") - 1
        corpus, index = np.empty_like(samples), np.empty_like(samples)
        for number in np.unique(phase):
            here = phase == number
            numbers = self._numbers[number]
            order, before = _period(numbers)
            turn, place = np.divmod(samples[here] - self._starts[number], len(order))
            chosen = order[place].astype(np.int64)
            corpus[here] = chosen
            index[here] = self._bases[number][chosen] + turn * np.array(numbers)[chosen] + before[place]
        return corpus, index

    def counts(self, sample: int) -> NDArray[np.int64]:
        """How many of the first `sample` samples are of each corpus."""
        number = int(self._starts.searchsorted(sample, "right")) - 1
        return self._bases[number] + _counts(self._numbers[number], sample - int(self._starts[number]))


def whole(weights: Sequence[float]) -> tuple[int, ...]:
    """Weights as whole numbers without a common divisor, in the proportions that their decimals say.

    Raises:
        ConfigError: negative, all zero, or less than one in `LONGEST` of the whole.
    """
    if any(w < 0 or not math.isfinite(w) for w in weights) or not sum(weights) > 0:
        raise ConfigError("data.weights", list(weights), "must be numbers of at least 0, one of them above it")
    exact = [Fraction(repr(float(w))) for w in weights]
    unit = math.lcm(*(f.denominator for f in exact))
    numbers = [int(f * unit) for f in exact]
    divisor = math.gcd(*numbers)
    numbers = [n // divisor for n in numbers]
    if (total := sum(numbers)) > LONGEST:
        parts = [divmod(n * LONGEST, total) for n in numbers]
        missing = LONGEST - sum(q for q, _ in parts)
        largest = sorted(range(len(parts)), key=lambda i: -parts[i][1])[:missing]
        numbers = [q + (i in largest) for i, (q, _) in enumerate(parts)]
    for weight, number in zip(weights, numbers):
        if weight and not number:
            allowed = f"is less than 1/{LONGEST} of the whole"
            raise ConfigError("data.weights", weight, allowed, "leave that corpus out, or give it more")
    return tuple(numbers)


def _weights(shares: Sequence[Fraction]) -> list[int]:
    """Whole numbers in these proportions."""
    unit = math.lcm(*(share.denominator for share in shares))
    return [int(share * unit) for share in shares]


def _counts(numbers: tuple[int, ...], length: int) -> NDArray[np.int64]:
    """How many of the first samples of a phase are of each corpus."""
    turn, rest = divmod(length, sum(numbers))
    order, _ = _period(numbers)
    counts: NDArray[np.int64] = turn * np.array(numbers) + np.bincount(order[:rest], minlength=len(numbers))
    return counts


@lru_cache(maxsize=16)
def _period(numbers: tuple[int, ...]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """One period: which corpus each sample is of, and how many of that corpus come before it."""
    length = sum(numbers)
    order, before = np.empty(length, np.int32), np.empty(length, np.int32)
    waiting = [(0, c) for c, m in enumerate(numbers) if m]  # (first place it may have, corpus), of its next sample
    heapify(waiting)
    ready: list[tuple[int, int]] = []  # (last place it may have, corpus)
    given = [0] * len(numbers)
    for place in range(length):
        while waiting and waiting[0][0] <= place:
            c = heappop(waiting)[1]
            heappush(ready, (-(-(given[c] + 1) * length // numbers[c]) - 1, c))
        last, c = heappop(ready)
        assert last >= place, (numbers, place)
        order[place], before[place] = c, given[c]
        given[c] += 1
        if given[c] < numbers[c]:
            heappush(waiting, (given[c] * length // numbers[c], c))
    return order, before
