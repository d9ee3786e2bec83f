"""Corpora by weight: exact, a pure function, without memory of what was read."""

import tracemalloc
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.data.batches import Batches
from hpctrain.data.blend import LONGEST, Blend, Phase, whole
from hpctrain.data.corpus import Corpus, Split
from hpctrain.data.format import Header
from hpctrain.data.prefetch import Prefetch
from hpctrain.data.samples import Windows
from hpctrain.errors import ConfigError
from tests.counting import calls

WEIGHTS = st.lists(st.sampled_from([0.05, 0.1, 0.25, 1, 2, 3, 0.333, 7]), min_size=1, max_size=6)


def of(*weights, start=0):
    return Phase(start, tuple(weights))


@given(weights=WEIGHTS, begin=st.integers(0, 10**15))
@settings(deadline=None, max_examples=60)
def test_no_corpus_is_ever_a_sample_off(weights, begin):
    """At every sample from the beginning on; so less than two in a window that begins anywhere."""
    blend = Blend([of(*weights)])
    share = np.array(blend.shares[0], dtype=float)
    corpus, index = blend.locate(begin + np.arange(3000))
    before = np.array([int(n) for n in blend.counts(begin)])
    exact = [int(begin) * s for s in blend.shares[0]]
    off = np.array([float(n - e) for n, e in zip(before.tolist(), exact)])
    assert (abs(off) < 1).all()
    for c in range(len(weights)):
        mine = (corpus == c).cumsum()
        error = off[c] + mine - share[c] * np.arange(1, 3001)
        assert abs(error).max() < 1 + 1e-6
        assert (index[corpus == c] == before[c] + np.arange(mine[-1])).all()


@given(a=st.integers(1, 300), b=st.integers(1, 300))
@settings(deadline=None, max_examples=40)
def test_of_two_corpora_no_window_anywhere_is_more_than_a_sample_off(a, b):
    corpus, _ = Blend([of(a, b)]).locate(np.arange(3 * (a + b)))
    error = np.append(0, (corpus == 0).cumsum()) - np.arange(3 * (a + b) + 1) * a / (a + b)
    assert error.max() - error.min() <= 1 + 1e-9


def test_weights_are_what_their_decimals_say():
    assert whole([0.7, 0.2, 0.1]) == (7, 2, 1) and whole([1e-3, 1]) == (1, 1000) and whole([5, 5]) == (1, 1)
    many = whole([123456789, 987654321, 1111111])
    assert sum(many) == LONGEST and abs(many[0] / LONGEST - 123456789 / 1112222221) < 1e-5
    assert Blend([of(0.7, 0.3)]).shares == [[Fraction(7, 10), Fraction(3, 10)]]


@pytest.mark.parametrize("weights", [[1, -1], [0, 0], [float("nan"), 1], [1e-7, 1]])
def test_weights_that_are_none(weights):
    with pytest.raises(ConfigError, match=r"data\.weights"):
        whole(weights)


def test_weights_change_where_they_are_told_to():
    blend = Blend([of(1, 1), of(1, 0, start=101), of(1, 3, start=200)])
    corpus, index = blend.locate(np.arange(300))
    assert blend.counts(101).tolist() == [51, 50] and (corpus[101:200] == 0).all()
    assert blend.counts(200).tolist() == [150, 50] and (corpus[200:] == 1).sum() == 75
    for c in (0, 1):
        assert (index[corpus == c] == np.arange((corpus == c).sum())).all()
    for at in (0, 7, 101, 150, 200, 299):
        assert blend.counts(at).tolist() == [(corpus[:at] == c).sum() for c in (0, 1)]
    with pytest.raises(ConfigError, match=r"data\.anneal"):
        Blend([of(1, 1), of(2, 1, start=0)])


@given(weights=st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3), min_size=1, max_size=4),
       starts=st.lists(st.integers(1, 400), min_size=3, max_size=3, unique=True), counts=st.lists(st.integers(1, 200),
       min_size=3, max_size=3))  # fmt: skip
@settings(deadline=None, max_examples=100)
def test_when_a_corpus_was_read_as_often(weights, starts, counts):
    """Counted one by one, over all phases."""
    weights = [w if any(w) else [1, 0, 0] for w in weights]
    blend = Blend([of(*w, start=s) for w, s in zip(weights, [0, *sorted(starts)])])
    corpus, _ = blend.locate(np.arange(8000))
    for c, n in enumerate(counts):
        seen = np.flatnonzero(corpus == c)
        told = blend.until(c, n)
        if told is None:
            assert len(seen) < n
        else:
            assert seen[n - 1] < told <= seen[n - 1] + 60


def test_of_one_phase_the_validation_has_its_weights():
    for weights in ((0.7, 0.2, 0.1), (5, 5), (0, 1), (3,), (0.123, 0.456, 0.421)):
        assert Blend([of(*weights)]).constant().shares == Blend([of(*weights)]).shares


def test_order_is_pinned():
    """A resumed run must read what it would have read: these values never change."""
    corpus, index = Blend([of(0.5, 0.3, 0.2)]).locate(np.arange(12))
    assert corpus.tolist() == [0, 1, 0, 2, 0, 1, 0, 1, 0, 2, 0, 1]
    assert index.tolist() == [0, 0, 1, 0, 2, 1, 3, 2, 4, 1, 5, 3]


def memory(documents, size, seed, vocab=1 << 16):
    """A split of random tokens and document lengths, without a file."""
    rng = np.random.default_rng(seed)
    offsets = np.cumsum([0, *rng.integers(1, size, documents)])
    tokens = rng.integers(0, vocab, offsets[-1]).astype(np.uint16)
    corpus = Corpus(
        Path("memory"), Header("t", "0", vocab, 0, int(offsets[-1]), documents, "0", 0.0, {}), tokens, offsets
    )
    return Split(corpus, 0, documents)


