"""Jobs that are interrupted on a real Slurm: they come back, go on, and end with the losses of an undisturbed run.

Bit for bit under the same layout, within rounding under another.
"""

from __future__ import annotations

import os
import random
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from hpctrain.cli import main
from hpctrain.config.load import load
from hpctrain.lab import Cluster, kill_node, start_node
from hpctrain.launch.slurm.jobs import states
from hpctrain.launch.submit.send import submit as send
from tests.launch import jobs
from tests.launch.submission import request
from tests.launch.training import (
    FOUR,
    STEPS,
    TINY,
    TWO,
    ZERO,
    build_corpus,
    ended,
    events,
    frozen,
    log_of,
    losses,
    ranks_on,
    records,
    submit,
)
from tests.user import until, user_of

pytestmark = [pytest.mark.slurm, pytest.mark.xdist_group("slurm"), pytest.mark.usefixtures("on_the_lab")]

EVERY = 20
"""Steps between checkpoints, where there are some on the way."""

FREEZABLE = "cluster.silence_s=600"
"""A rank that is frozen must not count as hung."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def undisturbed(
    slurm_lab: Cluster, corpus: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], dict[int, float]]:
    """The losses of a job that nothing happens to; it runs once."""
    folder, known = tmp_path_factory.mktemp("undisturbed"), {}

    def run(*size: str) -> dict[int, float]:
        if size not in known:
            name = f"run-{len(known)}"
            with user_of(slurm_lab):
                job = submit(folder, corpus, name, *size)
                assert ended(job) == "COMPLETED", log_of(folder / name, job)
            known[size] = losses(folder / name)
            assert sorted(known[size]) == list(range(1, STEPS + 1))
        return known[size]

    return run


def test_a_preempted_job_requeues_itself_and_ends_with_the_same_losses(
    slurm: Cluster, tmp_path: Path, corpus: Path, undisturbed: Callable[..., dict[int, float]]
) -> None:
    expected, run = undisturbed(*FOUR), tmp_path / "run"
    job = submit(tmp_path, corpus, "run", *FOUR, "checkpoint.every=0", FREEZABLE)
    until(lambda: len(losses(run)) > 10)
    with frozen(*ranks_on(slurm.spec, "n0"), *ranks_on(slurm.spec, "n1")):
        slurm.run(["sbatch", "--partition=high", "-N4", "--gres=gpu:4", "--wrap=true", f"--chdir={tmp_path}"])
        until(lambda: events(run, "stop"))
    assert ended(job) == "COMPLETED", log_of(run, job)
    (stopped,) = events(run, "stop")
    assert 10 < stopped < STEPS, "it was preempted on the way"
    assert events(run, "resume") == [stopped]
    assert losses(run) == expected


def test_a_job_at_its_time_limit_goes_on(
    slurm: Cluster, tmp_path: Path, corpus: Path, undisturbed: Callable[..., dict[int, float]]
) -> None:
    """Half-way its limit is set to the next minute but one. Slurm looks every 30 s who has to be warned."""
    expected, run = undisturbed(*TWO), tmp_path / "run"

    def limit(minutes: int) -> None:
        slurm.run(["scontrol", "update", f"JobId={job}", f"TimeLimit={minutes}"])

    (tmp_path / "mine.yaml").write_text(
        "about: warned early\ntime: '30'\nsignal_lead_s: 90\nenvironment: {OMP_NUM_THREADS: '1'}\n"
    )
    job = submit(
        tmp_path, corpus, "run", *TWO, "checkpoint.every=0", FREEZABLE, f"cluster.profile={tmp_path}/mine.yaml"
    )
    until(lambda: len(losses(run)) > 10)
    with frozen(*ranks_on(slurm.spec, "n0"), *ranks_on(slurm.spec, "n1")):
        limit(minutes_run(slurm, job) + 2)
        until(lambda: events(run, "stop"))
    limit(30)
    assert reason(run) == "asked to by SIGUSR2", "not by what the run itself knows of the limit"
    assert ended(job) == "COMPLETED", log_of(run, job)
    (stopped,) = events(run, "stop")
    assert 10 < stopped < STEPS
    assert events(run, "resume") == [stopped]
    assert losses(run) == expected


def reason(run: Path) -> str:
    """Why a run stopped, the last time that it did."""
    return [r["message"] for r in records(run) if r.get("event") == "stop"][-1]


def minutes_run(slurm: Cluster, job: str) -> int:
    """Whole minutes for which a job has run."""
    shown = slurm.run(["squeue", "--noheader", f"--jobs={job}", "--format=%M"]).stdout.strip()  # 0:42, or 1:02:03
    parts = [int(part) for part in shown.split(":")]
    return parts[-2] + 60 * (parts[-3] if len(parts) > 2 else 0)


def test_a_requeued_job_goes_on(
    tmp_path: Path, corpus: Path, undisturbed: Callable[..., dict[int, float]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Slurm ends the ranks for it: they save if they can, and if not there is the newest checkpoint. The port that
    submitit would draw for both lives is somebody else's."""
    expected, run = undisturbed(*TWO), tmp_path / "run"
    job = submit(tmp_path, corpus, "run", *TWO, f"checkpoint.every={EVERY}")
    with socket.socket() as other:
        with suppress(OSError):  # it is taken already
            other.bind(("", random.Random(job).randint(20000, 60000)))
        other.listen()
        until(lambda: len(losses(run)) > EVERY + 10)
        with pytest.raises(SystemExit):
            main(["requeue", job, f"--folder={tmp_path}"])
        assert f"requeued job {job}" in capsys.readouterr().out
        assert ended(job) == "COMPLETED", log_of(run, job)
    (resumed,) = events(run, "resume")
    assert EVERY <= resumed < STEPS
    assert losses(run) == expected
    assert "Traceback" not in log_of(run, job)


