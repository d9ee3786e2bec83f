"""Reading ahead."""

import itertools
import threading
import time

import pytest

from hpctrain.data.prefetch import Prefetch


def threads():
    return [t for t in threading.enumerate() if t.name.startswith("prefetch")]


@pytest.mark.parametrize("ahead", [0, 1, 2, 100])
@pytest.mark.parametrize("workers", [1, 4])
def test_items_arrive_in_order_whoever_is_slow(ahead, workers):
    def read(n):
        time.sleep(0.002 if n % 3 == 1 else 0)
        return n

    with Prefetch(read, 7, 3, ahead, workers) as items:
        assert list(itertools.islice(items, 50)) == list(range(7, 157, 3))
    assert list(items) == [] and not threads()


@pytest.mark.parametrize("workers", [1, 2])
def test_runs_ahead_no_further_than_told(workers):
    read = []
    with Prefetch(lambda n: read.append(n) or n, 0, 1, 3, workers) as items:
        assert next(items) == 0
        deadline = time.monotonic() + 5
        while len(read) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.05)
        assert sorted(read) == [0, 1, 2, 3]  # one handed out, three that wait


def test_threads_read_at_once():
    both = threading.Barrier(2, timeout=10)
    with Prefetch(lambda n: both.wait() >= 0, 0, 1, 2, 2) as items:
        assert next(items) and next(items)


@pytest.mark.parametrize("ahead", [0, 2])
def test_an_error_arrives_in_its_place(ahead):
    def read(n):
        if n == 3:
            raise ValueError("on purpose")
        return n

    items = Prefetch(read, 1, 1, ahead)
    assert [next(items), next(items)] == [1, 2]
    with pytest.raises(ValueError, match="on purpose"):
        next(items)
    with pytest.raises(StopIteration):
        next(items)
    assert not threads()


def test_close_ends_the_threads():
    items = Prefetch(lambda n: n, 0, 1, 5, 2)
    assert next(items) == 0
    items.close()
    items.close()
    assert not threads()
    with pytest.raises(StopIteration):
        next(items)
