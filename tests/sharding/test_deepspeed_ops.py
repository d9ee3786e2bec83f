"""Locks and builds of DeepSpeed's ops, with a stand-in for the compiler."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hpctrain.errors import ConfigError, LaunchError
from hpctrain.sharding.deepspeed import ops


def leave_lock(folder: Path, op: str = "fused_adam") -> Path:
    (folder / op).mkdir(parents=True, exist_ok=True)
    lock = folder / op / "lock"
    lock.touch()
    return lock


def test_a_lock_nobody_has_open_is_stale(tmp_path: Path) -> None:
    lock = leave_lock(tmp_path)
    assert [(found.path, found.verdict) for found in ops.find_locks(tmp_path)] == [(lock, "stale")]


def test_a_lock_that_is_open_is_in_use(tmp_path: Path) -> None:
    lock = leave_lock(tmp_path)
    with open(lock):
        (found,) = ops.find_locks(tmp_path)
        assert found.verdict == "in use" and str(os.getpid()) in found.detail
        assert ops.clean_locks(tmp_path) == [] and lock.exists()
    assert [c.path for c in ops.clean_locks(tmp_path)] == [lock]
    assert not lock.exists()


def test_torch_itself_holds_its_lock_open(tmp_path: Path) -> None:
    """What the verdict rests on."""
    from torch.utils.file_baton import FileBaton

    lock = tmp_path / "cpu_adam" / "lock"
    lock.parent.mkdir()
    baton = FileBaton(str(lock))
    assert baton.try_acquire()
    assert ops.find_locks(tmp_path)[0].verdict == "in use"
    baton.release()
    assert ops.find_locks(tmp_path) == []


@pytest.mark.parametrize(("hours", "verdict"), [(0.5, "cannot tell"), (3.0, "stale")])
def test_on_a_shared_file_system_only_long_silence_counts(tmp_path: Path, hours: float, verdict: str) -> None:
    lock = leave_lock(tmp_path)
    assert ops.judge_lock(lock, "nfs4", now=time.time() + hours * 3600).verdict == verdict


def test_another_users_lock_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = leave_lock(tmp_path)
    monkeypatch.setattr(os, "getuid", lambda: lock.stat().st_uid + 1)
    assert ops.judge_lock(lock, "ext4").verdict == "cannot tell"


def test_our_lock_keeps_others_out_and_goes_with_its_holder(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from hpctrain.sharding.deepspeed.ops import build_lock\n"
        f"with build_lock(Path({str(tmp_path)!r})): print('held', flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    with pytest.raises(LaunchError, match=f"held by process {holder.pid} on"):
        ops.clean_locks(tmp_path)
    holder.kill()
    holder.wait()
    with ops.build_lock(tmp_path):
        pass


def test_a_build_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    mark = tmp_path / "child"
    lock = leave_lock(tmp_path)
    script = f"echo working; (sleep 3; touch {mark}) & exec sleep 60 3< {lock}"
    outcome = ops.build_op("fused_adam", tmp_path, 0.5, ["sh", "-c", f"touch {lock}; {script}"])
    assert not outcome.ok and outcome.detail == "not built within 0.5 s: give it more with --timeout"
    assert outcome.seconds < 3 and outcome.log.read_text() == "working\n"
    assert not lock.exists()
    time.sleep(3.0)
    assert not mark.exists()


def test_outcomes(tmp_path: Path) -> None:
    good = ops.build_op("fused_adam", tmp_path, 20, ["sh", "-c", "true"])
    assert good.ok and good.detail == "built"
    bad = ops.build_op("fused_adam", tmp_path, 20, ["sh", "-c", "echo a; echo 'error: no aio.h' >&2; exit 2"])
    assert not bad.ok and bad.detail == "error: no aio.h"


def test_a_stale_lock_does_not_stop_a_build(tmp_path: Path) -> None:
    lock = leave_lock(tmp_path)
    assert ops.build_op("fused_adam", tmp_path, 20, ["sh", "-c", f"test ! -e {lock}"]).ok


def test_status(tmp_path: Path) -> None:
    assert ops.op_status("cpu_adam", tmp_path, lambda name: "").state == "can build"
    lacking = ops.op_status("async_io", tmp_path, lambda name: "no libaio")
    assert (lacking.state, lacking.detail) == ("cannot build", "no libaio")
    (tmp_path / "cpu_adam").mkdir()
    (tmp_path / "cpu_adam" / "cpu_adam.so").touch()
    assert ops.op_status("cpu_adam", tmp_path, lambda name: "no compiler").state == "built"


@pytest.fixture
def nothing_shipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "shipped", lambda name: None)


def make_built(folder: Path, op: str = "fused_adam") -> None:
    (folder / op).mkdir(parents=True, exist_ok=True)
    (folder / op / f"{op}.so").touch()


def refusal(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        ops.require_built("fused_adam", folder, "sharding.torch_adam", settle_s=0.0)
    assert caught.value.path == "sharding.torch_adam" and "sharding.torch_adam=true" in caught.value.fix
    return str(caught.value)


@pytest.mark.usefixtures("nothing_shipped")
def test_an_op_that_is_not_built_is_refused(tmp_path: Path) -> None:
    text = refusal(tmp_path)
    assert "needs DeepSpeed's op fused_adam, which is not built; run hpctrain doctor --build-ops fused_adam" in text
    assert "lock" not in text
    make_built(tmp_path, "cpu_adam")
    assert refusal(tmp_path) == text
    make_built(tmp_path)
    ops.require_built("fused_adam", tmp_path, "sharding.torch_adam", settle_s=0.0)


@pytest.mark.usefixtures("nothing_shipped")
@pytest.mark.parametrize("built", [False, True])
def test_a_stale_lock_is_refused_whether_the_op_is_built_or_not(tmp_path: Path, built: bool) -> None:
    if built:
        make_built(tmp_path)
    lock = leave_lock(tmp_path)
    text = refusal(tmp_path)
    assert f"remove the stale build lock {lock} with hpctrain doctor --clean-locks" in text
    assert ("--build-ops fused_adam" in text) is not built and ("which is locked" in text) is built
    with open(lock):
        if built:
            ops.require_built("fused_adam", tmp_path, "sharding.torch_adam", settle_s=0.0)
        else:
            assert str(lock) not in refusal(tmp_path)


@pytest.mark.usefixtures("nothing_shipped")
@pytest.mark.parametrize("afterwards", ["gone", "another"])
def test_a_lock_that_others_are_passing_on_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, afterwards: str
) -> None:
    """Ranks take it one after another, and let it go in two steps: first the descriptor, then the file."""
    make_built(tmp_path)
    lock = leave_lock(tmp_path)

    def sleep(seconds: float) -> None:
        assert seconds == 5.0
        lock.unlink()
        if afterwards == "another":
            (lock.parent / "other").touch()  # so that the file system does not give the same number again
            lock.touch()

    monkeypatch.setattr(ops.time, "sleep", sleep)
    ops.require_built("fused_adam", tmp_path, "sharding.torch_adam", settle_s=5.0)


def test_an_op_that_came_with_deepspeed_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "deepspeed"
    (package / "ops" / "adam").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "ops" / "adam" / "fused_adam_op.cpython-311-x86_64-linux-gnu.so").touch()
    spec = importlib.util.spec_from_file_location("deepspeed", package / "__init__.py")
    monkeypatch.setattr(ops.importlib.util, "find_spec", lambda name: spec)
    leave_lock(tmp_path)
    ops.require_built("fused_adam", tmp_path, "sharding.torch_adam")
    assert ops.op_status("fused_adam", tmp_path, lambda name: "").state == "built"
    assert ops.op_status("cpu_adam", tmp_path, lambda name: "").state == "can build"
    monkeypatch.setattr(ops.importlib.util, "find_spec", lambda name: None)
    assert ops.shipped("fused_adam") is None


def _fused(folder: str) -> str:
    from tests.sharding.deepspeed_case import start, zero_config

    os.environ["TORCH_EXTENSIONS_DIR"] = folder
    config = zero_config(1)
    sharding = config.sharding.model_copy(update={"torch_adam": False})
    try:
        start(config.model_copy(update={"sharding": sharding}))
    except ConfigError as error:
        return str(error)
    return ""


def test_the_engine_looks_before_deepspeed_compiles(ranks: Any, tmp_path: Path) -> None:
    for text in ranks(2, _fused, str(tmp_path), timeout_s=30.0):
        assert "sharding.torch_adam=" in text and "hpctrain doctor --build-ops fused_adam" in text


def test_obstacles_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "_builder_says_yes", lambda name: False)
    monkeypatch.setattr(ops.shutil, "which", lambda command: None)
    assert "no C++ compiler" in ops.obstacle("cpu_adam")
    monkeypatch.setattr(ops.shutil, "which", lambda command: "" if command == "ninja" else command)
    assert "no ninja" in ops.obstacle("cpu_adam")
    monkeypatch.setattr(ops.shutil, "which", lambda command: command)
    assert "no libaio" in ops.obstacle("async_io")
    assert "unfit" in ops.obstacle("cpu_adam")


def test_unknown_op() -> None:
    assert ops.op_names([]) == ["fused_adam", "cpu_adam", "async_io"]
    with pytest.raises(ConfigError, match="'gds': the ops are fused_adam, cpu_adam, async_io"):
        ops.op_names(["gds"])


def test_flock_is_the_kernels(tmp_path: Path) -> None:
    path = tmp_path / "hpctrain" / "build.lock"
    with ops.build_lock(tmp_path), open(path) as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
