"""Studies without Slurm, from the command line: run, killed midway, finished, drawn; and predictions."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from hpctrain.cli import main
from hpctrain.config.schema import RunConfig
from hpctrain.data.build import build
from hpctrain.data.sources import list_sources
from hpctrain.scale import jobs
from hpctrain.scale.jobs import OPEN
from hpctrain.telemetry.memory import Memory
from hpctrain.train import preflight
from hpctrain.train.preflight import PROCESS
from tests.train.driving import drive

SMALL = (
    *("model.layers=1", "model.hidden=16", "model.heads=2", "model.max_seq=32", "data.seq=32"),
    *("parallel.tp=1", "cluster.gpus_per_node=1", "train.global_batch=4", "train.micro_batch=1"),
)


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["scale", *arguments])


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: Callable[..., list[Any]]) -> list[str]:
    """A machine without Slurm with a corpus. Runs that were started, with `killed` before one that was not to end."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    (tmp_path / "text.txt").write_text("".join(f"line {i % 10} of {i % 7}\n" for i in range(2000)))
    build(tmp_path / "c.h5", list_sources([tmp_path / "text.txt"]), [tmp_path / "text.txt"])
    started: list[str] = []

    def run(function: Any, args: tuple[Any, ...], world: int, folder: Path, threads: int) -> None:
        until = 4 if "killed" in started else None
        started.append(f"{folder.parent.name} {world}")
        ranks(world, drive, RunConfig.model_validate(args[0]), world, until)
        if until:
            raise KeyboardInterrupt

    monkeypatch.setattr("hpctrain.scale.jobs.run_local", run)
    return started


