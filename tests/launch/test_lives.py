"""When a job that is requeued again and again is given up."""

from __future__ import annotations

import pytest

from hpctrain.errors import LaunchError
from hpctrain.launch.lives import FILE, MAX_WITHOUT_PROGRESS, Life, begin, in_a_row, lives


def test_lives_that_begin_at_the_same_step_are_counted(tmp_path):
    for restart in range(MAX_WITHOUT_PROGRESS):
        begin(tmp_path, Life(f"job-{restart}", 7), restart)
    with pytest.raises(LaunchError, match=rf"{MAX_WITHOUT_PROGRESS + 1} lives in a row .* began at step 7"):
        begin(tmp_path, Life("job-3", 7), MAX_WITHOUT_PROGRESS)
    begin(tmp_path, Life("by hand", 7), 0)
    begin(tmp_path, Life("job-5", 8), 5)
    assert in_a_row(lives(tmp_path)) == 1


def test_a_torn_line_is_left_out(tmp_path):
    begin(tmp_path, Life("a", 1), 0)
    with (tmp_path / FILE).open("a") as file:
        file.write('{"key": "b", "st')
    assert lives(tmp_path) == [Life("a", 1)] and lives(tmp_path / "nowhere") == []
