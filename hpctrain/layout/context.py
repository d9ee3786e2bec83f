"""Which part of a sequence each rank of cp holds, and which keys its queries see. Pure.

Ulysses (Jacobs et al., arXiv 2309.14509) gives rank i the i-th of cp equal parts. The ring (Liu et al., arXiv
2310.01889) cuts the sequence into 2 cp chunks of which rank i holds i and 2 cp - 1 - i, in this order ("zig-zag", as in
Llama 3, arXiv 2407.21783, section 3.3.2): causal attention then is the same work for every pair of ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from hpctrain.config.schema import CpMethod, ModelConfig, ParallelConfig

Span = tuple[int, int]
"""First position and the one after the last."""


def spans(method: CpMethod, seq: int, cp: int, index: int) -> tuple[Span, ...]:
    """The stretches of a sequence that rank `index` of cp holds, in their order there."""
    if cp == 1:
        return ((0, seq),)
    chunks = (index, 2 * cp - 1 - index) if method == "ring" else (index,)
    size, rest = divmod(seq, cp * len(chunks))
    assert rest == 0, (method, seq, cp)
    return tuple((i * size, (i + 1) * size) for i in chunks)


def multiple(parallel: ParallelConfig) -> int:
    """What the length of a sequence must be a multiple of: every rank has the same share, of tp too with sp."""
    chunks = 2 if parallel.cp > 1 and parallel.cp_method == "ring" else 1
    return parallel.cp * math.lcm(chunks, parallel.tp if parallel.sp else 1)


def misfit(model: ModelConfig, parallel: ParallelConfig, seq: int) -> Literal["heads", "seq"] | None:
    """What cannot be split over cp, if there is something: Ulysses' heads of a rank of tp, or the sequence."""
    if parallel.cp_method == "ulysses" and model.heads // parallel.tp % parallel.cp:
        return "heads"
    return "seq" if seq % multiple(parallel) else None


@dataclass(frozen=True)
class Block:
    """What there is to compute of one rank's queries and another's keys.

    Attributes:
        queries, keys: places in the parts of the two ranks; the rest of the block is hidden.
        causal: a query sees the keys up to its own place; otherwise all of these.
    """

    queries: Span
    keys: Span
    causal: bool


def ring_block(part: int, query_rank: int, key_rank: int) -> Block:
    """The block of two ranks of a ring that each hold `part` positions; half of it, or on the diagonal as much."""
    half = part // 2
    if query_rank == key_rank:
        return Block((0, part), (0, part), causal=True)
    if query_rank > key_rank:  # the second chunk of the keys comes after all queries
        return Block((0, part), (0, half), causal=False)
    return Block((half, part), (0, part), causal=False)  # the first chunk of the queries comes before all keys
