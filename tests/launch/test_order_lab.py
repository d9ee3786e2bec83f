"""Order and binding of ranks on a real Slurm: a host for each rank where Slurm's order is worse, a rail for each rank,
and a rank on a wrong one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpctrain.lab import Cluster
from hpctrain.launch.place.tablefile import load
from hpctrain.launch.slurm.jobs import wait
from hpctrain.launch.slurm.profile import site
from hpctrain.launch.submit.send import submit
from tests.launch import jobs
from tests.launch.submission import request
from tests.user import user_of

pytestmark = [pytest.mark.slurm, pytest.mark.xdist_group("rails")]

PAIRS = "SwitchName=a Nodes=n[0,2]\nSwitchName=b Nodes=n[1,3]\nSwitchName=c Switches=a,b\n"


def test_ranks_go_where_the_fabric_says(tmp_path: Path, slurm: Cluster) -> None:
    """Slurm knows n0 and n1 as neighbours; in this fabric n0 and n2 are."""
    made = request(
        tmp_path,
        jobs.report,
        str(tmp_path / "out"),
        nodes=4,
        ranks=2,
        parallel={"tp": 2},
        profile={"fabric": "pairs.conf"},
        texts={"fabric": PAIRS},
    )
    with user_of(slurm):
        (job,) = submit(made, lambda _: None)
        assert [state.state for state in wait(job.ids, 0.3)] == ["COMPLETED"]
    found = [json.loads((tmp_path / "out" / f"{rank}.json").read_text()) for rank in range(8)]
    (path,) = (tmp_path / "run" / "jobs").glob("*/*/rank_table-0.json")
    kept = load(path)
    assert kept is not None and kept.distribution == "arbitrary"
    assert [(r["host"], r["local_rank"]) for r in found] == [(p.host, p.local_rank) for p in kept.table]
    assert [r["host"] for r in found][::2] in (["n0", "n2", "n1", "n3"], ["n0", "n2", "n3", "n1"])
    said = (job.logs / f"slurm-{job.ids[0]}.out").read_text()
    assert "ranks: each rank has its host in SLURM_HOSTFILE; the leaf switch changes 1 times, 3 in Slurm's" in said


@pytest.mark.rails
def test_ranks_take_their_rails_or_nobody_trains(tmp_path: Path, rails: Cluster) -> None:
    """Local rank i is on rail i. Of another job one rank is put on the rail and the CPU of its neighbour."""

    def asked(name: str, spoil: bool):
        out = str(tmp_path / name / "out")
        texts = {"prologue": site("lab").prologue}
        size = {"nodes": 2, "ranks": 2, "parallel": {"tp": 2}}
        return request(tmp_path, jobs.take_place, out, spoil, name=name, texts=texts, **size)

    with user_of(rails):
        sent = [submit(asked(name, name == "bad"), lambda _: None)[0] for name in ("good", "bad")]
        ended = [wait(job.ids, 0.3)[0].state for job in sent]
    assert ended == ["COMPLETED", "FAILED"], (sent[0].logs / sent[0].ids[0] / "rank-0.log").read_text()
    assert {path.name for path in (tmp_path / "good" / "out").iterdir()} == {"0.rail0", "1.rail1", "2.rail0", "3.rail1"}
    said = (tmp_path / "good" / "out" / "0.rail0").read_text()
    assert said.startswith("proof: 4 ranks on 2 hosts, 4 of them placed by the rank table: all as planned")
    rows = json.loads((tmp_path / "good" / "rank_table.json").read_text())["ranks"]
    assert [(row["nic"], row["rail"], row["gpu"]) for row in rows] == [("rail0", 0, 0), ("rail1", 1, 1)] * 2
    assert not (tmp_path / "bad" / "out").exists(), "nobody trained"
    stops = [f for f in json.loads((tmp_path / "bad" / "proof.json").read_text())["findings"] if f["stops"]]
    assert {(f["rank"], f["what"], f["planned"]) for f in stops} >= {(1, "interface", "rail1")}
    for rank in range(4):
        text = (sent[1].logs / sent[1].ids[0] / f"rank-{rank}.log").read_text()
        assert "error: ranks 1 of 4 are not as planned (" in text
        assert ("usual cause" in text.split("error: ")[0]) == (rank == 0), "one table"
