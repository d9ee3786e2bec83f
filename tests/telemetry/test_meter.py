"""Every second is counted once."""

from __future__ import annotations

import time

import pytest

from hpctrain.telemetry.meter import Meter
from hpctrain.telemetry.metrics import StepTime


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that stands still unless it is moved."""
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def wait(meter: Meter, axis: str, clock: list[float], seconds: float) -> None:
    meter.sent("all_reduce", axis, 0)
    with meter.waiting(meter.began("all_reduce", axis, (0, 1))):
        clock[0] += seconds


def test_waiting_and_nested_phases_leave_the_phase_around_them(clock: list[float]) -> None:
    meter = Meter()
    with meter.phase("backward"):
        clock[0] += 0.75
        wait(meter, "tp", clock, 0.25)
        with meter.phase("optimizer"):
            clock[0] += 2
            wait(meter, "dp", clock, 2)
        clock[0] += 8
    assert meter.seconds == {"backward": 8.75, "optimizer": 2.0}
    assert meter.communication() == 2.25
    assert sum(meter.seconds.values()) + meter.communication() == 13


def test_what_was_under_way_before_it_was_waited_for_is_hidden(clock: list[float]) -> None:
    meter = Meter()
    begun, since = meter.began("all_gather", "dp+cp", (0, 1)), clock[0]
    meter.sent("all_gather", "dp+cp", 8)
    with meter.phase("forward"):
        clock[0] += 4
        with meter.waiting(begun, since):
            clock[0] += 1
    assert (meter.communication(), meter.hidden(), meter.seconds["forward"]) == (1, 4, 4)
    assert StepTime.of(meter, 5, 1) == StepTime(5, 0, 4, 1, 0, hidden=4)
    wait(meter, "dp+cp", clock, 2)
    assert meter.hidden() == 4


def test_a_wait_between_phases_is_charged_to_none(clock: list[float]) -> None:
    meter = Meter()
    wait(meter, "dp+cp", clock, 3)
    with meter.phase("forward"):
        clock[0] += 1
    assert meter.seconds["forward"] == 1


def test_a_phase_that_raises_is_counted(clock: list[float]) -> None:
    meter = Meter(tracing=True)
    with pytest.raises(KeyError), meter.phase("data"):
        clock[0] += 2
        raise KeyError
    assert meter.seconds["data"] == 2
    assert meter.events == [("data", 100, 102)]


def test_split_of_a_step(clock: list[float]) -> None:
    meter = Meter()
    for phase, seconds, waited in (("data", 1, 0), ("forward", 4, 1), ("backward", 8, 2), ("optimizer", 3, 1)):
        with meter.phase(phase):
            clock[0] += seconds - waited
            wait(meter, "tp", clock, waited)
    split = StepTime.of(meter, 20, 2)
    assert split == StepTime(step=10, data=0.5, compute=4.5, communication=2, optimizer=1)
    assert StepTime.of(Meter(), 1, 1) == StepTime(1, 0, 0, 0, 0)


def test_what_a_rank_does_can_be_read_from_outside() -> None:
    meter = Meter()
    first = meter.began("all_reduce", "tp", (2, 3))
    others = [meter.began("all_gather", "tp", (2, 3)), meter.began("all_reduce", "dp", (1, 3))]
    assert [first.number, *(c.number for c in others)] == [0, 1, 0]
    before = meter.changes
    with meter.phase("backward"), pytest.raises(RuntimeError), meter.waiting(first):
        assert (meter.doing, meter.blocked) == ("backward", first)
        raise RuntimeError
    assert (meter.doing, meter.blocked, meter.last) == ("start", None, ("all_reduce", "dp", (1, 3), 0))
    assert meter.changes == before + 4
    meter.reset()
    assert meter.began("all_reduce", "tp", (2, 3)).number == 2, "numbers go on, so that ranks can compare them"


def test_waiting_for_objects_is_no_traffic_and_is_counted_once(clock: list[float]) -> None:
    meter = Meter()
    with meter.phase("checkpoint"):
        clock[0] += 1
        with meter.waiting(meter.began("gather_objects", "world", (0, 1))):
            clock[0] += 2
    assert meter.traffic == {} and meter.seconds == {"checkpoint": 1, "gather_objects": 2}


def test_what_a_device_waits_for_is_seen_though_its_host_has_gone_on() -> None:
    class Work:
        done = False

        def is_completed(self) -> bool:
            return self.done

    work, meter = Work(), Meter(asynchronous=True)
    begun = meter.began("all_reduce", "dp", (0, 1))
    meter.in_flight = [work]
    with meter.waiting(begun):
        pass  # as NCCL does, which only puts the wait into the device's queue
    assert meter.blocked is None and meter.awaited() == begun
    work.done = True
    assert meter.awaited() is None, "a host that computes, or compiles, waits for nobody"
