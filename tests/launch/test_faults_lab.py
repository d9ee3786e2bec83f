"""Ranks and nodes that fail while a job trains on a real Slurm: what becomes of the job, how soon, and who is named."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from hpctrain.cli import main
from hpctrain.data.build import build
from hpctrain.data.sources import list_sources
from hpctrain.lab import Cluster, kill_node, start_node
from hpctrain.launch.jobs import locate, wait
from hpctrain.launch.postmortem import reasons
from tests.launch.test_submit_lab import until
from tests.launch.training import FOUR, TINY, losses, records

pytestmark = [pytest.mark.slurm, pytest.mark.xdist_group("slurm"), pytest.mark.usefixtures("on_the_lab")]

ENDED_WITHIN_S = 60
"""Promised: 15 s for a rank that died, `cluster.silence_s` more for one that hangs; and the machine may be loaded."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("faults")
    texts = folder / "texts"
    texts.mkdir()
    for i in range(8):
        (texts / f"{i}.txt").write_bytes(b"to be or not to be, that is the question " * (i + 3))
    build(folder / "corpus.h5", list_sources([texts]), [texts])
    return folder / "corpus.h5"


def submit(folder: Path, corpus: Path, *settings: str) -> str:
    """A job of two ranks on each of two nodes, once it has done some steps."""
    arguments = [
        "submit",
        "gpt-tiny",
        *TINY,
        *FOUR,
        "checkpoint.every=0",
        "name=run",
        f"folder={folder}",
        f"data.corpus={corpus}",
        *settings,
    ]
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code in (0, None)
    until(lambda: len(losses(folder / "run")) > 3, 120)
    return locate("run", folder)[1].ids[0]


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
    ("number", "named"), [(signal.SIGKILL, r"task 3: Killed"), (signal.SIGSTOP, r"rank 3 \(process \d+ on n1\)")]
)
def test_a_rank_that_dies_or_hangs_ends_the_job_and_is_named(
    slurm: Cluster, tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str], number: int, named: str
) -> None:
    job = submit(tmp_path, corpus, "train.steps=100000", "cluster.silence_s=5")
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
    job = submit(tmp_path, corpus, "train.steps=400", "checkpoint.every=20", "cluster.silence_s=5")
    folder = tmp_path / "run"
    until(lambda: any(r.get("event") == "checkpoint" for r in records(folder)), 60)
    kill_node(slurm.spec, "n1")
    try:
        until(lambda: any(r.get("event") == "resume" for r in records(folder)), 240)
    finally:
        start_node(slurm.spec, "n1")
    assert [state.state for state in wait([job], 0.3)] == ["COMPLETED"]
    first_life = (folder / "logs" / job / "rank-0.log").read_text().split("Starting with JobEnvironment")[1]
    assert "on n1" in first_life, first_life
    found = losses(folder)
    assert sorted(found) == list(range(1, 401))
