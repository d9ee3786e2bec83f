"""How many bytes a collective sends out of a rank, over the size that is quoted of it: nccl-tests' busbw over algbw.

The factors are those of the code of nccl-tests 2.19.6 (commit a0b82b2; `doc/PERFORMANCE.md` there explains them). In a
group of n ranks a rank has to send n - 1 of n parts, and for an all-reduce twice, as a reduce-scatter and an all-gather
(Thakur et al., 2005, doi 10.1177/1094342005051521). The group counts, never the world.
"""

from __future__ import annotations

PASSES = {
    "all_reduce": 2,
    **dict.fromkeys(("all_gather", "reduce_scatter", "all_to_all", "all_to_all_v", "gather", "scatter"), 1),
}
"""How often each part of another rank goes over a link, of operations in parts."""

WHOLE = {
    **dict.fromkeys(("broadcast", "reduce", "send", "sendrecv", "ping_pong"), 1.0),
    "bidirectional": 2.0,
    "barrier": 0.0,
}
"""Of operations that send the whole, however many ranks there are: both ways, or nothing."""


def factor(operation: str, ranks: float) -> float:
    """Bytes over the size, in a group of so many ranks; also elementwise, of an array of such numbers.

    Raises:
        KeyError: no such operation.
    """
    if operation in WHOLE:
        return WHOLE[operation]
    return PASSES[operation] * (ranks - 1) / ranks
