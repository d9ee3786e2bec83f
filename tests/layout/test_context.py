"""Zig-zag and equal parts: every position is held once, the way back exists, and blocks are the causal mask, cut up."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.config.schema import ParallelConfig
from hpctrain.layout.context import multiple, ring_block, spans
from hpctrain.model.batch import IGNORED, Batch


def held(method: str, seq: int, cp: int, index: int) -> list[int]:
    return [p for start, end in spans(method, seq, cp, index) for p in range(start, end)]


def test_zigzag_of_a_toy_sequence() -> None:
    assert [held("ring", 8, 2, i) for i in range(2)] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert [held("ring", 8, 4, i) for i in range(4)] == [[0, 7], [1, 6], [2, 5], [3, 4]]
    assert [held("ulysses", 8, 4, i) for i in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert held("ring", 5, 1, 0) == [0, 1, 2, 3, 4]


@given(method=st.sampled_from(["ring", "ulysses"]), cp=st.integers(1, 9), size=st.integers(1, 5), sp=st.booleans())
def test_parts_are_equal_ascend_and_can_be_joined_again(method: str, cp: int, size: int, sp: bool) -> None:
    seq = size * multiple(ParallelConfig(cp=cp, cp_method=method, tp=3, sp=sp))
    parts = [held(method, seq, cp, i) for i in range(cp)]
    assert all(part == sorted(part) and len(part) == seq // cp for part in parts)
    assert all(len(part) % 3 == 0 for part in parts) or not sp
    joined = torch.tensor([p for part in parts for p in part])
    whole = torch.randn(seq)
    again = torch.empty(seq)
    again[joined] = torch.cat([whole[part] for part in parts])
    assert torch.equal(again, whole) and joined.sort().values.tolist() == list(range(seq))


@given(cp=st.integers(1, 6), chunk=st.integers(1, 3))
def test_blocks_are_the_causal_mask(cp: int, chunk: int) -> None:
    """Every pair that the mask shows is in a block, no other; and off the diagonal all ranks have the same to do."""
    seq, part = 2 * cp * chunk, 2 * chunk
    seen = torch.zeros(seq, seq, dtype=torch.int)
    for i in range(cp):
        for j in range(cp):
            block, mine, theirs = ring_block(part, i, j), held("ring", seq, cp, i), held("ring", seq, cp, j)
            assert block.causal == (i == j)
            for a in range(*block.queries):
                for b in range(*block.keys):
                    seen[mine[a], theirs[b]] += not block.causal or b <= a
            work = (block.queries[1] - block.queries[0]) * (block.keys[1] - block.keys[0])
            assert work == part * part / (1 if i == j else 2)
    assert torch.equal(seen, torch.ones(seq, seq, dtype=torch.int).tril())


def test_labels_at_the_edges_of_parts_are_those_of_the_next_token() -> None:
    """Trap D21. Rank 0 of 2 ends its first chunk at token 1, whose label, token 2, rank 1 holds."""
    tokens = torch.arange(10, 18)[None]
    labels = torch.arange(11, 19)[None].clone()
    labels[0, 5] = IGNORED
    whole = Batch(tokens, labels, torch.tensor([[0, 0, 0, 1, 1, 1, 2, 2]]), torch.tensor([7]))
    first, second = (whole.part(spans("ring", 8, 2, i)) for i in range(2))
    assert first.tokens.tolist() == [[10, 11, 16, 17]] and first.labels.tolist() == [[11, 12, 17, 18]]
    assert second.tokens.tolist() == [[12, 13, 14, 15]] and second.labels.tolist() == [[13, 14, 15, IGNORED]]
    assert first.positions is not None and first.positions.tolist() == [0, 1, 6, 7]
    assert first.valid_tokens + second.valid_tokens == whole.valid_tokens == 7
    assert first.documents is whole.documents, "attention asks for those of all keys"
    assert whole.part(spans("ring", 8, 1, 0)) is whole


@pytest.mark.parametrize("cut_first", [True, False])
def test_micro_batches_of_parts_are_parts_of_micro_batches(cut_first: bool) -> None:
    documents = torch.tensor([[0] * 8, [0, 0, 0, 0, 0, 0, 1, 1]])
    whole = Batch(torch.arange(16).view(2, 8), torch.arange(16).view(2, 8), documents, torch.tensor([3, 4]))
    own = spans("ring", 8, 2, 1)  # in the second sample this part is of one document; attention sees two
    parts = whole.part(own).split(1) if cut_first else [part.part(own) for part in whole.split(1)]
    assert [part.documents is None for part in parts] == [True, False]
    assert [part.tokens.tolist() for part in parts] == [[[2, 3, 4, 5]], [[10, 11, 12, 13]]]
    assert all(part.positions is not None and part.positions.tolist() == [2, 3, 4, 5] for part in parts)