def test_a_study_that_is_killed_midway_is_finished_by_the_same_command(here: list[str], tmp_path: Path) -> None:
    command = ("weak", "gpt-tiny", *SMALL, "data.corpus=c.h5", "--steps", "9", "--warm-up", "1", "--cluster", "cpu-lab")
    first = invoke(*command, "nodes=1")
    assert first.exit_code == 0, first.output
    assert here == ["1-node 1"] and "a node stands for a rank of this machine" in first.stderr
    here.append("killed")
    cut = invoke(*command, "nodes=1,2,3")
    assert cut.exit_code == 130 and here[2:] == ["2-nodes 2"]
    assert "the same command finishes what is missing" in cut.stderr
    half = invoke("report", "runs/gpt-tiny-weak", "--cluster", "cpu-lab")
    assert half.exit_code == 0 and "not measured yet: 2, 3 nodes" in half.stderr, half.output
    here.clear()
    done = invoke(*command, "nodes=1,2,3")
    assert done.exit_code == 0 and here == ["2-nodes 2", "3-nodes 3"], done.output
    here.clear()
    again = invoke(*command, "nodes=1,2,3", "--json")
    assert here == [] and again.exit_code == 0

    folder = tmp_path / "runs" / "gpt-tiny-weak"
    rows = list(csv.DictReader((folder / "scaling.csv").open()))
    found = json.loads(again.stdout)
    assert [int(r["devices"]) for r in rows] == [1, 2, 3] == [r["devices"] for r in found["rows"]]
    for row, plain in zip(rows, found["rows"]):
        assert float(row["tokens_per_second"]) == plain["tokens_per_second"] > 0
        assert plain["tokens_per_second"] == pytest.approx(plain["global_batch"] * 32 / plain["step_seconds"])
        assert plain["tokens_per_second_low"] < plain["tokens_per_second"] < plain["tokens_per_second_high"]
        assert plain["predicted_tokens_per_second"] > 0 and plain["mfu_causal"] > 0 and plain["steps"] == 8
        ideal = found["rows"][0]["tokens_per_second"] * plain["devices"]
        assert plain["efficiency"] == pytest.approx(plain["tokens_per_second"] / ideal)
    assert [r["global_batch"] for r in found["rows"]] == [4, 8, 12]
    assert found["rows"][2]["exposed_share"] > found["rows"][0]["exposed_share"]
    assert any("law" in said for said in found["verdict"]) and "3 devices" in found["verdict"][0]
    assert (folder / "scaling.png").read_bytes().startswith(b"\x89PNG")
    drawn = (folder / "scaling.svg").read_text()
    assert all(f"<!-- {name} -->" in drawn for name in ("ideal", "measured, 95%", "predicted", "law that fits"))
    page = (folder / "scaling.html").read_text()
    assert "scaling.svg" in page and found["verdict"][0] in page


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("nodes=1,2", "--detach"), "there is no Slurm here: no sbatch on PATH; leave it out"),
        (("nodes=1,2", "--time", "10"), "there is no Slurm here"),
        (("nodes=2", "--cluster", "dgx-h10"), "the nearest is dgx-h100"),
        (("nodes=1,2", "--measured", "nowhere.yaml"), "there is no such file; make one with hpctrain bench"),
        (("nodes=1,2", "cluster.gpus_per_node=9", "train.global_batch=36"), "has 8 devices; use at most 8"),
        (("nodes=1,2", "data.corpus=not.h5"), "not.h5"),
        (("nodes=1,2", "folder=/proc/x"), "folder='/proc/x': the run folder cannot be made there (No such file"),
        (("nodes=1,2", "folder=c.h5"), "a part of that path is a file; use another path"),
        ((), "nodes='': the sizes of the study must be given; for example nodes=1,2,4"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_runs(here: list[str], more: tuple[str, ...], words: str) -> None:
    done = invoke("strong", "gpt-tiny", *SMALL, "data.corpus=c.h5", *more)
    assert done.exit_code != 0 and words in done.stderr and here == [] and not Path("runs").exists()
    assert "error: " in done.stderr and "Traceback" not in done.stderr


def test_sizes_beyond_this_machine_are_refused_before_anything_is_written(
    here: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what a rank takes whatever it does, by its open log, and by what the model takes."""
    command = ("weak", "gpt-tiny", *SMALL, "data.corpus=c.h5", "--steps", "4", "--warm-up", "1", "name=zz1")

    def said(*more: str) -> str:
        done = invoke(*command, *more)
        assert done.exit_code == 2 and here == [] and not Path("runs").exists(), done.output
        assert "Traceback" not in done.stderr
        return done.stderr.splitlines(keepends=True)[-1]

    memory = Memory(8 * PROCESS, "machine")
    monkeypatch.setattr(jobs, "host_memory", lambda: memory)
    monkeypatch.setattr(preflight, "host_memory", lambda: memory)
    assert said("nodes=1,100000") == (
        "error: nodes=100000: 100,000 ranks are more than the 8 that this machine can start: each takes 320 MiB at the "
        "least, of 2.5 GiB; use nodes of at most 8, or a cluster with Slurm.\n"
    )
    assert "use nodes of at most 2, or" in said("nodes=1,3", "cluster.gpus_per_node=3", "train.global_batch=3")
    monkeypatch.setattr(jobs.resource, "getrlimit", lambda which: (OPEN + 4, 99))
    assert "more than the 4 that this machine can start: each has a file open, of 36 (ulimit -n)" in said("nodes=1,5")
    assert "use cluster.gpus_per_node=4, or" in said("nodes=1", "cluster.gpus_per_node=8", "train.global_batch=8")
    large = said("nodes=1,4", "model.hidden=2048", "model.layers=4", "model.ffn=8192")
    assert "memory=" in large and ": on 1 node: " in large and "or leave nodes=1 out" in large


def test_what_is_measured_already_needs_no_room(here: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    command = ("weak", "gpt-tiny", *SMALL, "data.corpus=c.h5", "--steps", "4", "--warm-up", "1", "--cluster", "cpu-lab")
    assert invoke(*command, "nodes=1").exit_code == 0
    monkeypatch.setattr(jobs, "host_memory", lambda: Memory(0, "machine"))
    assert invoke(*command, "nodes=1").exit_code == 0 and here == ["1-node 1"]


def test_a_folder_without_a_study_is_refused(tmp_path: Path) -> None:
    assert "holds no scaling study" in invoke("report", str(tmp_path)).stderr


def test_a_curve_is_predicted_up_to_a_hundred_thousand_devices(tmp_path: Path) -> None:
    """Each size with the best layout, in seconds; smaller ones as the recipe says."""
    many = invoke("predict", "llama-8b", "nodes=1,64,12500", "cluster.gpus_per_node=8", "train.global_batch=16",
                  "--best", "--json")  # fmt: skip
    rows = json.loads(many.stdout)["rows"]
    assert [r["devices"] for r in rows] == [8, 512, 100_000]
    shares = [r["predicted_efficiency"] for r in rows]
    assert shares[0] == 1 and 0.5 < shares[2] < shares[1] <= 1.02
    into = tmp_path / "curve"
    few = invoke("predict", "llama-8b", "nodes=4,8,16", "cluster.gpus_per_node=8", "train.global_batch=512", "--strong",
                 "--into", str(into))  # fmt: skip
    assert few.exit_code == 0 and "serial" in few.stdout, few.output
    drawn = (into / "scaling.svg").read_text()
    assert "<!-- predicted -->" in drawn and "<!-- ZeRO-3 2021, 175B, A100 -->" in drawn and "measured" not in drawn


def test_predictions_of_what_does_not_fit_are_marked() -> None:
    """As `hpctrain plan explain` has it; a curve that fits, or whose devices are CPUs, has no such column."""
    command = ("predict", "llama-70b", "nodes=1,16,32")
    few, plain = invoke(*command), json.loads(invoke(*command, "--json").stdout)
    marks = [line.split("  ")[-1].strip() for line in few.stdout.splitlines()[:4]]
    assert marks == ["memory", "does not fit", "does not fit", "fits"]
    assert [row["predicted_fits"] for row in plain["rows"]] == [False, False, True]
    sizes = []
    for row in plain["rows"]:
        explained = CliRunner().invoke(main, ["plan", "explain", "llama-70b", "--gpus", str(row["devices"])]).stdout
        assert ("does not fit: a device has 70.6 GiB" in explained) is not row["predicted_fits"]
        sizes.append(row["predicted_memory_bytes"] / 2**30)
        assert row["device_memory_bytes"] / 2**30 == pytest.approx(70.6, abs=0.05)
    said = (
        f"nodes=1,16 cannot run as predicted: a device needs {sizes[0]:.0f} and {sizes[1]:.1f} GiB and has 70.6 GiB for"
    )
    assert plain["verdict"][0].startswith(said) and plain["verdict"][0] in few.stdout
    same = invoke("predict", "llama-70b", "nodes=1,2", "sharding.stage=0").stdout
    assert "nodes=1,2 cannot run as predicted: a device needs 211 GiB and has" in same
    for fits in (("llama-70b", "nodes=32,64"), ("gpt-tiny", "nodes=1,2", "--cluster", "cpu-lab")):
        done = invoke("predict", *fits)
        assert done.exit_code == 0 and "memory" not in done.stdout and "cannot run" not in done.stdout


def test_a_size_that_cannot_be_priced_is_named() -> None:
    done = invoke("predict", "llama-405b", "nodes=1,2", "cluster.gpus_per_node=8", "--best")
    assert done.exit_code == 2 and "no size can be priced" in done.stderr