def test_warnings_while_it_starts_twice_and_to_one_rank_alone(
    slurm: Cluster, tmp_path: Path, corpus: Path, undisturbed: Callable[..., dict[int, float]]
) -> None:
    """In the first life before Python has begun; in the second to a rank that is not the first, again and again."""
    expected, run = undisturbed(*TWO), tmp_path / "run"
    job = submit(tmp_path, corpus, "run", *TWO, "checkpoint.every=0")
    logs = [run / "logs" / job / f"rank-{rank}.log" for rank in (0, 1)]
    until(lambda: all(path.exists() for path in logs))
    for _ in range(2):
        slurm.run(["scancel", "--signal=USR2", job])
    assert not records(run), "it starts"
    until(lambda: len(losses(run)) > 10)
    assert events(run, "stop") == [1], "a step was done, and saved"
    (rank,) = ranks_on(slurm.spec, "n1")

    def again() -> bool:
        if rank.alive():
            os.kill(rank.pid, signal.SIGUSR2)
        return len(events(run, "stop")) == 2

    until(again)
    assert ended(job) == "COMPLETED", log_of(run, job)
    assert events(run, "resume") == events(run, "stop")
    assert losses(run) == expected


def test_signals_during_a_save_do_not_disturb_it(
    slurm: Cluster, tmp_path: Path, corpus: Path, undisturbed: Callable[..., dict[int, float]]
) -> None:
    """All ranks are in the midst of it. It comes to its end, and at the end of the next step they stop."""
    expected, run, told = undisturbed(*TWO), tmp_path / "run", tmp_path / "told"
    told.mkdir()
    where = ("name=run", f"folder={tmp_path}", f"data.corpus={corpus}", f"checkpoint.every={EVERY}")
    settings = load("gpt-tiny", (*TINY, *TWO, *where)).model_dump(mode="json")
    made = request(tmp_path, jobs.save_when_told, settings, str(told), nodes=2)
    (job,) = send(made, lambda text: None)[0].ids
    until(lambda: all((told / f"{rank}.saves").exists() for rank in (0, 1)))
    for word in ("USR2", "TERM", "USR2", "TERM"):
        slurm.run(["scancel", f"--signal={word}", job])
    assert states([job])[job].state == "RUNNING" and not events(run, "checkpoint")
    (told / "go").touch()
    assert ended(job) == "COMPLETED", log_of(run, job)
    assert events(run, "checkpoint")[:2] == [EVERY, EVERY + 1]
    assert events(run, "stop") == events(run, "resume") == [EVERY + 1]
    assert losses(run) == expected


