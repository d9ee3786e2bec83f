"""`hpctrain submit` on a real Slurm, from the command line to the end: MPI or not, accounting or not."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpctrain.lab import Cluster, LabSpec, cluster
from hpctrain.launch.slurm.jobs import accounts
from hpctrain.launch.submit.send import submit as send
from tests.launch import jobs
from tests.launch.submission import request
from tests.launch.training import TINY, build_corpus, ended, log_of
from tests.user import user_of

pytestmark = [pytest.mark.slurm, pytest.mark.xdist_group("slurm")]

COMMAND = "hpctrain submit gpt-tiny cluster.nodes=2 cluster.gpus_per_node=2 parallel.tp=2 sharding.stage=1"


@pytest.fixture(scope="module")
def accounted() -> Iterator[Cluster]:
    """A lab with accounting."""
    with tempfile.TemporaryDirectory(prefix="lab-") as folder:
        yield from _lab(LabSpec(Path(folder) / "lab", nodes=2, gpus=2, accounting=True))


def _lab(spec: LabSpec) -> Iterator[Cluster]:
    with cluster(spec) as made:
        yield made


def submit_and_follow(lab: Cluster, folder: Path, profile: str) -> tuple[str, str]:
    """Run the command with a small corpus and few steps. Returns the job's id and what `hpctrain logs` shows."""
    build_corpus(folder)
    (folder / "mine.yaml").write_text(
        f"about: mine\ncpus_per_task: 1\nenvironment: {{OMP_NUM_THREADS: '1'}}\n{profile}"
    )
    ours = [sys.executable, "-m", *COMMAND.split()]
    few = (*TINY[:5], "train.steps=40", "train.global_batch=4", "train.micro_batch=1", "train.log_every=10")
    rest = ("train.eval_batches=1", "optimizer.warmup_steps=2", "data.corpus=corpus.h5")
    done = lab.run([*ours, *few, *rest, "--profile", "mine.yaml", "--wait"], timeout_s=300, cwd=folder)
    job = done.stdout.split()[1].rstrip(":")
    shown = lab.run([*ours[:2], "hpctrain", "logs", "gpt-tiny"], cwd=folder).stdout
    return job, shown


def falling(shown: str) -> bool:
    found = [float(line.split("loss ")[1].split()[0]) for line in shown.splitlines() if "  loss " in line]
    return len(found) == 5 and found == sorted(found, reverse=True) and found[-1] < found[0] - 1


def test_without_mpi_and_without_accounting(slurm: Cluster, tmp_path: Path) -> None:
    job, shown = submit_and_follow(slurm, tmp_path, "mpi: none\n")
    assert "4 ranks, dp=2 tp=2" in shown and falling(shown), shown
    facts = json.loads((tmp_path / "runs" / "gpt-tiny" / "environment.json").read_text())
    assert facts["variables"]["SLURM_STEP_NUM_NODES"] == "2"
    with user_of(slurm):
        assert accounts([job])[job].state == "FORGOTTEN"


def test_with_pmix_and_with_accounting(accounted: Cluster, tmp_path: Path) -> None:
    job, shown = submit_and_follow(accounted, tmp_path, "mpi: pmix\n")
    assert "4 ranks, dp=2 tp=2" in shown and falling(shown), shown
    with user_of(accounted):
        assert accounts([job])[job].good


def test_mpi_tells_ranks_on_other_nodes_where_the_first_one_is(accounted: Cluster, tmp_path: Path) -> None:
    """What the ranks of a training do when they meet, with the MPI library that the tests install."""
    (tmp_path / "out").mkdir()
    made = request(tmp_path, jobs.through_mpi, str(tmp_path / "out"), nodes=2, ranks=2, profile={"mpi": "pmix"})
    with user_of(accounted):
        (job,) = send(made, lambda text: None)
        assert ended(job.ids[0]) == "COMPLETED", log_of(tmp_path / "run", job.ids[0])
    heard = {path.name: path.read_text() for path in (tmp_path / "out").iterdir()}
    assert heard == {str(rank): "srun pmix note of rank 0" for rank in range(4)}
