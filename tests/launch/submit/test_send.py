"""Submissions that break off, with programs in the place of Slurm's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hpctrain.errors import ConfigError, LaunchError
from hpctrain.launch.place import badnodes
from hpctrain.launch.slurm import client
from hpctrain.launch.slurm.rules import Slurm
from hpctrain.launch.submit.send import folders, script, submit
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
    monkeypatch.setattr(client, "installed", lambda: Slurm.of("slurm 22.05.8"))
    monkeypatch.setattr(client, "call", lambda command, env=None, timeout_s=0.5: call(command, env, 0.5))
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

    def interrupted(command: list[str], env: dict[str, str] | None = None, timeout_s: float = 10) -> str:
        said = call(command, env, timeout_s)
        if command[0] == "sbatch":
            raise KeyboardInterrupt
        return said

    if answered:
        monkeypatch.setattr("hpctrain.launch.submit.send.SlurmJob", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    else:
        monkeypatch.setattr(client, "call", interrupted)
    monkeypatch.setattr(client, "installed", lambda: Slurm.of("slurm 22.05.8"))
    with pytest.raises(KeyboardInterrupt):
        submit(request(tmp_path / "runs", jobs.report, ""), print)
    assert asked() == ["7"]
    assert not (tmp_path / "runs").exists()


def test_what_is_withdrawn_while_slurm_is_silent_is_left_to_the_job(
    tmp_path: Path, asked: Callable[[], list[str]], programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs("squeue", "exit 1")
    programs("sbatch", 'echo "sbatch: error: no" >&2; exit 1')
    monkeypatch.setattr(client, "installed", lambda: Slurm.of("slurm 22.05.8"))
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


def test_nodes_that_the_run_knows_to_be_broken_are_excluded(tmp_path: Path, programs: Programs) -> None:
    """Field failure 16. Besides those of the profile; of one that Slurm has no more, sbatch wants no word."""
    wanted = request(tmp_path / "runs", jobs.report, "", profile={"sbatch": {"exclude": "n[1-2]"}})
    wanted.home.mkdir(parents=True)
    where = folders(wanted, "s", copied=False)
    slurm = Slurm.of("slurm 22.05.8")
    assert "#SBATCH --exclude='n[1-2]'\n" in script(wanted, where, slurm)
    badnodes.remember(wanted.home, {"n3": "NVLink", "gone": "slow"})
    programs("sinfo", "printf 'n1\\nn2\\nn3\\nn3\\n'")
    assert "#SBATCH --exclude='n[1-3]'\n" in script(wanted, where, slurm)
    programs("sinfo", "exit 1")
    assert "#SBATCH --exclude='gone,n[1-3]'\n" in script(wanted, where, slurm), "nobody says that it is gone"
    filed = request(tmp_path / "runs", jobs.report, "", profile={"sbatch": {"exclude": "/shared/bad"}})
    assert "#SBATCH --exclude=/shared/bad\n" in script(filed, where, slurm)


@pytest.mark.parametrize(
    ("kind", "mount"),
    [("pyxis", "/opt/topo.xml:/opt/topo.xml"), ("enroot", "--mount=/opt/topo.xml:"), ("apptainer", "--bind=/opt/topo")],
)
def test_nccls_picture_of_the_machine_is_there_in_a_container(tmp_path: Path, kind: str, mount: str) -> None:
    """A variable that names a file which the container does not have is worse than none."""
    container = {"kind": kind, "image": "x.sif"}
    inside = request(tmp_path / "runs", jobs.report, "", profile={"nccl_topo": "/opt/topo.xml", "container": container})
    assert mount in script(inside, folders(inside, "s", copied=False), Slurm())
    bare = request(tmp_path / "runs", jobs.report, "", profile={"nccl_topo": "/opt/topo.xml"})
    assert "/opt/topo.xml" not in script(bare, folders(bare, "s", copied=False), Slurm())
