"""When a job that is requeued again and again is given up."""

from __future__ import annotations

import pytest

from hpctrain.errors import LaunchError
from hpctrain.launch.lives import FILE, MAX_WITHOUT_PROGRESS, Life, begin, in_a_row, knock, lives


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


def test_a_torn_line_is_left_out(tmp_path):
    begin(tmp_path, Life("a", 1), 0)
    with (tmp_path / FILE).open("a") as file:
        file.write('{"key": "b", "st')
    assert lives(tmp_path) == [Life("a", 1)] and lives(tmp_path / "nowhere") == []
