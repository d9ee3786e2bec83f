"""Every schedule of every small size: complete, free of deadlock, with the peaks and bubbles it claims."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.errors import ConfigError
from hpctrain.layout.schedule import SCHEDULES, Schedule, groups, make_schedule
from hpctrain.layout.schedule_check import check
from hpctrain.layout.schedule_claims import claimed_bubble, claimed_peak
from hpctrain.layout.timeline import Times, play

CHUNKS = {"gpipe": [1], "1f1b": [1], "interleaved": [2, 3, 4], "zb-h1": [1, 2, 3, 4], "zb-v": [2]}
LETTERS = {"forward": "F", "backward": "B", "backward_input": "I", "backward_weight": "W"}


def short(schedule: Schedule) -> list[str]:
    """Per rank its actions as letter, virtual stage and micro-batch; the stage left out where a rank has only one."""
    chunks = schedule.chunks > 1
    return [
        " ".join(f"{LETTERS[a.kind]}{f'{a.stage}.' if chunks else ''}{a.micro_batch}" for a in order)
        for order in schedule.ranks
    ]


def prove(schedule: Schedule) -> None:
    """Check it, and hold it against its claims."""
    sizes = (schedule.name, schedule.stages, schedule.chunks, schedule.micro_batches)
    peaks = check(schedule)
    assert [peak.alive for peak in peaks] == [claimed_peak(*sizes, rank) for rank in range(schedule.stages)]
    assert all(max(peak.whole, peak.weights) <= peak.alive for peak in peaks)
    timeline, claim = play(schedule, Times.even(schedule)), claimed_bubble(*sizes)
    if claim:
        assert timeline.bubble == pytest.approx(claim.share, abs=1e-9)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("stages", range(1, 9))
def test_all_small_sizes(name: str, stages: int) -> None:
    for chunks, micro_batches in product(CHUNKS[name], range(1, 17)):
        prove(make_schedule(name, stages, chunks, micro_batches))


@settings(max_examples=30, deadline=None)
@given(data=st.data(), name=st.sampled_from(list(SCHEDULES)), stages=st.integers(1, 14), micro=st.integers(1, 40))
def test_larger_sizes(data: st.DataObject, name: str, stages: int, micro: int) -> None:
    prove(make_schedule(name, stages, data.draw(st.sampled_from(CHUNKS[name])), micro))


def test_gpipe() -> None:
    assert short(make_schedule("gpipe", 2, 1, 3)) == ["F0 F1 F2 B0 B1 B2"] * 2


def test_one_f_one_b() -> None:
    assert short(make_schedule("1f1b", 3, 1, 4)) == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]


def test_interleaved() -> None:
    assert short(make_schedule("interleaved", 2, 2, 4)) == [
        "F0.0 F0.1 F2.0 F2.1 F0.2 B2.0 F0.3 B2.1 F2.2 B0.0 F2.3 B0.1 B2.2 B2.3 B0.2 B0.3",
        "F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 F1.2 B1.0 F1.3 B1.1 F3.2 B3.2 F3.3 B3.3 B1.2 B1.3",
    ]


def test_zero_bubble_h1() -> None:
    """The later a rank, the more weights it puts off; on the first stage nobody waits, and backwards are whole."""
    assert short(make_schedule("zb-h1", 3, 1, 4)) == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3",
        "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3",
    ]


def test_zero_bubble_v() -> None:
    assert short(make_schedule("zb-v", 2, 2, 3)) == [
        "F0.0 F0.1 F0.2 F3.0 I3.0 W3.0 F3.1 I3.1 W3.1 B0.0 F3.2 I3.2 I0.1 W3.2 I0.2 W0.1 W0.2",
        "F1.0 F2.0 F1.1 F2.1 B2.0 F1.2 I1.0 W1.0 F2.2 I2.1 I1.1 I2.2 I1.2 W2.1 W1.1 W2.2 W1.2",
    ]


def test_homes_are_in_turn_or_in_a_v() -> None:
    turn, v = make_schedule("interleaved", 3, 2, 3), make_schedule("zb-v", 3, 2, 3)
    assert [turn.home(stage) for stage in range(6)] == [0, 1, 2, 0, 1, 2]
    assert [v.home(stage) for stage in range(6)] == [0, 1, 2, 2, 1, 0]
    assert [v.chunk(stage) for stage in range(6)] == [turn.chunk(stage) for stage in range(6)] == [0, 0, 0, 1, 1, 1]
    assert v.held == ((0, 5), (1, 4), (2, 3))


@pytest.mark.parametrize(
    ("stages", "micro_batches", "sizes"),
    [(4, 8, [4, 4]), (4, 9, [5, 4]), (4, 3, [3]), (8, 10, [10]), (8, 11, [8, 8]), (6, 15, [8, 7]), (1, 3, [1, 1, 1])],
)
def test_groups_are_of_the_stages_or_a_little_more(stages: int, micro_batches: int, sizes: list[int]) -> None:
    made = groups(stages, micro_batches)
    assert [len(group) for group in made] == sizes
    assert [group.start for group in made] == [sum(sizes[:index]) for index in range(len(sizes))]


@pytest.mark.parametrize("stages", range(2, 9))
def test_zero_bubble_keeps_no_more_than_one_f_one_b(stages: int) -> None:
    for micro_batches in range(1, 17):
        limit = max(peak.alive for peak in check(make_schedule("1f1b", stages, 1, micro_batches)))
        assert max(peak.alive for peak in check(make_schedule("zb-h1", stages, 1, micro_batches))) == limit
        assert max(peak.alive for peak in check(make_schedule("zb-v", stages, 2, micro_batches))) / 2 <= limit


@pytest.mark.parametrize("stages", range(2, 9))
def test_zb_v_has_no_bubble_where_steps_need_not_meet(stages: int) -> None:
    """arXiv 2401.10241, section 6; and with fewer than 2 p - 1 micro-batches it does have one."""
    for micro_batches in range(1, 20):
        schedule = make_schedule("zb-v", stages, 2, micro_batches)
        own = play(schedule, Times.even(schedule)).own_bubble
        assert (own < 1e-9) == (micro_batches >= 2 * stages - 1)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("dualpipe", 2, 1, 2), "parallel.schedule='dualpipe': must be one of gpipe, 1f1b, interleaved, zb-h1, zb-v."),
        (("1f1b", 0, 1, 2), "parallel.pp=0: must be 1 or more."),
        (("1f1b", 2, 0, 2), "parallel.chunks=0: must be 1 or more."),
        (("1f1b", 2, 1, 0), "micro_batches=0: must be 1 or more."),
        (
            ("gpipe", 2, 2, 2),
            "parallel.chunks=2: gpipe has 1 chunk a rank; "
            "use parallel.chunks=1, or parallel.schedule=interleaved or zb-h1.",
        ),
        (
            ("1f1b", 2, 3, 2),
            "parallel.chunks=3: 1f1b has 1 chunk a rank; "
            "use parallel.chunks=1, or parallel.schedule=interleaved or zb-h1.",
        ),
        (
            ("interleaved", 2, 1, 2),
            "parallel.chunks=1: interleaved has 2 or more chunks a rank; "
            "use parallel.chunks=2, or parallel.schedule=1f1b, which it is with one.",
        ),
        (
            ("zb-v", 2, 1, 2),
            "parallel.chunks=1: zb-v has 2 chunks a rank; "
            "use parallel.chunks=2, or parallel.schedule=zb-h1 for another number.",
        ),
    ],
)
def test_what_is_no_schedule_is_refused(arguments: tuple[str, int, int, int], sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        make_schedule(*arguments)
    assert str(refused.value) == sentence
