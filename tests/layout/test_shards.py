"""How FSDP2 cuts parameters, in arithmetic; that torch cuts them so, the engine asserts."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.layout.shards import padded, replicas_of, shard, shard_dim


@given(st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple), st.integers(1, 9))
def test_parts_are_the_whole(shape: tuple[int, ...], ranks: int) -> None:
    dim, end = shard_dim(shape, ranks), 0
    for index in range(ranks):
        start, part = shard(shape, ranks, index)
        assert [s for d, s in enumerate(start) if d != dim] == [0] * (len(shape) - 1)
        assert (*part[:dim], shape[dim], *part[dim + 1 :]) == shape
        assert start[dim] == end or part[dim] == 0
        assert math.prod(part) <= padded(shape, ranks) / ranks
        end = max(end, start[dim] + part[dim])
    assert end == shape[dim]
    assert padded(shape, ranks) % ranks == 0 and padded(shape, ranks) >= math.prod(shape)
    assert dim == 0 or shape[dim] % ranks == 0, "torch pads along the first dim alone"


@pytest.mark.parametrize(
    ("shape", "ranks", "dim", "size"),
    [
        ((8, 6), 4, 0, 48),
        ((257, 6), 4, 0, 260 * 6),
        ((3, 6, 4), 2, 1, 72),
        ((3, 5, 4), 2, 2, 60),
        ((3, 5, 7), 2, 0, 4 * 35),
        ((21,), 4, 0, 24),
        ((1, 7), 1, 0, 7),
        ((63, 8), 4, 1, 63 * 8),
        ((65, 8), 4, 0, 68 * 8),
    ],
)
def test_few_rows_are_cut_the_other_way(shape: tuple[int, ...], ranks: int, dim: int, size: int) -> None:
    assert (shard_dim(shape, ranks), padded(shape, ranks)) == (dim, size)


def test_some_keep_nothing() -> None:
    assert [shard((5,), 4, index) for index in range(4)] == [((0,), (2,)), ((2,), (2,)), ((4,), (1,)), ((5,), (0,))]


def test_experts_have_as_many_replicas_as_their_ranks_divide_into() -> None:
    assert [replicas_of(4, ranks) for ranks in (8, 4, 2, 1, 6)] == [4, 4, 2, 1, 2]
