"""Every benchmark runs, small, and what it says becomes a table. What it measures here is of no interest."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import checkpoint_save, collectives, data_access, run, training
from hpctrain.launch.local.zygote import Zygote

TINY = ("model.layers=1", "model.hidden=16", "model.heads=2", "model.vocab=32", "model.max_seq=16", "data.seq=8",
        "train.global_batch=4", "train.micro_batch=2")  # fmt: skip


def check(result: dict[str, Any], n_rows: int) -> None:
    """As it is after it was printed and read."""
    rows = json.loads(json.dumps(result))["rows"]
    assert len(rows) == n_rows and len({(what, beside) for what, _, beside, _ in rows}) == n_rows
    for what, measured, beside, ratio in rows:
        assert what and re.fullmatch(r"[\d,]+ (tokens/s|samples/s|MB/s|Mbit/s a rank)", measured)
        unit = re.escape(measured.partition(" ")[2])
        assert re.fullmatch(rf".+: [\d,]+ {unit}", beside)
        assert re.fullmatch(r"\d+\.\d\d", ratio)


def test_training(zygote: Zygote) -> None:
    result = zygote.run(training.measure, 0, "gpt-tiny", TINY, 1, 1)[0]
    check(result, 2)
    assert [row[0].split(", ")[1] for row in result["rows"]] == ["tp=1", "tp=2"]
    assert set(result["tokens_per_second"]) == {"plain", "tp=1", "tp=2"}


def test_data_access() -> None:
    check(data_access.measure(seq=64, batch=4, tokens=20_000, batches=2, rounds=2), 4)


def test_checkpoint_save(zygote: Zygote, tmp_path: Path) -> None:
    result = checkpoint_save.measure(zygote, tmp_path, mib=2, ranks=2, rounds=2)
    check(result, 2)
    assert {name: len(times) for name, times in result["rounds"].items()} == {"raw": 2, "ours": 2, "dcp": 2}
    assert list(tmp_path.iterdir()) == []


def test_collectives(zygote: Zygote) -> None:
    found = zygote.run(collectives.over_gloo, 2, 2, 1)[0]
    check({"rows": collectives.rows("gloo", "torch.distributed", found)}, 4)
    made = [
        {
            "operation": "all_reduce",
            "size": 1 << 20,
            "seconds": {collectives.OURS: [2.0, 4.0], collectives.BARE: [1, 2]},
        }
    ]
    (row,) = collectives.rows("MPI", "mpi4py", made)
    assert row[3] == "0.50"


def test_runs_a_script_and_reads_what_it_prints() -> None:
    check(run.run("data_access", "--quick", "--seq", "32", "--batch", "2"), 4)


def test_the_table_goes_between_the_markers(tmp_path: Path) -> None:
    results = {
        "machine": "a machine",
        "training": {"rows": [["a", "1 tokens/s", "b: 2 tokens/s", "0.50"]]},
        "checkpoint_save": {"rows": [["c", "3 MB/s", "d: 4 MB/s", "0.75"], ["e", "5 MB/s", "d: 4 MB/s", "1.25"]]},
    }
    readme = tmp_path / "README.md"
    readme.write_text(run.README.read_text())
    before, after = readme.read_text().split(run.BEGIN)[0], readme.read_text().split(run.END)[1]
    for _ in range(2):  # over an earlier table, too
        run.write_readme(readme, run.table(results))
        text = readme.read_text()
        assert text.startswith(before + run.BEGIN) and text.endswith(run.END + after)
        assert text[len(before) : len(text) - len(after)].splitlines() == [
            run.BEGIN,
            "Measured on a machine.",
            "",
            "| what | measured | beside | ratio (median of rounds) |",
            "|---|---|---|---|",
            "| a | 1 tokens/s | b: 2 tokens/s | 0.50 |",
            "| c | 3 MB/s | d: 4 MB/s | 0.75 |",
            "| e | 5 MB/s | d: 4 MB/s | 1.25 |",
            run.END,
        ]


def test_results_of_another_machine_say_so() -> None:
    results = {"machine": "a", "training": {"rows": [], "machine": "a"}, "rails": {"rows": [], "machine": "b"}}
    assert run.table(results).startswith("Measured on a; rails on b.\n")


@pytest.mark.parametrize("command", [["benchmarks/run.py"], ["-m", "benchmarks.run"]], ids=" ".join)
def test_both_ways_to_start(command: list[str]) -> None:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, *command, "training", "cooking"], cwd=run.ROOT, env=env, capture_output=True,
                          text=True)  # fmt: skip
    assert done.returncode == 2
    assert f"no benchmark is called cooking; there are {', '.join(run.BENCHMARKS)}" in done.stderr


@pytest.mark.parametrize("name", [name for name in run.BENCHMARKS if name != "data_access"])  # which has run above
def test_all_have_a_quick_way(name: str) -> None:
    done = subprocess.run([sys.executable, "-m", f"benchmarks.{name}", "--quick", "--help"], cwd=run.ROOT,
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr
