"""Trainings of seconds on a private Slurm, and what their run folders say."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hpctrain.cli import main
from hpctrain.data.build import build
from hpctrain.data.sources import list_sources
from hpctrain.lab import LabSpec, machines
from hpctrain.lab.processes import Process
from hpctrain.launch.slurm.jobs import locate, wait
from hpctrain.telemetry.metrics import read_records

STEPS = 100
TINY = [
    *("model.layers=1", "model.hidden=16", "model.heads=2", "model.max_seq=32", "data.seq=32"),
    *(f"train.steps={STEPS}", "train.global_batch=4", "train.micro_batch=1", "train.log_every=1"),
    *("train.eval_batches=1", "optimizer.warmup_steps=1"),
    *("cluster.profile=lab", "cluster.threads=1"),
]
ZERO = "sharding.stage=1"
FOUR = ("cluster.nodes=2", "cluster.gpus_per_node=2", "parallel.tp=2", ZERO)
"""The job of two nodes with two ranks each, as cut by tensor parallelism as by ZeRO."""
TWO = ("cluster.nodes=2", "cluster.gpus_per_node=1", "parallel.tp=1")
"""As few ranks as there can be on two nodes, and as little as a rank can import."""
PYTHON = ("python", "python3")


def build_corpus(folder: Path) -> Path:
    """A corpus of a few thousand tokens."""
    texts = folder / "texts"
    texts.mkdir()
    for i in range(8):
        (texts / f"{i}.txt").write_bytes(b"to be or not to be, that is the question " * (i + 3))
    corpus = folder / "corpus.h5"
    build(corpus, list_sources([texts]), [texts])
    return corpus


def submit(folder: Path, corpus: Path, name: str, *settings: str) -> str:
    """Queue a training as a user does. Returns the id of its job."""
    where = (f"name={name}", f"folder={folder}", f"data.corpus={corpus}")
    with pytest.raises(SystemExit) as end:
        main(["submit", "gpt-tiny", *TINY, *where, *settings])
    assert end.value.code in (0, None)
    return locate(name, folder)[1].ids[0]


def ended(job: str) -> str:
    """How a job ends, once it does."""
    return wait([job], 0.3)[0].state


def records(run: Path) -> list[dict]:
    path = run / "metrics.jsonl"
    return list(read_records(path)) if path.exists() else []


def losses(run: Path) -> dict[int, float]:
    return {r["step"]: r["loss"] for r in records(run) if r["kind"] == "train"}


def events(run: Path, name: str) -> list[int]:
    """The steps at which something happened."""
    return [r["step"] for r in records(run) if r["kind"] == "event" and r["event"] == name]


def log_of(run: Path, job: str, rank: int = 0) -> str:
    path = run / "logs" / job / f"rank-{rank}.log"
    return path.read_text() if path.exists() else ""


def ranks_on(spec: LabSpec, node: str) -> list[Process]:
    """The ranks on a node of a lab, in order of their start."""
    running = machines.programs(spec, node)
    found = [process for name in PYTHON for process in running.get(name, [])]
    parents = {child for process in found for child in process.children()}
    return sorted((process for process in found if process not in parents), key=lambda process: process.pid)


@contextmanager
def frozen(*ranks: Process) -> Iterator[None]:
    """Ranks that do not go on, and so cost nothing, while something else takes its time.

    Slurm has them go on when it asks them to end, and before the warning of a time limit or a preemption.
    """
    assert ranks
    for rank in ranks:
        os.kill(rank.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for rank in ranks:
            if rank.alive():
                os.kill(rank.pid, signal.SIGCONT)
