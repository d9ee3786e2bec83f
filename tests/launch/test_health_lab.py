"""The health step on a real Slurm with rails: nodes that compute wrongly, whose rail is slow or whose cable is pulled
are left out, or the job comes back without them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpctrain import lab
from hpctrain.lab import Cluster
from hpctrain.launch.health import step
from hpctrain.launch.place import badnodes
from hpctrain.launch.slurm.jobs import states, wait
from hpctrain.launch.slurm.profile import site
from hpctrain.launch.submit.send import submit
from tests.launch import jobs
from tests.launch.submission import request
from tests.user import user_of

pytestmark = [pytest.mark.slurm, pytest.mark.rails, pytest.mark.xdist_group("rails")]

BROKEN = """\
import os, sys
if os.environ.get("SLURMD_NODENAME") == "{node}" and "measure" in sys.orig_argv:
    import torch
    torch.matmul = lambda a, b, out: out.zero_()
"""
"""Python reads it when it starts: products of matrices are nothing on one node, for the health step alone."""


def run(rails: Cluster, folder: Path, broken: str, spares: int) -> tuple[Path, str, list[dict[str, object]]]:
    """A job of two nodes, with one that computes wrongly: run folder, id, and what its ranks found."""
    (folder / "sitecustomize.py").write_text(BROKEN.format(node=broken))
    profile = {"health": True, "spares": spares, "environment": {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}}
    texts = {"prologue": site("lab").prologue}
    made = request(folder, jobs.report, str(folder / "out"), nodes=2, ranks=1, profile=profile, texts=texts)
    with user_of(rails):
        (job,) = submit(made, lambda text: None)
        (ended,) = wait(job.ids, 0.3)
        assert job.ids[0] in states([job.ids[0]])
    home = made.configs[0].run_folder
    log = next((home / "logs").glob("slurm-*.out")).read_text()
    assert ended.state == "COMPLETED", log
    found = [json.loads(path.read_text()) for path in sorted((folder / "out").glob("*.json"))]
    return home, log, found


def test_with_spares_the_ranks_are_on_the_good_ones(tmp_path: Path, rails: Cluster) -> None:
    """Of four nodes one has a slow rail, which only ranks that measure over it see; another computes wrongly."""
    lab.slow(rails.spec, "n1:rail0", 8)
    home, log, found = run(rails, tmp_path, "n2", spares=2)
    assert [(r["rank"], r["world"], r["SLURMD_NODENAME"], r["life"]) for r in found] == [
        (0, 2, "n0", 0),
        (1, 2, "n3", 0),
    ]
    bad = badnodes.known(home)
    assert bad.keys() == {"n1", "n2"}, log
    assert bad["n1"].startswith("rail of device 0: rail ") and "% below the median of all, with 3 others" in bad["n1"]
    assert bad["n2"].startswith("device 0: a product of matrices is wrong")
    record = json.loads((home / step.RECORD).read_text())
    assert [row["host"] for row in record["devices"]] == record["hosts"] == ["n0", "n1", "n2", "n3"]
    rates = {row["host"]: float(row["rail"].split()[0]) for row in record["devices"]}
    assert all(row["rail"].endswith("GB/s") for row in record["devices"])
    assert rates["n1"] < 0.002 and max(rates.values()) < 0.2 / 8 * 1.05, "GB/s: no more than a rail carries"
    table = json.loads(next((home / "jobs").glob("*/*/health-0/rank_table.json")).read_text())
    assert table["hosts"] == ["n0", "n1", "n2", "n3"], "spare nodes have places, too"
    assert "health: n1 is left out: rail of device 0" in log and "--exclude" not in log


def test_without_one_the_job_comes_back_without_the_nodes(tmp_path: Path, rails: Cluster) -> None:
    """A cable is pulled on the first node, the second computes wrongly. The new allocation holds neither."""
    lab.link_down(rails.spec, "n0:rail0")
    home, log, found = run(rails, tmp_path, "n1", spares=0)
    assert [(r["rank"], r["life"], r["SLURMD_NODENAME"]) for r in found] == [(0, 1, "n2"), (1, 1, "n3")]
    bad = badnodes.known(home)
    assert bad.keys() == {"n0", "n1"} and bad["n0"].startswith("device 0: NIC: rail0 down"), (bad, log)
    assert "health: the job is back in the queue, without n[0-1]" in log
