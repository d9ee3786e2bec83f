"""Order of what happens on the disk, what is kept, what a full disk does."""

from __future__ import annotations

import errno
import gc
import os
from collections import namedtuple
from pathlib import Path

import pytest

from hpctrain.checkpoint import commit, files
from hpctrain.checkpoint.catalog import ls, pointer
from hpctrain.checkpoint.collective import find, save
from hpctrain.checkpoint.write import snapshot
from hpctrain.errors import CheckpointError
from tests.checkpoint.state import FakeState, alone

PRIMITIVES = ("make_folder", "create", "write", "fsync", "close", "fsync_folder", "rename", "replace", "remove")


def steps(run: Path) -> list[str]:
    return sorted(p.name for p in (run / "checkpoints").iterdir())


def put(run: Path, step: int, keep: int = 2) -> Path:
    return save(run, step, FakeState(seed=step), {}, alone(), keep).path


def test_keeps_the_last_commits(tmp_path: Path) -> None:
    for step in (100, 200, 300, 400):
        put(tmp_path, step)
    assert steps(tmp_path) == ["latest", "step-00000300", "step-00000400"]
    assert pointer(tmp_path / "checkpoints") == "step-00000400"
    put(tmp_path, 500, keep=1)
    assert steps(tmp_path) == ["latest", "step-00000500"]
    put(tmp_path, 600, keep=5)
    assert len(ls(tmp_path)) == 2


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ESTALE])
def test_what_cannot_be_read_at_the_moment_is_not_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    put(tmp_path, 100)
    read = Path.read_bytes

    def refuse(path: Path) -> bytes:
        if "step-00000100" in str(path):
            raise OSError(number, os.strerror(number), str(path))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    for step in (200, 300, 400):
        put(tmp_path, step)
    assert steps(tmp_path) == ["latest", "step-00000100", "step-00000300", "step-00000400"]
    monkeypatch.undo()
    put(tmp_path, 500)
    assert steps(tmp_path) == ["latest", "step-00000400", "step-00000500"]


def test_a_step_saved_again_takes_no_place_of_another(tmp_path: Path) -> None:
    """As after a restart from 100 because 200 was damaged: the second 200 is newer and the first goes."""
    put(tmp_path, 100)
    put(tmp_path, 200)
    second = put(tmp_path, 200)
    assert second.name == "step-00000200-1"
    assert steps(tmp_path) == ["latest", "step-00000100", "step-00000200-1"]
    assert put(tmp_path, 200).name == "step-00000200"
    found = find(tmp_path, alone())
    assert found is not None and found.path.name == "step-00000200"


def test_newest_is_the_last_commit_not_the_largest_step(tmp_path: Path) -> None:
    put(tmp_path, 300)
    put(tmp_path, 400)
    (tmp_path / "checkpoints" / "step-00000400" / "rank-00000.json").unlink()
    put(tmp_path, 350)
    assert find(tmp_path, alone()).step == 350
    assert steps(tmp_path) == ["latest", "step-00000350", "step-00000400"]
    put(tmp_path, 375)
    assert steps(tmp_path) == ["latest", "step-00000350", "step-00000375"]


def test_unreadable_manifests_go_first(tmp_path: Path) -> None:
    put(tmp_path, 100)
    put(tmp_path, 200)
    (tmp_path / "checkpoints" / "step-00000200" / "manifest.json").unlink()
    put(tmp_path, 300)
    assert steps(tmp_path) == ["latest", "step-00000100", "step-00000300"]


def test_large_steps(tmp_path: Path) -> None:
    for step in (99_999_999, 123_456_789_012):
        put(tmp_path, step)
    assert find(tmp_path, alone()).step == 123_456_789_012
    assert [line.step for line in ls(tmp_path)] == [99_999_999, 123_456_789_012]


def test_leftovers_of_earlier_attempts_go(tmp_path: Path) -> None:
    stale = tmp_path / "checkpoints" / "step-00000050.partial"
    stale.mkdir(parents=True)
    (stale / "rank-00000.safetensors").write_bytes(b"x")
    (tmp_path / "checkpoints" / "latest.partial").write_bytes(b"step")
    put(tmp_path, 100)
    assert steps(tmp_path) == ["latest", "step-00000100"]


