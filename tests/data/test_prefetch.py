"""Reading ahead."""

import itertools
import threading
import time

import pytest

from hpctrain.data.prefetch import Prefetch


def threads():
    return [t for t in threading.enumerate() if t.name == "prefetch"]


@pytest.mark.parametrize("ahead", [0, 1, 2, 100])
def test_items_arrive_in_order(ahead):
    with Prefetch(iter(range(50)), ahead) as items:
        assert list(items) == list(range(50))
        assert list(items) == []
    assert not threads()


def test_runs_ahead_no_further_than_told():
    read = []
    with Prefetch((read.append(i) or i for i in itertools.count()), 3) as items:
        assert next(items) == 0
        deadline = time.monotonic() + 5
        while len(read) < 5 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.05)
        assert len(read) == 5  # one handed out, three waiting, one in the hands of the thread


@pytest.mark.parametrize("ahead", [0, 2])
def test_an_error_arrives_in_its_place(ahead):
    def source():
        yield 1
        yield 2
        raise ValueError("on purpose")

    items = Prefetch(source(), ahead)
    assert [next(items), next(items)] == [1, 2]
    with pytest.raises(ValueError, match="on purpose"):
        next(items)
    with pytest.raises(StopIteration):
        next(items)
    assert not threads()


def test_close_ends_a_thread_that_waits_for_room():
    items = Prefetch(itertools.count(), 1)
    assert next(items) == 0
    items.close()
    items.close()
    assert not threads()
    with pytest.raises(StopIteration):
        next(items)
