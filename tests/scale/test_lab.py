"""A study on a private Slurm: the command is killed midway, and the same command finishes the rest and draws it."""

from __future__ import annotations

import csv
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from hpctrain import lab
from hpctrain.cli import main
from hpctrain.launch.slurm.jobs import Job
from tests.launch.training import TINY, ZERO, build_corpus

pytestmark = [pytest.mark.slurm, pytest.mark.xdist_group("slurm")]

SETTINGS = (*(text for text in TINY if not text.startswith("train.steps")), ZERO)


@pytest.mark.usefixtures("on_the_lab")
def test_a_study_on_nodes_survives_its_command(slurm: lab.Cluster, tmp_path: Path) -> None:
    where = (f"folder={tmp_path}", f"data.corpus={build_corpus(tmp_path)}", "parallel.tp=1", "cluster.gpus_per_node=1")
    command = ["scale", "weak", "gpt-tiny", "nodes=1,2,4", *SETTINGS, *where]
    command += ["--steps", "12", "--warm-up", "2", "--cluster", "cpu-lab", "--json"]
    study = tmp_path / "gpt-tiny-weak"
    folders = [study / name / "run-1" for name in ("1-node", "2-nodes", "4-nodes")]

    with subprocess.Popen([sys.executable, "-m", "hpctrain", *command], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said = ""
        while "4-nodes" not in said:  # all sizes are queued, the largest last
            said = process.stderr.readline()
            assert said, "the command ended before it had queued all"
        process.send_signal(signal.SIGKILL)
    first = [Job.read(folder) for folder in folders]
    assert all(first)
    slurm.run(["scancel", first[2].ids[0]])  # type: ignore[union-attr]

    done = CliRunner().invoke(main, command)
    assert done.exit_code == 0, done.output
    last = [Job.read(folder) for folder in folders]
    assert last[:2] == first[:2] and last[2] != first[2], (
        "what was under way was started again, or what was cancelled was not"
    )
    rows = json.loads(done.stdout)["rows"]
    assert [(r["nodes"], r["devices"], r["global_batch"], r["steps"]) for r in rows] == [
        (1, 1, 4, 10), (2, 2, 8, 10), (4, 4, 16, 10)]  # fmt: skip
    assert rows[0]["exposed_share"] == 0 and all(0 < row["exposed_share"] < 1 for row in rows[1:])
    for row in rows:  # sizes may run side by side on this machine, so how they scale says nothing
        ideal = rows[0]["tokens_per_second"] * row["devices"]
        assert row["efficiency"] == pytest.approx(row["tokens_per_second"] / ideal)
    assert [int(r["devices"]) for r in csv.DictReader((study / "scaling.csv").open())] == [1, 2, 4]
    drawn = (study / "scaling.svg").read_text()
    assert all(f"<!-- {name} -->" in drawn for name in ("ideal", "measured, 95%", "predicted", "law that fits"))

    assert CliRunner().invoke(main, command).exit_code == 0
    assert [Job.read(folder) for folder in folders] == last
