"""What the bandwidth of a collective means: one row an operation, by the conventions of nccl-tests.

A size S is that of the larger buffer of a rank; `algbw` is S over the time; `busbw` is `algbw` times a factor of the
ranks of the group (`layout.bus`), which makes it comparable with the rate of a link. GB/s are decimal, 1e9 bytes/s;
sizes are binary, K = 1024. ping_pong is half a round trip, and bidirectional counts both ways, as `osu_latency` and
`osu_bibw` of the OSU micro-benchmarks do.

Other tools differ: DeepSpeed's logger and EleutherAI's cookbook report 2 S / t as the algbw of an all-reduce, and take
the world for the group. Such figures are not to be mixed with these.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.layout.bus import factor


@dataclass(frozen=True)
class Operation:
    """How an operation is counted.

    Attributes:
        meaning: what S is.
        parts: S is n equal parts, of each of which a rank sends or receives one.
        reduces: it adds values up, or takes their maximum.
        rooted: one rank of the group has a part of its own in it.
        paired: ranks take part two by two (`partner`); the last of an odd number is idle.
        trips: of S in one call; a time is of one of them.
    """

    meaning: str
    parts: bool = False
    reduces: bool = False
    rooted: bool = False
    paired: bool = False
    trips: int = 1


OPERATIONS = {
    "all_reduce": Operation("buffer of a rank", reduces=True),
    "all_gather": Operation("output of a rank", parts=True),
    "reduce_scatter": Operation("input of a rank", parts=True, reduces=True),
    "all_to_all": Operation("input of a rank", parts=True),
    "all_to_all_v": Operation("input or output of the busiest rank"),
    "broadcast": Operation("buffer of a rank", rooted=True),
    "reduce": Operation("buffer of a rank", reduces=True, rooted=True),
    "gather": Operation("output of the root", parts=True, rooted=True),
    "scatter": Operation("input of the root", parts=True, rooted=True),
    "sendrecv": Operation("what each rank sends to the next"),
    "ping_pong": Operation("message; time is half a round trip", paired=True, trips=2),
    "bidirectional": Operation("message each way", paired=True),
    "barrier": Operation("nothing"),
}


def algbw(size: int, seconds: float) -> float:
    """GB/s (1e9 bytes/s) of S bytes in that time."""
    return size / seconds / 1e9


def busbw(operation: str, size: int, seconds: float, ranks: int) -> float | None:
    """GB/s that a link carried; None where that means nothing: one rank, or a barrier.

    It may be more than a link carries: where switches reduce (NVLS, SHARP), fewer bytes travel than the formula counts.

    Args:
        operation: a key of `OPERATIONS`.
        size: S, bytes.
        seconds: of one operation.
        ranks: of the group.
    """
    times = factor(operation, ranks)
    return None if ranks == 1 or not times else algbw(size, seconds) * times


def partner(index: int, ranks: int) -> int | None:
    """The rank that a rank exchanges messages with: neighbours 0 and 1, 2 and 3; the last of an odd group is idle."""
    other = index ^ 1
    return other if other < ranks else None


def takes_part(operation: str, index: int, ranks: int) -> bool:
    """Whether a rank of a group has anything to do in an operation."""
    return not OPERATIONS[operation].paired or partner(index, ranks) is not None


@dataclass(frozen=True)
class Counts:
    """Elements of one operation.

    Attributes:
        count: as nccl-tests' column says: of a part, where there are parts.
        size: S that it makes, bytes.
    """

    count: int
    size: int


ALIGNED = 16
"""Bytes that a part is a multiple of, as in nccl-tests, where the size allows."""


def counts(operation: str, size: int, ranks: int, width: int) -> Counts:
    """How many elements of `width` bytes an operation of about `size` bytes has: never more, but one at the least."""
    if operation == "barrier":
        return Counts(0, 0)
    elements = max(1, size // width)
    if not OPERATIONS[operation].parts:
        return Counts(elements, elements * width)
    part = max(1, elements // ranks)
    step = max(1, ALIGNED // width)
    if part >= step:
        part -= part % step
    return Counts(part, part * ranks * width)


ALGORITHMS = ("ring", "recursive_doubling", "tree", "hierarchical")
"""All-reduces of ours (`algorithms.py`), beside those that a backend chooses itself."""
