"""The time that Slurm leaves a job, and when to stop for it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest

from hpctrain.errors import LaunchError
from hpctrain.launch.life import limit
from hpctrain.launch.life.limit import END_VARIABLE, TimeLimit, parse_left, seconds_left
from hpctrain.launch.rank.bootstrap import FAREWELL_S

Programs = Callable[[str, str], None]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0:45\n", 45),
        ("12:34", 754),
        ("1:02:03", 3723),
        ("2-00:00:01", 172801),
        ("UNLIMITED\n", None),
        ("NOT_SET", None),
        ("INVALID", None),
        ("", None),
    ],
)
def test_time_left_as_squeue_writes_it(text: str, seconds: float | None) -> None:
    assert parse_left(text) == seconds


class Job:
    """A job that ends at `end` on a clock that is moved by hand."""

    def __init__(self, end: float | None) -> None:
        self.now, self.end, self.asked = 0.0, end, 0

    def left(self) -> float | None:
        self.asked += 1
        return None if self.end is None else self.end - self.now

    def limit(self, lead_s: float = 0.0) -> TimeLimit:
        return TimeLimit(self.left, lead_s, lambda: self.now)

    def step(self, time: TimeLimit, seconds: float) -> bool:
        time.begin_step()
        self.now += seconds
        return time.near()


def test_it_is_near_when_another_step_and_save_might_not_fit() -> None:
    job = Job(120.0)
    time = job.limit()
    assert not job.step(time, 3.0) and job.asked == 1
    assert time.saved(7.0) == ""
    assert time.need_s == 2 * (3 + 7) + 30
    job.now += 50  # a save: no step
    assert not job.step(time, 3.0), "64 s are left"
    job.now += 12
    assert not job.step(time, 1.0) and job.asked == 1, "51 s are left, and 50 would not do"
    assert job.step(time, 1.0) and job.asked == 2


def test_an_extended_limit_is_believed() -> None:
    job = Job(50.0)
    time = job.limit()
    job.now, job.end = 45.0, 500.0
    assert not job.step(time, 1.0) and job.asked == 2
    job.end = None
    job.now = 495.0
    assert not job.step(time, 1.0) and job.asked == 3
    job.now = 1e9
    assert not job.step(time, 1.0) and job.asked == 3, "a job without end is not asked about"


def test_a_warning_that_comes_too_late_is_said_once() -> None:
    time = Job(1000.0).limit(lead_s=80.0)
    assert time.saved(20.0) == ""
    said = time.saved(40.0)
    assert "a step takes up to 0 s and a save 40 s, and Slurm warns 80 s before" in said
    assert "will stop by itself 110 s before it" in said and time.saved(41.0) == ""
    assert Job(None).limit(lead_s=1.0).saved(40.0) == "", "without a limit there is nothing to be late for"
    assert Job(10.0).limit().saved(40.0) == "", "nor where the lead is not known"


def test_it_is_said_also_where_steps_alone_take_longer_than_the_lead() -> None:
    job = Job(10_000.0)
    time = job.limit(lead_s=60.0)
    job.step(time, 30.0)
    assert time.need_s > time.lead_s
    assert "a step takes up to 30 s and a save 1 s" in time.saved(1.0)
    assert time.saved(1.0) == ""


def test_the_first_step_of_a_life_stands_for_others_only_until_there_are_some() -> None:
    job = Job(10_000.0)
    time = job.limit()
    job.step(time, 300.0)
    assert time.need_s == 2 * 300 + 30
    for seconds, longest in ((3.0, 3), (5.0, 5), (4.0, 5)):
        job.step(time, seconds)
        assert time.need_s == 2 * longest + 30


@pytest.mark.parametrize(("end", "of_the_limit"), [(100.0, True), (221.0, False), (None, False)])
def test_a_warning_long_before_the_limit_is_a_preemption(end: float | None, of_the_limit: bool) -> None:
    """Field failure 17: what a warning is of is known from the limit itself, not guessed from how long the job ran."""
    job = Job(end)
    time = job.limit(lead_s=60.0)
    job.now = 0.0 if end == 100.0 else 100.0
    assert time.warned_of() == of_the_limit


def test_a_warning_is_the_limits_where_slurm_does_not_say() -> None:
    def refuse() -> float | None:
        raise LaunchError("no answer")

    assert TimeLimit(refuse, 60.0).warned_of()


def test_only_a_rank_of_slurm_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def call(command: list[str], timeout_s: float) -> str:
        assert timeout_s < 60, "all ranks wait for it"
        asked.append(command)
        return "1:30\n"

    monkeypatch.setattr(limit, "call", call)
    assert TimeLimit.of_job({}) is None and TimeLimit.of_job({"SLURM_JOB_ID": "7"}) is None and asked == []
    found = TimeLimit.of_job({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "HPCTRAIN_SIGNAL_LEAD_S": "60"})
    assert found is not None and found.lead_s == 60.0
    assert asked == [["squeue", "--noheader", "--jobs=7", "--format=%L"]]


def test_a_controller_that_is_silent_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(command: list[str], timeout_s: float = 1.0) -> str:
        raise LaunchError("no answer")

    job = Job(20.0)
    time = job.limit()
    time._ask = lambda: refuse([])
    job.now = 15.0
    assert job.step(time, 1.0), "what was known before still holds"
    monkeypatch.setattr(limit, "call", refuse)
    unknown = TimeLimit.of_job({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0"})
    assert unknown is not None and not unknown.near()


def test_a_limit_that_slurm_did_not_say_at_first_is_asked_for_again() -> None:
    job, answers = Job(200.0), [LaunchError("busy"), LaunchError("busy")]

    def ask() -> float | None:
        if answers:
            raise answers.pop()
        return job.left()

    time = TimeLimit(ask, 0.0, lambda: job.now)
    assert not job.step(time, 119.0) and len(answers) == 1
    assert not job.step(time, 1.0) and not answers
    assert not job.step(time, 60.0), "it is asked every two minutes"
    assert job.step(time, 60.0) and job.asked > 0


@pytest.mark.parametrize("end", ["", "NONE", "N/A", "Unknown"])
def test_where_no_end_is_known_slurm_must_answer(monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(LaunchError, match="there is no squeue on PATH"):
        seconds_left("7", end)


def test_in_a_container_the_batch_script_has_said_when_the_end_is(
    monkeypatch: pytest.MonkeyPatch, programs: Programs
) -> None:
    """Its image has no commands of Slurm, or they reach nobody."""
    path = os.environ["PATH"]
    job = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", END_VARIABLE: str(int(time.time()) + 60)}
    monkeypatch.setenv("PATH", "/nowhere")
    assert 58 <= seconds_left("7", job[END_VARIABLE]) <= 60
    found = TimeLimit.of_job(job)
    assert found is not None and not found.near()
    found = TimeLimit.of_job({**job, END_VARIABLE: str(int(time.time()) + 20)})
    assert found is not None and found.near()
    monkeypatch.setenv("PATH", path)
    programs("squeue", 'echo "Unable to contact slurm controller" >&2; exit 1')
    assert 58 <= seconds_left("7", job[END_VARIABLE]) <= 60
    programs("squeue", "echo 5:00")
    assert seconds_left("7", job[END_VARIABLE]) == 300, "it may have been changed"


def test_what_is_kept_for_the_end_of_a_rank_is_enough_for_the_first_to_wait_for_the_others() -> None:
    assert limit.SPARE_S > FAREWELL_S
