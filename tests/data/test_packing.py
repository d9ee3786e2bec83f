"""Whole documents in samples: as one by one, nothing lost, nothing that leaks."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.config.schema import ModelConfig
from hpctrain.data.batches import Batches
from hpctrain.data.packing import pack
from hpctrain.data.samples import Packed, Windows
from hpctrain.model.batch import IGNORED
from hpctrain.model.transformer import Transformer


def one_by_one(lengths, seq):
    """Best fit, longest first, by hand: the room of each sample."""
    room = []
    for size in sorted(lengths, reverse=True):
        fits = [i for i, left in enumerate(room) if left >= size]
        if fits:
            room[min(fits, key=lambda i: room[i])] -= size
        else:
            room.append(seq - size)
    return sorted(room)


@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=60), seq=st.integers(1, 24))
@settings(deadline=None, max_examples=200)
def test_packs_as_one_by_one_and_loses_nothing(sizes, seq):
    offsets = np.cumsum([0, *sizes])
    packing = pack(offsets, seq)
    pieces = []
    for size in sizes:
        whole, rest = divmod(size - 1, seq)
        pieces += [seq] * whole + ([rest] if rest else [])
    used = [int(packing.length[a:b].sum()) for a, b in zip(packing.first[:-1], packing.first[1:])]
    assert sorted(seq - n for n in used) == one_by_one(pieces, seq)
    covered = np.concatenate([np.arange(s, s + n) for s, n in zip(packing.start, packing.length)] or [[]])
    ends = offsets[1:] - 1
    assert sorted(covered) == sorted(set(range(offsets[-1])) - set(ends.tolist()))
    assert packing.cut == sum(size - 1 > seq for size in sizes)


def test_known_waste():
    packing = pack(np.cumsum([0, 7, 5, 3, 3]), 8)  # 6 + 2 and 4 + 2 of 8
    assert (packing.samples, packing.waste) == (2, 2 / 16)


def test_a_million_documents_are_packed_in_seconds():
    lengths = np.random.default_rng(0).integers(2, 900, 10**6)
    packing = pack(np.append(0, lengths.cumsum()), 2048)
    assert packing.waste < 0.001 and packing.length.sum() == (lengths - 1).sum()


def test_samples_by_hand(corpus_of):
    split = corpus_of(b"abcd", b"ef", b"g").split(0)[0]
    batch = Batches([Packed(split, 6)], 6, seed=None, global_batch=2).batch(0)
    a, b, c, d, e, f, g = b"abcdefg"
    assert batch.tokens.tolist() == [[a, b, c, d, e, f], [g, 256, 256, 256, 256, 256]]
    assert batch.labels.tolist() == [[b, c, d, 256, f, 256], [256] + [IGNORED] * 5]
    assert batch.documents.tolist() == [[0, 0, 0, 0, 1, 1], [0, 1, 1, 1, 1, 1]]
    assert Packed(split, 6).places(np.array([0, 1])) == [(0, 0), (2, 0)]


@pytest.mark.parametrize("kind", [Windows, Packed])
def test_a_token_of_one_document_changes_nothing_in_another(corpus_of, kind):
    """Through the model, every position: the other documents of a sample are bit-equal, the same one is not."""
    model = ModelConfig(layers=2, hidden=32, heads=2, max_seq=64)
    torch.manual_seed(0)
    net = Transformer(model).double().eval()
    for p in net.parameters():
        torch.nn.init.normal_(p, std=0.3)
    rng = np.random.default_rng(4)
    split = corpus_of(*(rng.bytes(n) for n in (20, 9, 15, 30, 5))).split(0)[0]
    batch = Batches([kind(split, 40)], 40, seed=None, global_batch=1).batch(0)
    changed = batch.tokens.clone()
    changed[0, 3] = (changed[0, 3] + 1) % 256
    with torch.no_grad():
        before, after = (net.logits(tokens, batch.documents) for tokens in (batch.tokens, changed))
    same = (before == after).all(-1)[0]
    first = batch.documents[0] == batch.documents[0, 3]
    assert same[~first].all() and same[:3].all() and not same[3:][first[3:]].any()
    assert (~first).sum() > 5
