"""Ranks and nodes that fail while a job trains on a real Slurm: what becomes of the job, how soon, and who is named."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from hpctrain.cli import main
from hpctrain.lab import Cluster, kill_node, start_node
from hpctrain.launch.slurm.jobs import states, wait
from hpctrain.launch.submit.postmortem import LIFE, reasons
from tests.launch.training import FOUR, build_corpus, losses, records, submit
from tests.user import until

pytestmark = [pytest.mark.slurm, pytest.mark.xdist_group("slurm"), pytest.mark.usefixtures("on_the_lab")]

ENDED_WITHIN_S = 60
"""As promised for a rank that died; one that hangs has `cluster.silence_s` less, which is short here."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_corpus(tmp_path_factory.mktemp("faults"))


def begun(folder: Path, corpus: Path, *settings: str) -> str:
    """A job of two ranks on each of two nodes, once it has done some steps."""
    job = submit(folder, corpus, "run", *FOUR, *settings)
    until(lambda: len(losses(folder / "run")) > 3)
    return job


def rank(job: str, number: int) -> int:
    """Process of a rank: the lab's nodes share the process table of this machine, seen from outside."""
    marks = {f"SLURM_JOB_ID={job}".encode(), f"SLURM_PROCID={number}".encode()}
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if marks <= set(path.read_bytes().split(b"\0")) and b"submitit" in (path.parent / "cmdline").read_bytes():
                return int(path.parent.name)
        except OSError:
            continue
    raise AssertionError(f"job {job} has no rank {number}")


@pytest.mark.parametrize(
    ("number", "named"), [(signal.SIGKILL, r"n1: task 3: Killed"), (signal.SIGSTOP, r"rank 3 \(process \d+ on n1\)")]
)
def test_a_rank_that_dies_or_hangs_ends_the_job_and_is_named(
    slurm: Cluster, tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str], number: int, named: str
) -> None:
    job = begun(tmp_path, corpus, "checkpoint.every=0", "train.steps=100000", "cluster.silence_s=5")
    began = time.monotonic()
    os.kill(rank(job, 3), number)
    assert [state.state for state in wait([job], 0.3)] == ["FAILED"]
    assert time.monotonic() - began < ENDED_WITHIN_S
    said = reasons(tmp_path / "run" / "logs", job)
    assert re.search(named, " ".join(said)), said
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(["logs", "run", "--folder", str(tmp_path)])
    assert re.search(named, capsys.readouterr().err)


def test_a_node_that_dies_is_named_and_the_job_starts_anew(slurm: Cluster, tmp_path: Path, corpus: Path) -> None:
    """Within the seconds that docs/slurm.md states."""
    job = begun(tmp_path, corpus, "train.steps=200", "checkpoint.every=20", "cluster.silence_s=5")
    folder = tmp_path / "run"
    until(lambda: any(r.get("event") == "checkpoint" for r in records(folder)), 60)
    kill_node(slurm.spec, "n1")
    spec = slurm.spec
    anew_within_s = 4 / 3 * spec.slurmd_timeout_s + spec.kill_wait_s + spec.requeue_delay_s + 60
    try:
        until(lambda: (s := states([job])[job]).state == "RUNNING" and "1" not in s.nodes, anew_within_s)
        until(lambda: any(r.get("event") == "resume" for r in records(folder)))
    finally:
        start_node(slurm.spec, "n1")
    assert [state.state for state in wait([job], 0.3)] == ["COMPLETED"]
    lives = [(folder / "logs" / job / f"rank-{r}.log").read_text().split(LIFE) for r in (0, 1)]
    assert re.search(r"rank [23] \(process \d+ on n1\)", "".join(first for _, first, *_ in lives)), lives
    assert "Node failure on n1" in (folder / "logs" / f"slurm-{job}.out").read_text()
    found = losses(folder)
    assert sorted(found) == list(range(1, 201))
