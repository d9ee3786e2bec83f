"""The roll call: how often the store is called, who is missing, and what clocks it can tell apart."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter

import pytest
import torch.distributed as dist

from hpctrain.errors import LaunchError
from hpctrain.launch.life.identity import Identity
from hpctrain.launch.meet import gathering
from hpctrain.launch.meet.gathering import roll_call
from hpctrain.launch.meet.rollcall import Arrival, Verdict, ahead


class Counted:
    """A store that counts its calls."""

    def __init__(self, store) -> None:
        self.store, self.calls = store, Counter()

    def __getattr__(self, name):
        self.calls[name] += 1
        return getattr(self.store, name)


def gather(world: int, absent: tuple[int, ...] = (), timeout_s: float = 10.0, late: float = 0.0):
    """Ranks as threads: calls, verdict or error, and what rank 0 was given, of each."""
    server = dist.HashStore()
    calls: dict[int, Counter] = {}
    ends: dict[int, object] = {}
    given: dict[str, dict] = {}

    def examine(arrivals, heard):
        given.update(arrivals=dict(arrivals), heard=dict(heard))
        return ""

    def rank(number: int) -> None:
        store = Counted(server)
        if number == 0:
            time.sleep(late)
        me = Identity(number, world, 0, 1, "srun", "k")
        try:
            ends[number] = roll_call(
                store, me, Arrival(world, f"h{number}", (number,)), time.monotonic() + timeout_s, timeout_s, examine
            )
        except LaunchError as error:
            ends[number] = str(error)
        calls[number] = store.calls

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(world) if number not in absent]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return calls, ends, given


def test_a_rank_calls_the_store_as_often_in_any_world() -> None:
    """Looks for the verdict aside, which are further apart the longer it waits. Rank 0 reads arrivals in batches."""
    seen = []
    for world in (2, 16, 48):
        calls, ends, given = gather(world)
        assert all(isinstance(end, Verdict) and not end.error for end in ends.values()), ends
        assert sorted(given["arrivals"]) == list(range(world))
        others = {tuple(sorted((name, n) for name, n in calls[r].items() if name != "check")) for r in range(1, world)}
        assert len(others) <= 2, "but for whether rank 0's clock was there already"
        seen.append(max(sum(n for _, n in one) for one in others))
        passes = calls[0]["set"] - 1  # one sets the verdict
        assert calls[0]["multi_get"] <= passes and calls[0]["check"] <= passes and calls[0]["add"] == passes + 1
        assert "get" not in calls[0]
    assert max(seen) <= 6, "seen, clock, number, arrival, verdict, told"


def test_those_that_are_missing_are_named_though_one_of_them_has_a_number() -> None:
    """Rank 2 dies between its number and its arrival; rank 5 never comes. Nobody else is counted with them."""
    whole = gathering._attend

    def attend(store, rank, arrival, timeout_s):
        if rank == 2:
            store.add("came", 1)
            raise LaunchError("dead")
        return whole(store, rank, arrival, timeout_s)

    gathering._attend = attend
    try:
        _, ends, _ = gather(6, absent=(5,), timeout_s=1.0)
    finally:
        gathering._attend = whole
    assert ends.pop(2) == "dead"
    assert all(str(end).startswith("ranks 2, 5 of 6 did not arrive within 1 s") for end in ends.values()), ends


def test_a_rank_0_that_is_late_does_not_make_clocks_differ() -> None:
    """All others have waited for it for longer than clocks may differ; theirs are its own."""
    _, _, given = gather(4, late=1.2)
    for rank, arrival in given["arrivals"].items():
        low, high = ahead(arrival, given["heard"][rank])
        assert low <= 0.0 <= high and low > -math.inf


@pytest.mark.parametrize("skew", [-7.0, 7.0])
def test_a_clock_that_differs_is_known_within_what_the_store_takes(monkeypatch, skew: float) -> None:
    """One rank's clock is wrong; rank 0 waits for another rank meanwhile."""
    real, names = time.time, threading.local()
    attend = gathering._attend

    def tampered(store, rank, arrival, timeout_s):
        names.skew = skew if rank == 2 else 0.0
        time.sleep({2: 0.5, 3: 1.0}.get(rank, 0.0))  # when rank 2 comes, rank 0 has told its time
        return attend(store, rank, arrival, timeout_s)

    monkeypatch.setattr(gathering, "_attend", tampered)
    monkeypatch.setattr(gathering.time, "time", lambda: real() + getattr(names, "skew", 0.0))
    _, _, given = gather(4)
    bounds = {rank: ahead(a, given["heard"][rank]) for rank, a in given["arrivals"].items()}
    low, high = bounds.pop(2)
    assert low <= skew <= high and high - low < 2.0
    assert all(low <= 0.0 <= high for low, high in bounds.values())


def test_what_nobody_told_is_no_bound() -> None:
    assert ahead(Arrival(2, "a", (), clock=100.0), 100.5) == (-0.5, math.inf)
    assert ahead(Arrival(2, "a", (), clock=100.0, told=99.0), 100.5) == (-0.5, 1.0)