def test_a_job_whose_slurmd_is_killed_starts_anew_elsewhere(
    slurm: Cluster, tmp_path: Path, corpus: Path, undisturbed: Callable[..., dict[int, float]]
) -> None:
    """Slurm gives the node up after SlurmdTimeout. The rank there lives on, unseen by Slurm, until it hears that the
    others are gone, or nothing for too long where the connection was lost unnoticed; it must not get into the way of
    the next life."""
    expected, run = undisturbed(*TWO, ZERO), tmp_path / "run"
    silence_s = 150
    job = submit(tmp_path, corpus, "run", *TWO, ZERO, f"checkpoint.every={EVERY}", f"cluster.silence_s={silence_s}")
    until(lambda: len(losses(run)) > EVERY + 10)
    (orphan,) = ranks_on(slurm.spec, "n1")
    kill_node(slurm.spec, "n1", slurmd_only=True)
    with frozen(orphan):
        until(lambda: states([job])[job].state == "PENDING")
        assert orphan.alive()
    assert ended(job) == "COMPLETED", log_of(run, job)
    until(lambda: not orphan.alive(), timeout_s=2 * silence_s)
    assert states([job])[job].nodes in ("n[0,2]", "n[0,3]", "n[2-3]")
    (resumed,) = events(run, "resume")
    assert EVERY <= resumed < STEPS
    assert losses(run) == expected
    start_node(slurm.spec, "n1")


def test_a_job_survives_a_slurmd_that_comes_back(
    slurm: Cluster, tmp_path: Path, corpus: Path, undisturbed: Callable[..., dict[int, float]]
) -> None:
    """Within SlurmdTimeout, on the node of the batch script and rank 0."""
    expected, run = undisturbed(*TWO), tmp_path / "run"
    job = submit(tmp_path, corpus, "run", *TWO, "checkpoint.every=0", FREEZABLE)
    until(lambda: len(losses(run)) > 10)
    (rank,) = ranks_on(slurm.spec, "n0")
    with frozen(rank):
        kill_node(slurm.spec, "n0", slurmd_only=True)
        start_node(slurm.spec, "n0")
    assert ended(job) == "COMPLETED", log_of(run, job)
    assert events(run, "resume") == [] and events(run, "start") == [0]
    assert losses(run) == expected


def test_fewer_nodes_go_on_where_more_were_cancelled(
    slurm: Cluster, tmp_path: Path, corpus: Path, undisturbed: Callable[..., dict[int, float]]
) -> None:
    """Two nodes, dp=2, then one node, dp=1, in the same run folder: other sums, so other roundings, and no more."""
    expected, run = undisturbed(*TWO, ZERO), tmp_path / "run"
    first = submit(tmp_path, corpus, "run", *TWO, ZERO, f"checkpoint.every={EVERY}")
    until(lambda: len(losses(run)) > EVERY + 10)
    with pytest.raises(SystemExit):
        main(["cancel", first, f"--folder={tmp_path}"])
    assert ended(first) == "CANCELLED"
    second = submit(tmp_path, corpus, "run", "cluster.nodes=1", "cluster.gpus_per_node=1", "parallel.tp=1", ZERO)
    assert ended(second) == "COMPLETED", log_of(run, second)
    (resumed,) = events(run, "resume")
    assert EVERY <= resumed < STEPS
    found = losses(run)
    assert {step: found[step] for step in range(1, resumed + 1)} == {s: expected[s] for s in range(1, resumed + 1)}
    assert [found[step] for step in range(1, STEPS + 1)] == pytest.approx(list(expected.values()), rel=1e-4)
    samples = {r["step"]: r["consumed_samples"] for r in records(run) if r["kind"] == "train"}
    assert samples == {step: 4 * step for step in range(1, STEPS + 1)}
    layouts = [r["message"].split(", engine")[0] for r in records(run) if r.get("event") == "start"]
    assert layouts == ["2 ranks, dp=2", "1 rank"]
