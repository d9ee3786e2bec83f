"""Preemption on a real Slurm: saved, requeued, resumed, with the losses of an undisturbed run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpctrain.cli import main
from hpctrain.data.build import build
from hpctrain.data.sources import list_sources
from hpctrain.lab import Cluster
from hpctrain.launch.jobs import locate, wait
from hpctrain.telemetry.metrics import read_records
from tests.launch.test_submit_lab import OUTER, ROOT, until

pytestmark = [pytest.mark.slurm, pytest.mark.xdist_group("slurm")]

STEPS = 150
TINY = [
    *("model.layers=1", "model.hidden=16", "model.heads=2", "model.max_seq=32", "data.seq=32"),
    *(f"train.steps={STEPS}", "train.global_batch=4", "train.micro_batch=1", "train.log_every=1"),
    *("train.eval_batches=1", "optimizer.warmup_steps=1", "checkpoint.every=0", "parallel.tp=2", "sharding.stage=1"),
    *("cluster.nodes=2", "cluster.gpus_per_node=2", "cluster.profile=lab"),
]


@pytest.fixture(autouse=True)
def on_the_lab(slurm: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is a user of the lab."""
    for name in list(os.environ):
        if name.startswith(OUTER):
            monkeypatch.delenv(name)
    for name, value in slurm.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def records(folder: Path) -> list[dict]:
    path = folder / "metrics.jsonl"
    return list(read_records(path)) if path.exists() else []


def losses(folder: Path) -> dict[int, float]:
    return {r["step"]: r["loss"] for r in records(folder) if r["kind"] == "train"}


def submit(folder: Path, corpus: Path, name: str) -> str:
    arguments = ["submit", "gpt-tiny", *TINY, f"name={name}", f"folder={folder}", f"data.corpus={corpus}"]
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code in (0, None)
    return locate(name, folder)[1].ids[0]


def test_a_preempted_job_requeues_itself_and_ends_with_the_same_losses(slurm: Cluster, tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    for i in range(8):
        (texts / f"{i}.txt").write_bytes(b"to be or not to be, that is the question " * (i + 3))
    corpus = tmp_path / "corpus.h5"
    build(corpus, list_sources([texts]), [texts])
    undisturbed = submit(tmp_path, corpus, "undisturbed")
    assert [s.state for s in wait([undisturbed], 0.3)] == ["COMPLETED"]
    job, folder = submit(tmp_path, corpus, "preempted"), tmp_path / "preempted"
    until(lambda: len(losses(folder)) > 10, 90)
    slurm.run(["sbatch", "--partition=high", "-N4", "--gres=gpu:4", "--wrap=true", f"--chdir={tmp_path}"])
    assert [s.state for s in wait([job], 0.3)] == ["COMPLETED"]
    events = [r["event"] for r in records(folder) if r["kind"] == "event"]
    assert events.count("stop") == 1 and events.count("resume") == 1
    stopped = next(r["step"] for r in records(folder) if r.get("event") == "stop")
    assert 10 < stopped < STEPS, "it was preempted on the way"
    assert losses(folder) == losses(tmp_path / "undisturbed") and len(losses(folder)) == STEPS
