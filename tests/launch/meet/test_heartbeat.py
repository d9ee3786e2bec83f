"""Who is at fault, from what ranks said of themselves."""

from __future__ import annotations

from hpctrain.launch.meet.heartbeat import Beat, silent, stuck
from hpctrain.telemetry.meter import Collective

TP = Collective("all_reduce", "tp", (2, 3), 17)
DP = Collective("all_gather", "dp+cp", (1, 3), 4)


def beat(rank: int, doing: str = "backward", blocked: Collective | None = None, idle_s: float = 60.0) -> Beat:
    return Beat(9, f"n{rank // 2}", 100 + rank, 12, doing, idle_s, blocked, TP)


def test_a_beat_survives_the_store() -> None:
    for one in (beat(1), beat(3, blocked=DP), Beat(1, "n", 1, 0, "start", 0.0, None, None)):
        assert Beat.load(one.dump()) == one


def test_silent_ranks_are_named_with_what_they_did_last() -> None:
    beats = {2: beat(2), 3: beat(3)}
    assert silent(beats, {2: 0.0, 3: 29.5}, 30.0) == ""
    assert silent(beats, {2: 0.0, 3: 31.0}, 30.0) == (
        "rank 3 (process 103 on n1), in step 12 in backward for 60 s, after all_reduce 17 over tp (ranks 2, 3), "
        "has given no sign of life for 31 s"
    )
    assert silent({}, {3: 31.0}, 30.0) == "rank 3 has given no sign of life for 31 s", "it was never heard"
    both = silent(beats, {2: 33.0, 3: 31.0}, 30.0)
    assert "rank 2 (process 102 on n1)" in both and both.endswith("have given no sign of life for 31 s")


def test_the_rank_that_does_not_take_part_is_named() -> None:
    beats = {0: beat(0, blocked=DP), 1: beat(1, blocked=DP), 2: beat(2, blocked=TP), 3: beat(3, "data", idle_s=61.0)}
    said = stuck(beats, TP, 60.0)
    assert said.startswith("all_reduce 17 over tp (ranks 2, 3) has not ended in 60 s: rank 3 (process 103 on n1)")
    assert "lives but does not take part, in step 12 in data for 61 s, after all_reduce 17" in said
    assert stuck(beats, DP, 60.0).count("rank 3 (process") == 1, "1 waits for 3 as well"
    far = stuck({0: beat(0, blocked=DP), 3: beat(3, "data")}, Collective("all_reduce", "pp", (0, 1), 2), 60.0)
    assert "rank 3 (process" in far, "it is at fault though it has no part in this one"


def test_the_slowest_of_several_is_named_first() -> None:
    beats = {1: beat(1, "data", idle_s=70.0), 3: beat(3, "data", idle_s=90.0), 2: beat(2, blocked=TP)}
    said = stuck(beats, Collective("all_reduce", "world", (1, 2, 3), 0), 60.0)
    assert (
        "rank 3 (process 103 on n1), lives but does not take part (as do rank 1), in step 12 in data for 90 s" in said
    )


def test_ranks_that_wait_for_each_other() -> None:
    said = stuck({2: beat(2, blocked=TP), 3: beat(3, blocked=DP)}, TP, 60.0)
    assert said.endswith(
        "all ranks wait for each other, rank 2 in all_reduce 17 over tp (ranks 2, 3); "
        "rank 3 in all_gather 4 over dp+cp (ranks 1, 3)"
    )
