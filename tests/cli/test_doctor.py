"""`hpctrain doctor`, with builds replaced."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from hpctrain.cli.doctor import doctor
from hpctrain.sharding.deepspeed import ops


@pytest.fixture
def extensions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(ops, "obstacle", lambda name: "no libaio" if name == "async_io" else "")
    return tmp_path


def test_lists_what_is_there_and_what_its_absence_costs(extensions: Path) -> None:
    lock = extensions / "cpu_adam" / "lock"
    lock.parent.mkdir()
    lock.touch()
    result = CliRunner().invoke(doctor, [])
    assert result.exit_code == 0, result.output
    for text in ("torch", "NCCL", "fused_adam", "can build", "no libaio"):
        assert text in result.output
    assert f"build lock {lock}: stale" in result.output and "--clean-locks" in result.output
    assert lock.exists()


def test_cleans_locks(extensions: Path) -> None:
    lock = extensions / "cpu_adam" / "lock"
    lock.parent.mkdir()
    lock.touch()
    report = json.loads(CliRunner().invoke(doctor, ["--clean-locks", "--json"]).stdout)
    assert report["removed"] == [str(lock)] and report["locks"] == []
    assert not lock.exists()


@pytest.mark.parametrize("ok", [True, False])
def test_builds_what_is_named_under_the_lock(extensions: Path, monkeypatch: pytest.MonkeyPatch, ok: bool) -> None:
    built = []

    def build(name: str, folder: Path, timeout_s: float) -> ops.Outcome:
        with pytest.raises(ops.LaunchError), ops.build_lock(folder):
            pass
        built.append((name, folder, timeout_s))
        return ops.Outcome(name, ok, 1.0, "built" if ok else "error: x", folder / "log")

    monkeypatch.setattr(ops, "build_op", build)
    result = CliRunner().invoke(doctor, ["--build-ops", "--timeout", "7", "fused_adam"])
    assert built == [("fused_adam", extensions, 7.0)]
    assert result.exit_code == (0 if ok else 1)
    assert ("fused_adam: built" if ok else "fused_adam: FAILED: error: x") in result.output


def _fails(arguments: list[str]) -> Any:
    return CliRunner().invoke(doctor, arguments)


def test_bad_arguments(extensions: Path) -> None:
    assert "for --build-ops only" in _fails(["fused_adam"]).output
    error = _fails(["--build-ops", "warp_drive"]).exception
    assert "the ops are fused_adam, cpu_adam, async_io" in str(error)
