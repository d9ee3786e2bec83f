"""A checkpoint that was refused takes the place of no good one, and is not thrown away before newer ones are there."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from hpctrain.checkpoint import files
from hpctrain.checkpoint.catalog import ls
from hpctrain.checkpoint.collective import find, save
from hpctrain.checkpoint.verify import Verdict
from tests.checkpoint.state import FakeState, alone


def steps(run: Path) -> list[str]:
    return sorted(p.name.removeprefix("step-0000000") for p in (run / "checkpoints").glob("step-*"))


def put(run: Path, step: int, refused: tuple[Verdict, ...] = (), keep: int = 2) -> None:
    save(run, step, FakeState(seed=step), {}, alone(), keep, refused)


def resume(run: Path) -> tuple[int, tuple[Verdict, ...]]:
    found = find(run, alone())
    assert found is not None
    FakeState(seed=found.step).load(found.reader)
    return found.step, found.refused


def flip(run: Path, name: str) -> None:
    file = run / "checkpoints" / name / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Steps 4 and 6, of which 6 is damaged."""
    put(tmp_path, 4)
    put(tmp_path, 6)
    flip(tmp_path, "step-00000006")
    return tmp_path


def test_the_last_good_one_stays(run: Path) -> None:
    step, refused = resume(run)
    assert step == 4 and steps(run) == ["4", "6"], "choosing changes nothing"
    put(run, 5, refused)
    assert steps(run) == ["4", "5", "6.refused"]
    flip(run, "step-00000005")
    assert resume(run)[0] == 4, "and is there when it is needed"


def test_it_is_remembered_by_later_lives(run: Path) -> None:
    put(run, 5, resume(run)[1])
    step, refused = resume(run)
    assert step == 5 and refused == ()
    put(run, 7, refused)
    assert steps(run) == ["5", "7"], "two newer commits fill the places: nobody needs it any more"


def test_it_stays_until_newer_ones_fill_all_places(run: Path) -> None:
    refused = resume(run)[1]
    for step, left in ((5, ["4", "5"]), (7, ["4", "5", "7"]), (8, ["5", "7", "8"])):
        put(run, step, refused, keep=3)
        assert [s for s in steps(run) if "refused" not in s] == left
        assert ("6.refused" in steps(run)) == (step != 8)


def test_a_later_checkpoint_of_the_same_name_is_another(run: Path) -> None:
    """The driver names what it refused at every save, and the step is saved again under the name that is free."""
    refused = resume(run)[1]
    put(run, 5, refused)
    put(run, 6, refused)
    assert resume(run) == (6, ()) and steps(run) == ["5", "6"]


def test_refused_twice(run: Path) -> None:
    put(run, 5, resume(run)[1], keep=3)
    put(run, 6, keep=3)
    flip(run, "step-00000006")
    put(run, 7, resume(run)[1], keep=3)
    assert steps(run) == ["4", "5", "6.refused", "6.refused-1", "7"]
    put(run, 8, keep=1)
    assert steps(run) == ["8"]


def test_without_a_manifest_steps_tell_which_is_newer(run: Path) -> None:
    (run / "checkpoints" / "step-00000006" / "manifest.json").unlink()
    put(run, 5, resume(run)[1])
    assert steps(run) == ["4", "5", "6.refused"]
    put(run, 7)
    assert steps(run) == ["5", "6.refused", "7"]
    put(run, 8)
    assert steps(run) == ["7", "8"]


def test_other_folders_are_left_alone(run: Path, tmp_path: Path) -> None:
    """A run may start from another's checkpoint, and refuse some there."""
    other = tmp_path / "other"
    refused = resume(run)[1]
    put(other, 6)
    put(other, 7, refused, keep=1)
    assert steps(other) == ["7"] and steps(run) == ["4", "6"]


def test_ls_shows_it(run: Path) -> None:
    put(run, 5, resume(run)[1])
    lines = ls(run)
    assert [(line.step, line.refused, line.latest) for line in lines] == [
        (4, False, False), (5, False, True), (6, True, False),
    ]  # fmt: skip
    assert lines[2].manifest is not None and [line.refused for line in ls(lines[2].path)] == [True]


def test_what_cannot_be_set_aside_costs_nothing(
    run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refused, real = resume(run)[1], files.rename

    def broken(old: Path, new: Path) -> None:
        if "refused" in new.name:
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
        real(old, new)

    monkeypatch.setattr(files, "rename", broken)
    put(run, 5, refused)
    assert steps(run) == ["4", "5", "6"] and "was not deleted: Permission denied" in caplog.text
