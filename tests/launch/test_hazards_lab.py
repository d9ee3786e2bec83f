"""What goes wrong with jobs that submitit runs in the ordinary way, on a real Slurm: none of it does here.

The list of such hazards with their tests is in `docs/slurm.md`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hpctrain.lab import Cluster
from hpctrain.launch.slurm.jobs import Job, cancel, states
from hpctrain.launch.submit.postmortem import LIFE, reasons
from hpctrain.launch.submit.send import Request
from tests.launch import jobs
from tests.launch.submission import request, run_config
from tests.launch.test_submit_lab import done, reports, send
from tests.user import until

pytestmark = [pytest.mark.slurm, pytest.mark.xdist_group("slurm"), pytest.mark.usefixtures("on_the_lab")]


def seen(folder: Path, *names: str) -> Callable[[], bool]:
    return lambda: all((folder / name).exists() for name in names)


def begun(folder: Path) -> list[str]:
    """Each life that each rank began: `rank.life`."""
    return sorted(path.stem for path in folder.glob("*.began"))


def log_of(job: Job, rank: int = 0) -> str:
    path = job.logs / job.ids[0] / f"rank-{rank}.log"
    return path.read_text() if path.exists() else ""


@pytest.mark.parametrize("word", ["TERM", "USR2"])
def test_a_job_that_is_asked_to_stop_comes_back_as_it_was(tmp_path: Path, slurm: Cluster, word: str) -> None:
    """TERM is all that a preemption sends where the site has not set preempt_send_user_signal. The time limit is
    short, and submitit takes every warning of such a job for its last; and it writes a pickle anew at a requeue."""
    (job,) = send(request(tmp_path, jobs.obey, str(tmp_path / "out"), ranks=2, time="5"))
    until(seen(tmp_path / "out", "0.0.listens", "1.0.listens"), 60)
    (pickle,) = (tmp_path / "run" / "jobs").glob("*/*/*.pkl")
    before = pickle.read_bytes()
    slurm.run(["scancel", f"--signal={word}", job.ids[0]])
    assert done(*job.ids) == ["COMPLETED"]
    assert begun(tmp_path / "out") == ["0.0", "0.1", "1.0", "1.1"]
    assert seen(tmp_path / "out", f"0.0.SIG{word}", f"1.0.SIG{word}")()
    assert pickle.read_bytes() == before
    assert "Traceback" not in log_of(job)


@pytest.mark.parametrize("word", ["TERM", "USR2"])
def test_a_warning_before_the_ranks_listen_is_not_lost(tmp_path: Path, slurm: Cluster, word: str) -> None:
    """In the first life before Python runs, in the second while it imports; each time twice."""
    (job,) = send(request(tmp_path, jobs.obey, str(tmp_path / "out"), 2, nodes=2))
    logs = [job.logs / job.ids[0] / f"rank-{rank}.log" for rank in (0, 1)]
    until(lambda: all(path.exists() for path in logs), 60)
    for _ in range(2):
        slurm.run(["scancel", f"--signal={word}", job.ids[0]])
    assert not (tmp_path / "out").exists(), "no rank has begun when it is warned"
    until(lambda: all(path.read_text().count(LIFE) == 2 for path in logs), 60)
    for _ in range(2):
        slurm.run(["scancel", f"--signal={word}", job.ids[0]])
    assert done(*job.ids) == ["COMPLETED"], log_of(job)
    assert [life for life in begun(tmp_path / "out") if life.startswith("0.")] == ["0.0", "0.1", "0.2"]
    assert seen(tmp_path / "out", f"0.0.SIG{word}", f"0.1.SIG{word}")()


def test_a_job_comes_back_whose_ranks_have_no_command_of_slurm(tmp_path: Path, slurm: Cluster) -> None:
    """As in a container. The batch script, which is outside, requeues it."""
    image, programs = "/images/torch.sif", tmp_path / "programs"
    programs.mkdir()
    (programs / "apptainer").write_text(
        f'#!/bin/bash\nwhile [ "$1" != {image} ]; do shift; done; shift\nPATH=/nowhere exec "$@"\n'
    )
    (programs / "apptainer").chmod(0o755)
    profile = {
        "container": {"kind": "apptainer", "image": image, "python": sys.executable},
        "environment": {"PATH": f"{programs}:{slurm.environment()['PATH']}", "OMP_NUM_THREADS": "1"},
    }
    (job,) = send(request(tmp_path, jobs.obey, str(tmp_path / "out"), nodes=2, profile=profile))
    until(seen(tmp_path / "out", "0.0.listens", "1.0.listens"), 60)
    slurm.run(["scancel", "--signal=USR2", job.ids[0]])
    assert done(*job.ids) == ["COMPLETED"], log_of(job)
    assert begun(tmp_path / "out") == ["0.0", "0.1", "1.0", "1.1"]


def test_a_job_that_may_not_be_requeued_says_so_at_once(tmp_path: Path, slurm: Cluster) -> None:
    """Its nodes would be idle meanwhile."""
    (job,) = send(request(tmp_path, jobs.obey, str(tmp_path / "out")))
    slurm.run(["scontrol", "update", f"JobId={job.ids[0]}", "Requeue=0"])
    until(seen(tmp_path / "out", "0.0.listens"), 60)
    slurm.run(["scancel", "--signal=USR2", job.ids[0]])
    assert done(*job.ids) == ["FAILED"]
    said = (job.logs / f"slurm-{job.ids[0]}.out").read_text()
    assert "error: the run has saved and stopped, but its job cannot be put back" in said and "trying again" not in said
    assert reasons(job.logs, job.ids[0])[0].startswith(f"slurm-{job.ids[0]}: the run has saved and stopped")


def test_a_cancelled_job_does_not_come_back(tmp_path: Path) -> None:
    """Though its ranks, told to end, leave as they do before a requeue."""
    (job,) = send(request(tmp_path, jobs.obey, str(tmp_path / "out"), 2, nodes=2))
    until(seen(tmp_path / "out", "0.0.listens", "1.0.listens"), 60)
    cancel(job.ids)
    assert done(*job.ids) == ["CANCELLED"]
    until(seen(tmp_path / "out", "0.0.SIGTERM"))
    assert [str(state) for state in states(job.ids).values()] == [f"job {job.ids[0]} CANCELLED (on n[0-1])"]
    assert begun(tmp_path / "out") == ["0.0", "1.0"]
    assert "Traceback" not in log_of(job)


def test_one_element_of_an_array_requeues_itself_alone(tmp_path: Path, slurm: Cluster) -> None:
    """The last one, whose job id is that of the array."""
    configs = tuple(run_config(tmp_path / "sweep", name) for name in ("lr-1", "lr-2"))
    one = request(tmp_path, jobs.obey, "", elements=2)
    outs = [config.run_folder / "out" for config in configs]
    entries = tuple((jobs.obey, (str(out), 1)) for out in outs)
    first, last = send(Request(configs, entries, tmp_path / "sweep", one.site, one.options))
    until(lambda: all(seen(out, "0.0.listens")() for out in outs), 60)
    raw = slurm.run(["squeue", "--noheader", f"--jobs={last.ids[0]}", "--format=%A"]).stdout.strip()
    assert raw == last.ids[0].split("_")[0], "this is the odd one"
    slurm.run(["scancel", "--signal=USR2", last.ids[0]])
    assert done(*last.ids) == ["COMPLETED"]
    assert [begun(out) for out in outs] == [["0.0"], ["0.0", "0.1"]]
    slurm.run(["scancel", "--signal=USR2", first.ids[0]])
    assert done(*first.ids) == ["COMPLETED"]
    assert [begun(out) for out in outs] == [["0.0", "0.1"]] * 2


def test_ranks_spread_unevenly_know_their_neighbours(tmp_path: Path) -> None:
    """One rank on n0 and three on n1, the first of all among these."""
    (tmp_path / "hosts").write_text("n1\nn1\nn0\nn1\n")
    profile = {
        "srun_args": ["--distribution=arbitrary", "--ntasks=4"],
        "environment": {"SLURM_HOSTFILE": str(tmp_path / "hosts")},
        "cpus_per_task": 1,
        "gpus": "none",
        "sbatch": {"overcommit": True, "nodelist": "n[0-1]"},
    }
    (job,) = send(request(tmp_path, jobs.report, str(tmp_path / "out"), nodes=2, ranks=2, profile=profile))
    assert done(*job.ids) == ["COMPLETED"], log_of(job)
    found = [(r["rank"], r["host"], r["local_rank"], r["local_world"]) for r in reports(tmp_path / "out")]
    assert found == [(0, "n1", 0, 3), (1, "n1", 1, 3), (2, "n0", 0, 1), (3, "n1", 2, 3)]


def test_another_job_of_the_same_id_is_not_taken_for_this_one(tmp_path: Path, slurm: Cluster) -> None:
    """Ids begin anew where a controller lost its state; submitit's files are named by nothing else. And the port that
    it draws from the id may be taken."""
    held = {"sbatch": {"hold": True}}
    (job,) = send(request(tmp_path, jobs.report, str(tmp_path / "out"), profile=held))
    name = job.ids[0]
    (good,) = (tmp_path / "run" / "jobs").glob("*/*/*.pkl")
    bad = tmp_path / "run" / "jobs" / "20000101-000000-aaaaaa" / name / good.name
    bad.parent.mkdir(parents=True)
    bad.write_bytes(b"of another job")
    (bad.with_name(f"{name}_0_result.pkl")).write_bytes(b"of another job")
    slurm.run(["scontrol", "release", name])
    assert done(name) == ["COMPLETED"], log_of(job)
    assert [r["SLURM_JOB_ID"] for r in reports(tmp_path / "out")] == [name]
