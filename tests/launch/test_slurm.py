"""Submissions that break off, with programs in the place of Slurm's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hpctrain.errors import ConfigError, LaunchError
from hpctrain.launch import client
from hpctrain.launch.slurm import submit
from tests.launch import jobs
from tests.launch.submission import request

Programs = Callable[[str, str], None]


@pytest.fixture
def asked(tmp_path: Path, programs: Programs) -> Callable[[], list[str]]:
    """An sbatch that queues a job; squeue then shows it, among others. Returns what scancel was asked for."""
    note = tmp_path / "queued"
    programs("squeue", f'echo "5|/elsewhere/submission.sh"; [ ! -e {note} ] || echo "7|$(cat {note})"')
    programs("scancel", f'echo "$@" >>{tmp_path}/cancelled')
    programs("sbatch", f'[ "$1" = --parsable ] && echo "$2" >{note}; exec sleep 60')
    cancelled = tmp_path / "cancelled"
    return lambda: cancelled.read_text().splitlines() if cancelled.exists() else []


def test_an_sbatch_that_queues_and_does_not_answer(
    tmp_path: Path, asked: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    call = client.call
    monkeypatch.setattr(client, "version", lambda: "22.05.8")
    monkeypatch.setattr(client, "call", lambda command, env=None: call(command, env, 0.5))
    with pytest.raises(LaunchError, match=r"sbatch has not answered .*: try again later"):
        submit(request(tmp_path / "runs", jobs.report, ""), print)
    assert asked() == ["7"]
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("answered", [False, True])
def test_ctrl_c_withdraws_what_is_queued(
    tmp_path: Path, asked: Callable[[], list[str]], programs: Programs, monkeypatch: pytest.MonkeyPatch, answered: bool
) -> None:
    """While sbatch runs, or when it has answered and nobody has taken note of it."""
    programs("sbatch", f'echo "$2" >{tmp_path}/queued; echo 7')
    call = client.call

    def interrupted(command: list[str], env: dict[str, str] | None = None) -> str:
        said = call(command, env)
        if command[0] == "sbatch":
            raise KeyboardInterrupt
        return said

    if answered:
        monkeypatch.setattr("hpctrain.launch.slurm.SlurmJob", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    else:
        monkeypatch.setattr(client, "call", interrupted)
    monkeypatch.setattr(client, "version", lambda: "22.05.8")
    with pytest.raises(KeyboardInterrupt):
        submit(request(tmp_path / "runs", jobs.report, ""), print)
    assert asked() == ["7"]
    assert not (tmp_path / "runs").exists()


def test_what_is_withdrawn_while_slurm_is_silent_is_left_to_the_job(
    tmp_path: Path, asked: Callable[[], list[str]], programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs("squeue", "exit 1")
    programs("sbatch", 'echo "sbatch: error: no" >&2; exit 1')
    monkeypatch.setattr(client, "version", lambda: "22.05.8")
    with pytest.raises(LaunchError, match="Slurm refused the job: no"):
        submit(request(tmp_path / "runs", jobs.report, ""), print)
    assert asked() == [] and not (tmp_path / "runs").exists()


def test_a_job_is_not_queued_where_it_would_not_be_found(
    tmp_path: Path, asked: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SBATCH_CLUSTERS", "elsewhere")
    with pytest.raises(ConfigError, match="SBATCH_CLUSTERS"):
        submit(request(tmp_path / "runs", jobs.report, ""), print)
    assert not (tmp_path / "runs").exists()