SPLITS = [memory(300, 60, 1), memory(70, 40, 2), memory(20, 400, 3)]
SEQ = 16


def three(size=1, rank=0, batch=40, seed=5):
    blend = Blend([of(0.6, 0.3, 0.1), of(0.1, 0.1, 0.8, start=6000)])
    sources = [Windows(split, SEQ) for split in SPLITS]
    return Batches(sources, SEQ, seed=seed, global_batch=batch, rank=rank, size=size, blend=blend)


@pytest.fixture(scope="module")
def stream():
    """(corpus, document, offset) of 10,000 samples, and their tokens."""
    one = three()
    places = [place for at in range(0, 10_000, 40) for place in one.places(at)]
    tokens = np.concatenate([one.batch(at).tokens.numpy() for at in range(0, 10_000, 40)])
    return places, tokens


def test_places_are_where_the_tokens_are(stream):
    for (corpus, document, offset), tokens in zip(*stream):
        whole = SPLITS[corpus].corpus
        start = int(whole.documents[document]) + offset
        assert (whole.tokens[start : start + SEQ] == tokens).all() and start < whole.documents[document + 1]


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_stream_is_the_same_for_any_number_of_ranks(stream, size):
    ranks = [three(size, rank) for rank in range(size)]
    places = [place for at in range(0, 10_000, 40) for rank in ranks for place in rank.places(at)]
    assert places == stream[0]
    tokens = np.concatenate([rank.batch(at).tokens.numpy() for at in range(0, 10_000, 40) for rank in ranks])
    assert (tokens == stream[1]).all()


@pytest.mark.parametrize("workers", [0, 1, 2, 3, 4])
def test_stream_is_the_same_for_any_number_of_workers(stream, workers):
    """0: nothing is read ahead."""
    ahead = 2 * workers
    with Prefetch(three().batch, 0, 40, ahead, max(workers, 1)) as batches:
        tokens = np.concatenate([next(batches).tokens.numpy() for _ in range(250)])
    assert (tokens == stream[1]).all()


@given(at=st.integers(0, 9_999), size=st.sampled_from([1, 2, 4, 8]), batch=st.sampled_from([8, 16, 40, 96]))
@settings(deadline=None, max_examples=60)
def test_stream_continues_after_a_stop_anywhere_under_another_layout(stream, at, size, batch):
    ranks = [three(size, rank, batch) for rank in range(size)]
    got = [place for begin in range(at, at + 3 * batch, batch) for rank in ranks for place in rank.places(begin)]
    want = stream[0][at : at + 3 * batch]
    assert got[: len(want)] == want


def test_every_corpus_has_epochs_of_its_own(stream):
    corpora = np.array([place[0] for place in stream[0]])
    sources = [Windows(split, SEQ) for split in SPLITS]
    assert three().epochs(10_000) == [(corpora == c).sum() / sources[c].count for c in range(3)]
    assert min(three().epochs(10_000)) > 1
    for c in range(3):
        first = [place for place in stream[0] if place[0] == c][: sources[c].count]
        assert len(set(first)) == sources[c].count  # an epoch has every window once


def test_validation_reads_each_corpus_once(stream):
    sources = [Windows(split, SEQ, document_mask=False) for split in SPLITS]
    batches = Batches(sources, SEQ, seed=None, global_batch=8, blend=Blend([of(0.6, 0.3, 0.1)]))
    valid = sum(batches.batch(at).valid_tokens for at in range(0, batches.samples + 8, 8))
    assert valid == SEQ * sum(source.count for source in sources)


def test_corpora_of_a_trillion_tokens_cost_no_memory():
    """Metadata alone: a million documents of a million tokens, three times; all tokens are one in memory. To seek takes
    as few steps anywhere, counted."""
    n, documents = 10**12, 10**6
    offsets = np.arange(documents + 1) * 10**6
    tokens = np.lib.stride_tricks.as_strided(np.full(1, 7, np.uint16), (n,), (0,))
    corpus = Corpus(Path("memory"), Header("t", "0", 257, 256, n, documents, "0", 0.0, {}), tokens, offsets)
    tracemalloc.start()
    blend = Blend([of(0.123, 0.456, 0.421)])
    sources = [Windows(Split(corpus, 0, documents), 2048) for _ in range(3)]
    batches = Batches(sources, 2048, seed=1, global_batch=64, size=8, rank=3, blend=blend)
    seen = [batches.places(0)]  # and whatever numpy still imports
    with calls() as made:
        seen += [batches.places(at) for at in (10**9, 10**11, 10**12)]
        assert batches.batch(10**11).tokens.shape == (8, 2048)
    assert tracemalloc.get_traced_memory()[1] < 100 << 20
    tracemalloc.stop()
    assert made.number < 5000
    assert all(0 <= d < documents and 0 <= o < 10**6 for places in seen for _, d, o in places)
    assert len({place for places in seen for place in places}) == 32
    assert batches.epochs(10**12) == pytest.approx([w * 10**12 / (n // 2048) for w in (0.123, 0.456, 0.421)], rel=1e-6)


def test_corpora_of_one_size_are_not_read_in_step():
    """The order of each has a seed of its own; a single corpus has the run's, as it always had."""
    sources = [Windows(SPLITS[0], SEQ), Windows(SPLITS[0], SEQ)]
    both = Batches(sources, SEQ, seed=5, global_batch=200, blend=Blend([of(1, 1)])).places(0)
    first, second = ([place[1:] for place in both if place[0] == c] for c in (0, 1))
    alone = [place[1:] for place in Batches(sources[:1], SEQ, seed=5, global_batch=100).places(0)]
    assert sum(a == b for a, b in zip(first, second)) < 20 and first != alone
