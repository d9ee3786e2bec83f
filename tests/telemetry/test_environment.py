"""The record of the environment, and what must never be in it."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

import hpctrain
from hpctrain.telemetry.environment import source_commit, variables, versions, write_environment


def test_only_variables_that_matter_and_no_secrets() -> None:
    matter = {
        "NCCL_DEBUG": "INFO",
        "SLURM_JOB_ID": "7",
        "OMP_NUM_THREADS": "1",
        "RANK": "0",
        "CUDA_VISIBLE_DEVICES": "",
    }
    others = {"HOME": "/home/x", "PATH": "/bin", "HISTFILE": "h", "RANKING": "1", "XNCCL_DEBUG": "1"}
    secrets = {
        "SLURM_JWT": "s",
        "HPCTRAIN_API_KEY": "s",
        "HPCTRAIN_token": "s",
        "NCCL_SECRET_X": "s",
        "DS_PASSWORD": "s",
    }
    assert variables({**secrets, **others, **matter}) == matter
    assert list(variables(matter)) == sorted(matter)


def test_record_in_the_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "never-written")
    monkeypatch.setenv("SLURM_JWT", "never-written")
    path = write_environment(tmp_path)
    text = path.read_text()
    record = json.loads(text)
    assert "never-written" not in text and record["variables"]["NCCL_DEBUG"] == "WARN"
    assert record["versions"]["hpctrain"] == hpctrain.__version__
    assert record["cpus"] >= 1 and record["memory_bytes"] > 1 << 20 and record["host"] and record["cpu"]
    assert [p.name for p in tmp_path.iterdir()] == ["environment.json"]


def test_a_package_that_is_not_installed_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpctrain.telemetry.environment.PACKAGES", ("no-such-package-here", "h5py"))
    found = versions()
    assert found["no-such-package-here"] is None and found["h5py"]


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_commit_only_of_the_repository_that_tracks_the_file(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        who = ("-c", "user.name=t", "-c", "user.email=t@localhost")
        command = ["git", "-C", str(tmp_path), *who, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    tracked, foreign = tmp_path / "ours.py", tmp_path / "site-packages" / "theirs.py"
    foreign.parent.mkdir()
    tracked.write_text("1\n")
    foreign.write_text("1\n")
    assert source_commit(tracked) is None
    git("init", "-q")
    git("add", "ours.py")
    git("commit", "-q", "-m", "one")
    assert source_commit(tracked) == {"commit": git("rev-parse", "HEAD"), "modified": False}
    assert source_commit(foreign) is None
    tracked.write_text("2\n")
    assert source_commit(tracked) == {"commit": git("rev-parse", "HEAD"), "modified": True}
