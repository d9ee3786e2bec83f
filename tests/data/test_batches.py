"""What a rank is fed."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.data.batches import Batches
from hpctrain.data.build import build
from hpctrain.data.corpus import Corpus
from hpctrain.data.format import Header
from hpctrain.data.order import permuted
from hpctrain.data.prefetch import Prefetch
from hpctrain.data.sources import list_sources
from hpctrain.errors import DataError
from hpctrain.model.batch import IGNORED

X = IGNORED


def in_order(split, seq, size, **how):
    return Batches(split, seq, seed=None, global_batch=size, **how).batch(0)


def test_tiny_documents_by_hand(corpus_of):
    """ab| c| d| efgh|  in windows of four: a b | c   | d | e   f g h |"""
    batch = in_order(corpus_of(b"ab", b"c", b"d", b"efgh").split(0)[0], 4, 3)
    a, b, c, d, e, f, g, h = b"abcdefgh"
    assert batch.tokens.tolist() == [[a, b, 256, c], [256, d, 256, e], [a, b, 256, c]]
    assert batch.labels[:2].tolist() == [[b, 256, X, 256], [X, 256, X, f]]
    assert batch.documents[:2].tolist() == [[0, 0, 0, 1], [0, 1, 1, 2]]
    assert batch.samples.tolist() == [0, 1, 2]
    assert batch.labels[2].tolist() == [X] * 4  # past the end
    assert all(t.dtype == torch.int64 for t in (batch.tokens, batch.labels, batch.samples))
    assert batch.documents.dtype == torch.int32
    assert all(t.is_contiguous() for t in (batch.tokens, batch.labels, batch.documents))
    assert (g, h) == (103, 104)


def test_without_document_mask_every_label_counts(corpus_of):
    batch = in_order(corpus_of(b"ab", b"c", b"d", b"efgh").split(0)[0], 4, 2, document_mask=False)
    assert batch.documents is None and batch.valid_tokens == 8
    assert (batch.labels[:, :-1] == batch.tokens[:, 1:]).all()


def test_a_window_that_ends_with_its_document_does_not_predict_the_next(corpus_of):
    batch = in_order(corpus_of(b"abc", b"defgh").split(0)[0], 4, 2)
    assert batch.labels.tolist() == [[*b"bc", 256, X], [*b"efgh"]]
    assert batch.documents.tolist() == [[0] * 4, [0] * 4]


def test_second_part_of_a_corpus_is_addressed_from_its_own_start(corpus_of):
    _, validation = corpus_of(b"abcdef", b"gh", b"ijk").split(0.6)
    batch = in_order(validation, 3, 2)
    assert batch.tokens.tolist() == [[*b"gh", 256], [*b"ijk"]]
    assert batch.labels.tolist() == [[ord("h"), 256, X], [*b"jk", 256]]
    assert validation.samples(3) == 2


def expected(split, seq, window):
    """One sample, token by token."""
    corpus, start = split.corpus, split.first_token + window * seq
    owner = [int(np.searchsorted(corpus.documents, start + i, "right")) - 1 for i in range(seq + 1)]
    tokens = [int(corpus.tokens[start + i]) for i in range(seq + 1)]
    labels = [tokens[i + 1] if owner[i] == owner[i + 1] else X for i in range(seq)]
    return tokens[:-1], labels, [o - owner[0] for o in owner[:-1]]


@given(
    sizes=st.lists(st.integers(1, 30), min_size=2, max_size=30),
    seq=st.integers(1, 40),
    share=st.sampled_from([0.0, 0.3]),
    seed=st.integers(0, 100),
)
@settings(deadline=None, max_examples=100)
def test_samples_equal_those_made_token_by_token(sizes, seq, share, seed):
    offsets = np.cumsum([0, *sizes])
    header = Header("t", "0", 1 << 16, 0, int(offsets[-1]), len(sizes), "0", 0.0, {})
    tokens = np.random.default_rng(seed).integers(0, 1 << 16, offsets[-1], np.uint16)
    corpus = Corpus(Path("memory"), header, tokens, offsets)
    for split in filter(None, corpus.split(share)):
        if split.tokens <= seq:
            continue
        n = split.samples(seq)
        batch = Batches(split, seq, seed=seed, global_batch=2 * n).batch(0)
        order = [permuted(np.arange(n), n, seed, epoch) for epoch in (0, 1)]
        for i, window in enumerate(np.concatenate(order)):
            got = (batch.tokens[i].tolist(), batch.labels[i].tolist(), batch.documents[i].tolist())
            assert got == expected(split, seq, int(window))


@pytest.fixture
def split(corpus_of):
    rng = np.random.default_rng(2)
    return corpus_of(*(rng.bytes(int(n)) for n in rng.integers(1, 200, 30))).split(0.1)[0]


def joined(parts):
    return [torch.cat([getattr(p, name) for p in parts]) for name in ("tokens", "labels", "documents", "samples")]


@pytest.mark.parametrize("seed", [None, 3])
def test_stream_is_the_same_for_any_number_of_ranks(split, seed):
    """Through more than one epoch, which has a size that no batch divides."""
    assert split.samples(7) % 8
    streams = {}
    for size in (1, 2, 4):
        ranks = [Batches(split, 7, seed=seed, global_batch=8, rank=r, size=size) for r in range(size)]
        streams[size] = [joined([b.batch(s) for b in ranks]) for s in range(0, 2 * split.samples(7), 8)]
    for size in (2, 4):
        for one, many in zip(streams[1], streams[size]):
            assert all(torch.equal(a, b) for a, b in zip(one, many))


def test_stream_is_the_same_for_any_global_batch(split):
    """The coordinate is the sample, not the step."""
    small = Batches(split, 7, seed=3, global_batch=4).stream(16)
    large = Batches(split, 7, seed=3, global_batch=12).batch(16)
    assert torch.equal(torch.cat([next(small).tokens for _ in range(3)]), large.tokens)


def test_resumed_stream_continues(split, monkeypatch):
    """Whatever was computed ahead of the point where it stopped."""
    monkeypatch.setattr("hpctrain.data.batches.AHEAD", 20)
    run = list(itertools.islice(Batches(split, 7, seed=3, global_batch=8).stream(0), 12))
    resumed = list(itertools.islice(Batches(split, 7, seed=3, global_batch=8).stream(40), 7))
    for a, b in zip(run[5:], resumed):
        assert torch.equal(a.tokens, b.tokens) and torch.equal(a.samples, b.samples)
    jumping = Batches(split, 7, seed=3, global_batch=8)
    for s in (0, 3, 80, 8, 16, 11):
        assert torch.equal(jumping.batch(s).tokens, Batches(split, 7, seed=3, global_batch=8).batch(s).tokens)


def test_an_epoch_holds_every_window_once(split):
    n = split.samples(7)
    batch = Batches(split, 7, seed=3, global_batch=n).batch(n)
    assert sorted(batch.tokens.tolist()) == sorted(split.windows(7)[:, :-1].tolist())


def test_unshuffled_is_read_once_and_in_order(split):
    n = split.samples(7)
    batches = Batches(split, 7, seed=None, global_batch=8, document_mask=False)
    got = list(itertools.islice(batches.stream(0), -(-n // 8) + 1))
    assert torch.cat([b.tokens for b in got])[:n].tolist() == split.windows(7)[:, :-1].tolist()
    assert sum(b.valid_tokens for b in got) == 7 * n
    assert (torch.cat([b.tokens for b in got]) >= 0).all()  # labels that do not count leave them alone


def test_too_small(corpus_of):
    with pytest.raises(DataError, match="a sample needs 101"):
        in_order(corpus_of(b"ab", b"c").split(0)[0], 100, 1)


def test_forms_a_prefetched_stream(split):
    batches = Batches(split, 7, seed=3, global_batch=8)
    with Prefetch(batches.batch, 0, 8, 2) as ahead:
        for sample in range(0, 80, 8):
            assert torch.equal(next(ahead).tokens, Batches(split, 7, seed=3, global_batch=8).batch(sample).tokens)


def read_part(path, rank_batch):
    split = Corpus.open(path).split(0.1)[0]
    rank, size = dist.get_rank(), dist.get_world_size()
    part = Batches(split, 7, seed=3, global_batch=rank_batch * size, rank=rank, size=size).batch(8)
    return part.tokens.tolist()


def test_real_ranks_read_the_same_stream(split, ranks):
    want = Batches(split, 7, seed=3, global_batch=8).batch(8).tokens.tolist()
    first, second = ranks(2, read_part, split.corpus.path, 4)
    assert first + second == want


def test_a_token_that_the_vocabulary_does_not_have_is_refused(tmp_path):
    """Under tensor parallelism its embedding would be silently zero."""
    (tmp_path / "a.txt").write_bytes(b"some text " * 30)
    path = tmp_path / "corpus.h5"
    build(path, list_sources([tmp_path / "a.txt"]), [tmp_path])
    corpus = Corpus.open(path)
    place = path.read_bytes().index(b"s\0o\0m\0e\0")
    with path.open("r+b") as file:
        file.seek(place + 4)
        file.write(b"\xff\xff")
    with pytest.raises(DataError, match="token id 65535, its vocabulary ends at 256; see `hpctrain data check"):
        Batches(corpus.split(0.0)[0], 16, seed=None, global_batch=4).batch(0)
