"""The order of samples."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.data.order import permuted, shuffled
from tests.counting import calls

SEEDS = st.integers(0, 2**63 - 1)


@given(n=st.integers(1, 3000), seed=SEEDS, epoch=st.integers(0, 10**6))
@settings(deadline=None)
def test_an_epoch_reads_every_window_once(n, seed, epoch):
    assert sorted(permuted(np.arange(n), n, seed, epoch).tolist()) == list(range(n))


@pytest.mark.parametrize("n", [2**16, 2**16 + 1, 99_991, 316 * 317, 10**6 + 3])
def test_an_epoch_of_many_windows_reads_each_once(n):
    assert (np.bincount(permuted(np.arange(n), n, 7, 0), minlength=n) == 1).all()


@given(n=st.integers(5 * 10**8, 4 * 10**12), seed=SEEDS, first=st.integers(0, 5 * 10**8 - 1000))
@settings(deadline=None, max_examples=50)
def test_huge_epochs_stay_inside_and_do_not_repeat(n, seed, first):
    out = permuted(np.arange(first, first + 1000), n, seed, 0)
    assert out.min() >= 0 and out.max() < n and len(set(out.tolist())) == 1000


def test_a_window_of_a_huge_epoch_costs_no_memory_and_few_steps():
    """As few anywhere as at the start: steps that were counted, on arrays whose memory was."""
    shuffled(np.arange(4), 3, 1)  # whatever numpy still imports
    tracemalloc.start()
    steps = []
    for first in (0, 10**11):
        with calls() as made:
            shuffled(np.arange(first, first + 64), 10**12 // 2, 1)
        steps.append(made.number)
    assert tracemalloc.get_traced_memory()[1] < 100_000 and max(steps) < 200
    tracemalloc.stop()


def test_order_differs_by_epoch_and_seed_and_is_a_pure_function():
    a = permuted(np.arange(1000), 1000, 1, 0)
    for other in (permuted(np.arange(1000), 1000, 1, 1), permuted(np.arange(1000), 1000, 2, 0)):
        assert (a == other).mean() < 0.02
    assert (a == permuted(np.arange(1000), 1000, 1, 0)).all()
    assert (a[300:310] == permuted(np.arange(300, 310), 1000, 1, 0)).all()


def test_order_is_pinned():
    """A resumed run must read what it would have read: these values never change."""
    assert permuted(np.arange(8), 1000, 0, 0).tolist() == [723, 560, 32, 240, 271, 409, 302, 42]
    assert permuted(np.array([0, 10**11]), 5 * 10**11, 3, 9).tolist() == [461616465208, 198326825822]


def test_counts_run_on_through_epochs():
    n = 10
    got = shuffled(np.arange(25), n, 5)
    want = np.concatenate([permuted(np.arange(10), n, 5, e) for e in range(3)])[:25]
    assert got.tolist() == want.tolist()
    assert shuffled(np.arange(24).reshape(4, 6), n, 5).ravel().tolist() == want[:24].tolist()


@pytest.mark.parametrize("n", [2, 3, 7, 100])
def test_every_place_is_equally_likely(n):
    """Chi-square over epochs of where index 0 and the last go; six deviations of slack."""
    draws = 200 * min(n, 20)
    for index in (0, n - 1):
        hits = np.bincount([int(permuted(np.array([index]), n, 11, e)[0]) for e in range(draws)], minlength=n)
        chi2 = float(((hits - draws / n) ** 2 / (draws / n)).sum())
        assert chi2 < (n - 1) + 6 * np.sqrt(2 * (n - 1)), hits


def test_neighbours_are_unrelated():
    """Distances between images of neighbours are those of independent draws: their mean is n / 3."""
    n = 100_000
    out = permuted(np.arange(n), n, 3, 0)
    assert abs(np.abs(np.diff(out)).mean() / (n / 3) - 1) < 0.02
    assert abs(np.corrcoef(np.arange(n), out)[0, 1]) < 0.02
