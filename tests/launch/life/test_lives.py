"""When a job that is requeued again and again is given up."""

from __future__ import annotations

import os
import signal
import time

import pytest

from hpctrain.errors import LaunchError
from hpctrain.launch.life.limit import TimeLimit
from hpctrain.launch.life.lives import FILE, MAX_WITHOUT_PROGRESS, Life, begin, excused, in_a_row, knock, lives
from hpctrain.launch.life.stop import StopRequest, hold_back


def test_lives_that_begin_at_the_same_step_are_counted(tmp_path):
    for restart in range(MAX_WITHOUT_PROGRESS):
        begin(tmp_path, Life(f"slurm-1-0-{restart}", 7), restart)
    with pytest.raises(LaunchError, match=rf"{MAX_WITHOUT_PROGRESS + 1} lives in a row .* no further than step 7"):
        begin(tmp_path, Life("slurm-1-0-3", 7), MAX_WITHOUT_PROGRESS)
    begin(tmp_path, Life("slurm-1-0-9", 7), 0)  # a person's start is never refused
    begin(tmp_path, Life("slurm-2-0-1", 7), 1)  # nor is another job for what this one did
    begin(tmp_path, Life("slurm-1-0-10", 9), 10)
    assert in_a_row(lives(tmp_path)) == 1


@pytest.mark.parametrize(
    ("steps", "count"),
    [
        ([0], 1),
        ([0, 0], 2),
        ([0, 1, 2, 3], 4),
        ([0, 2, 4], 1),
        ([5, 5, 50], 1),
        ([3, -1, -1, 3], 4),
        ([0, 9, -1, 9], 3),
    ],
)
def test_a_step_a_life_is_no_progress_and_neither_is_a_life_that_did_not_begin(steps, count):
    assert in_a_row([Life(str(i), step) for i, step in enumerate(steps)]) == count


def test_lives_that_end_before_they_train_are_counted_too(tmp_path):
    for restart in range(MAX_WITHOUT_PROGRESS):
        knock(tmp_path, f"slurm-1-0-{restart}", restart)
    with pytest.raises(LaunchError, match=r"3 lives in a row .* ended before they began to train"):
        knock(tmp_path, "slurm-1-0-3", 3)
    knock(tmp_path, "slurm-1-0-4", 0)
    begin(tmp_path, Life("slurm-1-0-4", 0), 0)
    assert lives(tmp_path)[-1] == Life("slurm-1-0-4", 0)
    knock(tmp_path, "slurm-1-0-5", 5)


@pytest.mark.parametrize("began", [False, True])
def test_preemptions_do_not_count_however_many_there_are(tmp_path, began):
    for restart in range(3 * MAX_WITHOUT_PROGRESS):
        key = f"slurm-1-0-{restart}"
        knock(tmp_path, key, restart)
        if began:
            begin(tmp_path, Life(key, 7), restart)
        else:
            with excused(tmp_path, key, asked(signal.SIGTERM)):
                pass
        with excused(tmp_path, key, asked(signal.SIGUSR2)):
            pass
    for restart in range(20, 20 + MAX_WITHOUT_PROGRESS):
        knock(tmp_path, f"slurm-1-0-{restart}", restart)
    with pytest.raises(LaunchError, match=r"3 lives in a row"):
        knock(tmp_path, "slurm-1-0-30", 30)


def asked(number, left_s=10_000.0):
    """A request that a signal made, in a job that may go on for so long and is warned 60 s before that."""
    stop = StopRequest(TimeLimit(lambda: left_s, 60.0))
    stop.received = number
    return stop


def test_the_warning_of_the_time_limit_is_no_excuse(tmp_path):
    """A life that is warned as soon as it begins will be so every time."""
    with excused(tmp_path, "slurm-1-0-0", asked(signal.SIGUSR2, left_s=100.0)):
        pass
    assert lives(tmp_path) == []


def held_back(folder, number):
    hold_back([number])
    with excused(folder, "slurm-1-0-0", StopRequest()):
        os.kill(os.getpid(), number)
        deadline = time.monotonic() + 20
        while not lives(folder) and time.monotonic() < deadline:
            time.sleep(0.05)
        return lives(folder)


@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGTERM])
def test_a_signal_that_is_held_back_is_noted_before_the_rank_is_killed(ranks, tmp_path, number):
    assert ranks(0, held_back, tmp_path, number) == [[Life("slurm-1-0-0", -1, True)]]


def test_a_life_that_nobody_asked_is_not_excused(tmp_path):
    with excused(tmp_path, "slurm-1-0-0", StopRequest()):
        pass
    assert lives(tmp_path) == []


def test_a_torn_line_is_left_out(tmp_path):
    begin(tmp_path, Life("a", 1), 0)
    with (tmp_path / FILE).open("a") as file:
        file.write('{"key": "b", "st')
    assert lives(tmp_path) == [Life("a", 1)] and lives(tmp_path / "nowhere") == []
