"""Schedules played with given times."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.layout.actions import Action, Schedule, ScheduleError
from hpctrain.layout.schedule import make_schedule
from hpctrain.layout.schedule_claims import claimed_bubble
from hpctrain.layout.timeline import Times, play

SECONDS = st.floats(0.05, 20)


def spans(schedule: Schedule, times: Times) -> list[list[tuple[float, float]]]:
    return [[(span.start, span.end) for span in of_rank] for of_rank in play(schedule, times).ranks]


def test_uneven_stages_and_latency_by_hand() -> None:
    """2 ranks, 1 micro-batch: forward 1 then 3, backwards 2 + 1 then 4 + 5, and 0.5 on the way each time."""
    times = Times((1, 3), (2, 4), (1, 5), latency=0.5)
    assert spans(make_schedule("1f1b", 2, 1, 1), times) == [[(0, 1), (14, 17)], [(1.5, 4.5), (4.5, 13.5)]]
    assert play(make_schedule("1f1b", 2, 1, 1), times).bubble == pytest.approx(1 - (4 + 12) / (2 * 17))


def test_parts_of_a_backward_have_times_of_their_own() -> None:
    """Rank 0 does not wait for the 5 that the weights of stage 1 take."""
    first = (Action("forward", 0, 0), Action("backward", 0, 0))
    second = (Action("forward", 1, 0), Action("backward_input", 1, 0), Action("backward_weight", 1, 0))
    schedule = Schedule("split", 2, 1, 1, (first, second))
    assert spans(schedule, Times((1, 3), (2, 4), (1, 5))) == [[(0, 1), (8, 11)], [(1, 4), (4, 8), (8, 13)]]


def test_nothing_is_on_the_way_between_stages_of_one_rank() -> None:
    late = [Times((1,) * 4, (1,) * 4, (1,) * 4, latency=latency) for latency in (0, 10)]
    ends = [play(make_schedule("zb-v", 2, 2, 1), times).end for times in late]
    assert ends[1] - ends[0] == 4 * 10  # 0 -> 1, (1 -> 1), 1 -> 0, and the same back


def test_even_times_are_of_a_whole_rank() -> None:
    schedule = make_schedule("interleaved", 2, 4, 2)
    assert play(schedule, Times.even(schedule, 8, 4, 2)).busy == (28, 28)
    assert Times.even(schedule, 8, 4, 2).forward == (2,) * 8


def test_own_bubble_leaves_out_what_is_before_a_ranks_first_action() -> None:
    ranks = ((Action("forward", 0, 0), Action("backward", 0, 0)), (Action("forward", 1, 0), Action("backward", 1, 0)))
    timeline = play(Schedule("one", 2, 1, 1, ranks), Times((1, 1), (1, 1), (1, 1)))
    assert (timeline.end, timeline.bubble) == (6, 0.5)
    assert timeline.own_bubble == 0.5  # rank 0 is there from the first to the last
    timeline = play(make_schedule("zb-v", 2, 2, 3), Times((1,) * 4, (1,) * 4, (1,) * 4))
    assert (timeline.bubble, timeline.own_bubble) == (pytest.approx(1 / 19), 0)


def test_ranks_that_wait_for_each_other_are_named() -> None:
    first = (Action("backward", 0, 0), Action("forward", 0, 0))
    second = (Action("forward", 1, 0), Action("backward", 1, 0))
    with pytest.raises(ScheduleError) as stuck:
        play(Schedule("stuck", 2, 1, 1, (first, second)), Times((1, 1), (1, 1), (1, 1)))
    assert str(stuck.value) == (
        "rank 0 waits for the activation of micro-batch 0 from stage 0; "
        "rank 1 waits for the activation of micro-batch 0 from stage 0"
    )


@settings(max_examples=100, deadline=None)
@given(stages=st.integers(1, 6), more=st.integers(0, 8), f=SECONDS, i=SECONDS, w=SECONDS)
def test_zb_h1_is_as_long_as_claimed_whatever_the_times(stages: int, more: int, f: float, i: float, w: float) -> None:
    schedule = make_schedule("zb-h1", stages, 1, stages + more)
    claim = claimed_bubble("zb-h1", stages, 1, stages + more, f, i, w)
    assert claim is not None
    assert play(schedule, Times.even(schedule, f, i, w)).bubble == pytest.approx(claim.share, abs=1e-9)


@settings(max_examples=100, deadline=None)
@given(stages=st.integers(1, 6), micro=st.integers(1, 12), f=SECONDS, i=SECONDS, w=SECONDS)
def test_whole_backwards_are_as_long_as_claimed_whatever_the_times(
    stages: int, micro: int, f: float, i: float, w: float
) -> None:
    for name, chunks in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3)):
        schedule, claim = (
            make_schedule(name, stages, chunks, micro),
            claimed_bubble(name, stages, chunks, micro, f, i, w),
        )
        if claim:
            assert play(schedule, Times.even(schedule, f, i, w)).bubble == pytest.approx(claim.share, abs=1e-9)


@settings(max_examples=50, deadline=None)
@given(data=st.data(), name=st.sampled_from(["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"]), latency=st.floats(0, 3))
def test_everything_waits_for_what_it_needs_and_for_nothing_else(
    data: st.DataObject, name: str, latency: float
) -> None:
    """Against the recursion that says when an action ends, written down once more and without any order of running."""
    schedule = make_schedule(name, data.draw(st.integers(1, 4)), 1 + (name in ("interleaved", "zb-v")), 5)
    stage_times = st.lists(SECONDS, min_size=schedule.virtual_stages, max_size=schedule.virtual_stages).map(tuple)
    times = Times(data.draw(stage_times), data.draw(stage_times), data.draw(stage_times), latency)
    played = {span.action: span for of_rank in play(schedule, times).ranks for span in of_rank}
    before = {b: a for order in schedule.ranks for a, b in pairwise(order)}
    gradients = {(a.stage, a.micro_batch): a for a in played if a.kind in ("backward", "backward_input")}
    for action, span in played.items():
        stage, micro = action.stage, action.micro_batch
        near, far = [before[action]] if action in before else [], []
        if action.kind == "forward" and stage:
            far.append(Action("forward", stage - 1, micro))
        if action.kind in ("backward", "backward_input") and stage < schedule.virtual_stages - 1:
            far.append(gradients[stage + 1, micro])
        home = schedule.home
        arrivals = [played[a].end + latency * (home(a.stage) != home(stage)) for a in far]
        assert span.start == max([0.0, *(played[a].end for a in near), *arrivals])
        assert span.end == span.start + times.of(action)
