"""Two lives of a job that want the same run folder, with locks that reach the other and with locks that do not."""

from __future__ import annotations

import time
from contextlib import contextmanager

import pytest
import torch.distributed as dist

from hpctrain.checkpoint.lock import RunFolderInUse, hold
from hpctrain.launch.life import stop
from hpctrain.launch.life.succession import FILE, OutlivedError, Tenancy


def train_until_outlived(folder, lock, seconds):
    """An earlier life: has the folder until a later one of its job is there. Whether it saw that, and may save then."""
    stop.LOOK_S = 0.1
    mine = Tenancy(folder, "slurm-7-0-0", 0)
    asked = stop.StopRequest(replaced=lambda: mine.successor() is not None)
    end = time.monotonic() + seconds
    with mine.held(0.0, lock):
        (folder / "holds").touch()
        while not asked.at_boundary() and time.monotonic() < end:
            time.sleep(0.05)
        try:
            mine.check()
        except OutlivedError:
            return asked.outlived, False
        return asked.outlived, True


def follow(folder, lock, key, restarts, wait_s):
    """A later life: whether it got the folder."""
    while not (folder / "holds").exists():
        time.sleep(0.05)
    try:
        with Tenancy(folder, key, restarts).held(wait_s, lock):
            return True
    except RunFolderInUse as error:
        return str(error)


@contextmanager
def no_lock(folder):
    """As where locks end at the node, or are none."""
    yield


def two_lives(folder, lock, *later):
    return train_until_outlived(folder, lock, 3.0) if dist.get_rank() == 0 else follow(folder, lock, *later)


def test_an_earlier_life_saves_and_makes_way_for_one_that_waits(ranks, tmp_path):
    assert ranks(2, two_lives, tmp_path, hold, "slurm-7-0-1", 1, 60.0) == [(True, True), True]


def test_an_earlier_life_that_no_lock_keeps_apart_ends_without_saving(ranks, tmp_path):
    assert ranks(2, two_lives, tmp_path, no_lock, "slurm-7-0-1", 1, 60.0) == [(True, False), True]


def test_the_life_of_another_job_is_not_made_way_for(ranks, tmp_path):
    earlier, later = ranks(2, two_lives, tmp_path, hold, "slurm-8-0-1", 1, 0.0)
    assert earlier == (False, True) and "is in use by process" in later


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_job_waits_for_the_lock_of_one_that_is_gone(ranks, tmp_path, restarts):
    """As a link of a chain does, while the file server still holds the lock of a node that died."""
    assert ranks(2, two_lives, tmp_path, hold, f"slurm-8-0-{restarts}", restarts, 60.0) == [(False, True), True]


def test_a_late_earlier_life_does_not_come_between(tmp_path):
    second, third = Tenancy(tmp_path, "slurm-7-0-1", 1), Tenancy(tmp_path, "slurm-7-0-2", 2)
    with third.held(0.0, no_lock):
        with pytest.raises(OutlivedError, match="belongs to a later life of this job"), second.held(0.0, no_lock):
            pass
        third.check()
    assert second.successor() is not None, "it is known for as long as the run is"


def test_while_a_later_life_waits_its_name_stays(tmp_path):
    second, third = Tenancy(tmp_path, "slurm-7-0-1", 1), Tenancy(tmp_path, "slurm-7-0-2", 2)
    third._say(holds=False)
    with second.held(0.0, no_lock):
        assert second.successor().key == third.key
        second.check()


def test_what_a_job_of_the_same_id_left_long_ago_is_nobody(tmp_path):
    with Tenancy(tmp_path, "slurm-7-0-3", 3).held(0.0, no_lock):
        pass
    first = Tenancy(tmp_path, "slurm-7-0-0", 0)
    with first.held(0.0, no_lock):
        assert first.successor() is None and not (tmp_path / FILE).exists()


@pytest.mark.parametrize("text", ["", "slurm-7-0-1", "[]", "{}", "null"])
def test_a_damaged_file_names_nobody(tmp_path, text):
    (tmp_path / FILE).write_text(text)
    assert Tenancy(tmp_path, "slurm-7-0-0", 0).successor() is None
