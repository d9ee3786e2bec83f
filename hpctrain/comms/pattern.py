"""What is in the buffers of an operation, and what has to be there afterwards. Plain arithmetic.

An element is a small integer that depends on the rank it comes from and on its place, so that one which is lost,
doubled, or in a wrong place is seen; sums stay exact in every dtype, in whatever order they are made.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from hpctrain.comms.formulas import OPERATIONS, partner

Matrix = Sequence[Sequence[int]]
"""Elements that rank i sends to rank j."""

EXACT = {"bfloat16": 256, "float16": 2048, "int8": 127, "uint8": 255}
"""Up to here a dtype counts without a gap."""

EPSILON = {"bfloat16": 2**-7, "float16": 2**-10, "float32": 2**-22, "float64": 2**-51}


@dataclass(frozen=True)
class Block:
    """Consecutive elements.

    Attributes:
        source: rank of the group that they come from; None: reduced over all.
        start: place of the first among the elements that the source has.
        count: of them.
    """

    source: int | None
    start: int
    count: int


@dataclass(frozen=True)
class Contents:
    """What a rank sends and what it must receive; an empty tuple where it does not."""

    send: tuple[Block, ...]
    receive: tuple[Block, ...]

    @property
    def sends(self) -> int:
        """Elements of the send buffer."""
        return sum(block.count for block in self.send)

    @property
    def receives(self) -> int:
        """Elements of the receive buffer."""
        return sum(block.count for block in self.receive)


def contents(operation: str, count: int, ranks: int, index: int, root: int = 0, matrix: Matrix = ()) -> Contents:
    """The buffers of one rank of a group.

    Args:
        operation: a key of `OPERATIONS`.
        count: elements, as `formulas.Counts` has it.
        ranks: of the group.
        index: of this rank in it.
        root: index of the rank that gathers, scatters, reduces or broadcasts.
        matrix: for all_to_all_v.
    """
    whole, own = (Block(index, 0, count),), Block(index, 0, count * ranks)
    everybody = tuple(Block(rank, 0, count) for rank in range(ranks))
    at_root = index == root
    if operation == "all_to_all_v":
        sent = tuple(Block(index, sum(matrix[index][:to]), matrix[index][to]) for to in range(ranks))
        came = tuple(Block(of, sum(matrix[of][:index]), matrix[of][index]) for of in range(ranks))
        return Contents(sent, came)
    if operation in ("ping_pong", "bidirectional"):
        other = partner(index, ranks)
        if other is None:
            return Contents((), ())
        # What comes back of a ping is the ping.
        back = min(index, other) if operation == "ping_pong" else other
        return Contents(whole, (Block(back, 0, count),))
    return {
        "all_reduce": Contents(whole, (Block(None, 0, count),)),
        "all_gather": Contents(whole, everybody),
        "reduce_scatter": Contents((own,), (Block(None, index * count, count),)),
        "all_to_all": Contents((own,), tuple(Block(of, index * count, count) for of in range(ranks))),
        "broadcast": Contents(whole, (Block(root, 0, count),)),
        "reduce": Contents(whole, (Block(None, 0, count),) if at_root else ()),
        "gather": Contents(whole, everybody if at_root else ()),
        "scatter": Contents((own,) if at_root else (), (Block(root, index * count, count),)),
        "sendrecv": Contents(whole, (Block((index - 1) % ranks, 0, count),)),
        "barrier": Contents((), ()),
    }[operation]


@dataclass(frozen=True)
class Values:
    """Values of elements: rank r has `own[(h + r) % m]` in a place with hash h, and the reduction is `reduced[h % m]`.

    Of what is added or multiplied, m is a prime larger than the number of ranks, so that no two have the same, and one
    that is lost while another counts twice is seen. Elsewhere the hash is another one for every m ranks.

    Attributes:
        tolerance: relative difference that is right; 0 but for means.
    """

    own: tuple[float, ...]
    reduced: tuple[float, ...]
    tolerance: float = 0.0

    @property
    def period(self) -> int:
        """m."""
        return len(self.own)


def values(operation: str, dtype: str, reduction: str, ranks: int) -> Values:
    """The values of a group of ranks."""
    most, period = EXACT.get(dtype, 2**24) // ranks, _prime(max(ranks + 1, 97))
    if not OPERATIONS[operation].reduces or reduction in ("max", "min"):
        own = list(range(97))
    elif reduction == "prod":
        own = [1 + mark for mark in _marks(period, ranks, 6)]  # at most 2^6
    elif most > 1:
        chance = random.Random(period)
        own = [1 + int(chance.random() * min(most, 96)) for _ in range(period)]
    else:
        own = _marks(period, ranks, EXACT[dtype])
    reduced = _reduced(reduction, own, ranks)
    if reduction == "avg":
        reduced = [value / ranks for value in reduced]
    tolerance = 2 * EPSILON.get(dtype, 0.0) if reduction == "avg" else 0.0
    return Values(tuple(map(float, own)), tuple(reduced), tolerance)


def _prime(least: int) -> int:
    """The smallest prime of at least `least`."""
    return next(n for n in itertools.count(least) if all(n % k for k in range(2, math.isqrt(n) + 1)))


def _marks(period: int, ranks: int, most: int) -> list[int]:
    """Zeros and ones, of which so many in a row as there are ranks have at most `most` ones: a one somewhere in each
    block, of a length by which a row touches no more blocks than that."""
    length = max(2, math.ceil(ranks / (most - 1)))
    chance, made = random.Random(period), [0] * period
    for begin in range(0, period - length + 1, length):
        made[begin + int(chance.random() * length)] = 1
    return made


def _reduced(reduction: str, own: Sequence[int], ranks: int) -> list[float]:
    """Of so many values in a row, from each on; after the last comes the first."""
    period = len(own)
    if reduction in ("max", "min"):
        pick = max if reduction == "max" else min
        return [float(pick(own[(k + rank) % period] for rank in range(min(ranks, period)))) for k in range(period)]
    added = [int(math.log2(value)) for value in own] if reduction == "prod" else own
    sums = [0, *itertools.accumulate(added[k % period] for k in range(period + ranks))]
    found = [sums[k + ranks] - sums[k] for k in range(period)]
    return [float(2**value if reduction == "prod" else value) for value in found]


def scaled(weights: Sequence[Sequence[float]], size: int, width: int) -> tuple[tuple[int, ...], ...]:
    """A matrix of elements in which the busiest rank sends or receives `size` bytes, in proportion to weights.

    By nccl-tests' rule for uneven all-to-alls: S is what the busiest rank sends or receives.
    """
    rows = [sum(row) for row in weights]
    columns = [sum(column) for column in zip(*weights)]
    busiest = max(*rows, *columns)
    times = max(1, size // width) / busiest
    made = tuple(tuple(int(weight * times) for weight in row) for row in weights)
    if any(map(any, made)):
        return made
    largest = max(max(row) for row in weights)  # so small a size is one element
    i, j = next((i, j) for i, row in enumerate(weights) for j, weight in enumerate(row) if weight == largest)
    return tuple(tuple(int((a, b) == (i, j)) for b in range(len(weights))) for a in range(len(weights)))


def busiest(matrix: Matrix) -> int:
    """Elements that the busiest rank sends or receives."""
    columns: list[tuple[int, ...]] = list(zip(*matrix))
    return max(sum(several) for several in (*matrix, *columns))


def skewed(ranks: int) -> tuple[tuple[float, ...], ...]:
    """Weights as experts have them that are liked unequally: the r-th rank of the group gets 1 / (1 + r) as much."""
    return tuple(tuple(1.0 / (1 + to) for to in range(ranks)) for _ in range(ranks))
