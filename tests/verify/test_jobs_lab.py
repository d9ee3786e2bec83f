"""Layouts verified as jobs of a real Slurm."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpctrain.cli import main
from hpctrain.verify.cases import cases
from hpctrain.verify.jobs import spread
from tests.verify.test_verify import SMALL


def test_layouts_are_spread_over_nodes(tmp_path: Path) -> None:
    found = spread(cases("tp=2;dp=3;tp=2,pp=2,dp=2", "llama-tiny", [*SMALL, "train.global_batch=12"], 1, "float64"), 4,
                   tmp_path)  # fmt: skip
    assert [(c.config.cluster.nodes, c.config.cluster.gpus_per_node) for c in found] == [(1, 2), (1, 3), (2, 4)]
    assert len({c.config.run_folder for c in found}) == 3 and len({c.config.folder for c in found}) == 1


@pytest.mark.slurm
@pytest.mark.xdist_group("slurm")
@pytest.mark.usefixtures("on_the_lab")
def test_layouts_pass_as_jobs(slurm: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["cluster.gpus_per_node=1", "cluster.device=cpu", "cluster.threads=1", f"folder={tmp_path}"]
    layouts = ["--layouts", "pp=2,schedule=1f1b;tp=3", "--slurm", "--profile", "lab", "--json"]
    with pytest.raises(SystemExit) as end:
        main(["verify", "llama-tiny", *SMALL, *where, *layouts, "--steps", "1"])
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert end.value.code == 1 and "1 of 2 layouts did not pass: tp=3" in err, (found, err)
    assert [(v["ok"], v["ranks"]) for v in found] == [(True, 2), (False, 3)], found
    assert found[0]["weight"]["difference"] <= found[0]["weight"]["limit"] == 1e-9
    assert "must divide model.heads=4" in found[1]["error"]
