"""Lives of a job on a real Slurm: one that another outlives, and a row of them that come no further."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from hpctrain.config.load import load
from hpctrain.lab import Cluster, kill_node, start_node
from hpctrain.launch.life import succession
from hpctrain.launch.life.lives import MAX_WITHOUT_PROGRESS, lives
from hpctrain.launch.slurm.jobs import states
from hpctrain.launch.submit.postmortem import reasons
from hpctrain.launch.submit.send import submit as send
from tests.launch import jobs
from tests.launch.submission import request
from tests.launch.training import TINY, build_corpus, ended, events, frozen, log_of, losses, ranks_on, records, submit
from tests.user import until

pytestmark = [pytest.mark.slurm, pytest.mark.xdist_group("slurm"), pytest.mark.usefixtures("on_the_lab")]

ONE = ("cluster.nodes=1", "cluster.gpus_per_node=1", "parallel.tp=1")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_corpus(tmp_path_factory.mktemp("lives"))


def test_the_orphan_of_a_job_on_one_node_saves_and_makes_way(slurm: Cluster, tmp_path: Path, corpus: Path) -> None:
    """Its slurmd is dead, so Slurm starts the job on another node; nothing but the run folder tells it of that."""
    run = tmp_path / "run"
    job = submit(tmp_path, corpus, "run", *ONE, "checkpoint.every=0")
    until(lambda: len(losses(run)) > 10)
    (orphan,) = ranks_on(slurm.spec, "n0")
    with frozen(orphan):
        kill_node(slurm.spec, "n0", slurmd_only=True)
        until((run / succession.FILE).exists)
        assert orphan.alive() and not events(run, "stop")
    try:
        assert ended(job) == "COMPLETED", log_of(run, job)
        until(lambda: not orphan.alive())
    finally:
        start_node(slurm.spec, "n0")
    (stopped,) = (r for r in records(run) if r.get("event") == "stop")
    assert stopped["message"] == "asked to by a later life of this job, which Slurm has started elsewhere"
    assert events(run, "resume") == [stopped["step"]] and events(run, "start") == [0, stopped["step"]]
    assert sorted(losses(run)) == list(range(1, 101))


def test_a_job_that_comes_no_further_is_given_up(slurm: Cluster, tmp_path: Path, corpus: Path) -> None:
    """Each life is warned of its time limit before it trains, so it makes a step, saves, and requeues its job."""
    run = tmp_path / "run"
    where = ("name=run", f"folder={tmp_path}", f"data.corpus={corpus}", "checkpoint.every=0")
    settings = load("gpt-tiny", (*TINY, *ONE, *where)).model_dump(mode="json")
    made = request(tmp_path, jobs.train_warned, settings, profile={"time": "30", "signal_lead_s": 1799})
    (job,) = send(made, lambda text: None)[0].ids
    assert ended(job) == "FAILED", log_of(run, job)
    assert events(run, "stop") == list(range(1, MAX_WITHOUT_PROGRESS + 1))
    assert [life.step for life in lives(run)] == list(range(MAX_WITHOUT_PROGRESS + 1))
    assert any("4 lives in a row" in said and "not tried again" in said for said in reasons(run / "logs", job))
    time.sleep(2 * slurm.spec.requeue_delay_s)
    assert states([job])[job].state == "FAILED", "it has not been requeued"