def test_everything_is_durable_before_it_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killing a process loses nothing that it wrote; a power cut does. So the order of syncs is checked."""
    put(tmp_path, 100)
    root, log, names = tmp_path / "checkpoints", [], {}

    def watch(name: str) -> None:
        real = getattr(files, name)

        def call(*args):
            out = real(*args)
            subject = names.get(args[0], args[0]) if isinstance(args[0], int) else args[0]
            if name == "create":
                names[out] = args[0]
            log.append((name, subject, *args[1:]))
            return out

        monkeypatch.setattr(files, name, call)

    for name in PRIMITIVES:
        watch(name)
    put(tmp_path, 200, keep=1)
    staging, final = root / "step-00000200.partial", root / "step-00000200"
    renamed = log.index(("rename", staging, final))
    written = {"rank-00000.safetensors", "rank-00000.json", "manifest.json"}
    for file in (staging / name for name in written):
        last_write = max(i for i, e in enumerate(log) if e[:2] == ("write", file))
        assert last_write < log.index(("fsync", file)) < renamed
        assert last_write < max(i for i, e in enumerate(log) if e == ("fsync_folder", staging)) < renamed
    manifest = log.index(("create", staging / "manifest.json"))
    assert all(log.index(("fsync", staging / f)) < manifest for f in written - {"manifest.json"})
    assert log.index(("fsync_folder", staging)) < manifest, "each rank syncs the names of its files itself"
    new = root / "latest.partial"
    pointed = log.index(("replace", new, root / "latest"))
    assert log.index(("fsync", new)) < renamed < pointed, "the pointer is whole, and never names what is not there"
    deleted = log.index(("rename", root / "step-00000100", root / "step-00000100.partial"))
    assert pointed < log.index(("fsync_folder", root), pointed) < deleted
    first_removal = next(
        i for i, e in enumerate(log) if e[0] == "remove" and e[1].parent.name == "step-00000100.partial"
    )
    assert deleted < log.index(("fsync_folder", root), deleted) < first_removal


class TestFullDisk:
    def test_too_little_room_is_said_before_writing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        put(tmp_path, 100)
        usage = namedtuple("usage", "total used free")
        monkeypatch.setattr(commit.shutil, "disk_usage", lambda path: usage(10**9, 10**9 - 777, 777))
        monkeypatch.setattr(files, "create", lambda path: pytest.fail("wrote"))
        with pytest.raises(
            CheckpointError, match=r"step 200 .* was not saved: rank 0: \d{4} bytes are needed in .*777 are"
        ):
            put(tmp_path, 200)
        monkeypatch.undo()
        assert steps(tmp_path) == ["latest", "step-00000100"]

    @pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
    @pytest.mark.parametrize("at", range(6))
    def test_while_writing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int, code: int) -> None:
        put(tmp_path, 100)
        real, calls = files.write, []

        def full(fd: int, data: memoryview) -> None:
            calls.append(fd)
            if len(calls) > at:
                raise OSError(code, os.strerror(code))
            real(fd, data)

        monkeypatch.setattr(files, "write", full)
        with pytest.raises(CheckpointError) as caught:
            put(tmp_path, 200, keep=1)
        monkeypatch.undo()
        text, need = str(caught.value), snapshot(FakeState(seed=200)).bytes
        assert "step 200" in text and f"rank 0: {os.strerror(code)}: this rank needs {need} bytes" in text, text
        assert "are free" in text and text.count("\n") == 0
        assert steps(tmp_path) == ["latest", "step-00000100"]
        found = find(tmp_path, alone())
        FakeState(seed=100).load(found.reader)

    @pytest.mark.parametrize("name", [n for n in PRIMITIVES if n != "remove"])
    def test_any_failing_call_leaves_the_old_one(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        put(tmp_path, 100)
        real = getattr(files, name)

        def broken(*args):
            if name == "close":
                real(*args)
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(files, name, broken)
        with pytest.raises(CheckpointError, match=r"step 200 .* rank 0: Input/output error"):
            put(tmp_path, 200, keep=1)
        monkeypatch.undo()
        found = find(tmp_path, alone())
        assert found.step == (200 if name == "replace" else 100)
        FakeState(seed=found.step).load(found.reader)
        assert not list((tmp_path / "checkpoints").glob("step*.partial"))


def test_what_cannot_be_deleted_is_a_warning(tmp_path: Path, monkeypatch, caplog) -> None:
    put(tmp_path, 100)

    def broken(path: Path) -> None:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(files, "remove", broken)
    put(tmp_path, 200, keep=1)
    assert "an old checkpoint was not deleted: Permission denied" in caplog.text
    assert find(tmp_path, alone()).step == 200


def test_folder_without_permission(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file where a folder should be")
    with pytest.raises(CheckpointError, match=r"was not saved: rank 0: File exists \(.*checkpoints\)"):
        put(tmp_path, 100)


def test_saving_again_and_again_takes_no_memory(tmp_path: Path) -> None:
    import torch

    def held() -> int:
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    state = FakeState(tensors=(("big", "weight", torch.float32, (512, 1024)),), tiles=3)
    gc.collect()  # maps of earlier tests hold descriptors
    descriptors = len(os.listdir("/proc/self/fd"))
    for step in range(60):
        if step == 10:
            before = held()
        save(tmp_path, step, state, {}, alone(), keep=1)
    assert held() - before < 4 << 20, "50 saves of 2 MiB"
    assert len(os.listdir("/proc/self/fd")) == descriptors
