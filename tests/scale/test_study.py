"""Which runs a study is made of, what it refuses, and what it remembers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from hpctrain.cli import main
from hpctrain.errors import ConfigError, DataError
from hpctrain.layout.layout import Layout
from hpctrain.layout.parameters import parameter_specs
from hpctrain.layout.traffic import wire
from hpctrain.scale.measure import missing, points
from hpctrain.scale.predict import sent
from hpctrain.scale.study import STUDY_FILE, Study, apart, make, read, remembered, sizes
from hpctrain.telemetry.flops import flops_per_token

SMALL = (
    *("model.layers=1", "model.hidden=32", "data.seq=32", "parallel.tp=1", "cluster.gpus_per_node=2"),
    "train.micro_batch=1",
)


def study(kind: str, folder: Path, *more: str, nodes: str = "1,2,4", here: bool = False, repeats: int = 1) -> Study:
    settings = (*SMALL, f"folder={folder}", *more)
    return make(kind, "gpt-tiny", settings, sizes(nodes), 12, 2, repeats, here)  # type: ignore[arg-type]


def test_weak_scaling_gives_every_node_the_same_work(tmp_path: Path) -> None:
    made = study("weak", tmp_path, nodes="2,4,6", repeats=2)
    batches = {n: made.size(n).train.global_batch for n in made.nodes}
    assert batches == {2: 16, 4: 32, 6: 48} and made.folder == tmp_path / "gpt-tiny-weak"
    runs = made.runs(4)
    assert [r.run_folder for r in runs] == [made.folder / "4-nodes" / f"run-{i}" for i in (1, 2)]
    assert {(r.cluster.nodes, r.train.steps, r.train.log_every, r.train.eval_batches) for r in runs} == {(4, 12, 1, 0)}
    assert not runs[0].checkpoint.at_end and runs[0].optimizer.warmup_steps == 0


def test_strong_scaling_shares_the_work_and_without_slurm_a_node_is_ranks(tmp_path: Path) -> None:
    made = study("strong", tmp_path, "name=mine", here=True)
    assert {made.size(n).train.global_batch for n in made.nodes} == {16} and made.folder.name == "mine"
    assert [(made.size(n).cluster.nodes, made.size(n).cluster.gpus_per_node) for n in (1, 4)] == [(1, 2), (1, 8)]


@pytest.mark.parametrize(
    ("kind", "nodes", "more", "words"),
    [
        ("weak", "1,x", (), "nodes='1,x': must be whole numbers above 0"),
        ("strong", "1,3", (), "on 3 nodes: .*leave nodes=3 out"),
        ("weak", "1,2", ("parallel.tp=8",), "on 1 node: "),
    ],
)
def test_sizes_that_cannot_run_are_refused(
    tmp_path: Path, kind: str, nodes: str, more: tuple[str, ...], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        study(kind, tmp_path, *more, nodes=nodes)


def test_sizes_are_named_among_the_settings() -> None:
    assert apart(["train.seed=1", "nodes=4,1,2,2"]) == ((1, 2, 4), ("train.seed=1",))
    with pytest.raises(ConfigError, match="for example nodes=1,2,4"):
        apart(["train.seed=1"])
    with pytest.raises(ConfigError, match="must leave 2 steps after a warm-up of 5; use 7"):
        make("weak", "gpt-tiny", (), (1,), 6, 5, 1, False)


def test_a_folder_remembers_its_study_and_takes_more_sizes_but_no_other_settings(tmp_path: Path) -> None:
    first = remembered(study("weak", tmp_path, nodes="1,2"))
    assert read(first.folder) == first
    more = remembered(study("weak", tmp_path, nodes="1,4", repeats=3))
    assert (more.nodes, more.repeats) == ((1, 2, 4), 3) and read(first.folder) == more
    with pytest.raises(ConfigError, match=r"holds a study whose model.hidden is 32, not 64; choose another name"):
        remembered(study("weak", tmp_path, "model.hidden=64", nodes="1,2"))
    with pytest.raises(ConfigError, match="holds a study whose kind is 'weak', not 'strong'"):
        remembered(study("strong", tmp_path, "name=gpt-tiny-weak", nodes="1,2"))
    with pytest.raises(ConfigError, match="holds a study whose smallest size is 1, not 2"):
        remembered(study("weak", tmp_path, nodes="2,4"))
    (first.folder / STUDY_FILE).write_text("{")
    with pytest.raises(DataError, match="is damaged"):
        read(first.folder)
    with pytest.raises(DataError, match="holds no scaling study"):
        read(tmp_path)


def record(made: Study, nodes: int, run: int, steps: int, seconds: float, waits: float) -> None:
    """A run that has recorded so many steps."""
    folder = made.runs(nodes)[run].run_folder
    folder.mkdir(parents=True)
    line = '{{"kind": "train", "step": {}, "time/step": {}, "time/communication": {}, "time/compute": 0.5}}\n'
    slow = "".join(line.format(i + 1, 99.0, 0.0) for i in range(min(steps, 2)))
    (folder / "metrics.jsonl").write_text(slow + "".join(line.format(i + 1, seconds, waits) for i in range(2, steps)))


def test_what_is_done_is_measured_after_the_warm_up_and_the_rest_is_missing(tmp_path: Path) -> None:
    made = study("weak", tmp_path, repeats=2)
    for nodes, run, steps, seconds in ((1, 0, 12, 1.0), (1, 1, 12, 1.2), (2, 0, 12, 1.5), (2, 1, 7, 9.0)):
        record(made, nodes, run, steps, seconds, 0.1)
    assert [len(missing(made, n)) for n in made.nodes] == [0, 1, 2]
    one, two = points(made)
    assert one.seconds.value == pytest.approx(1.1) and one.seconds.half == pytest.approx(12.706 * 0.1)
    assert (one.runs, one.steps, two.runs, two.steps) == (2, 20, 1, 10)
    assert one.rate.value == pytest.approx(16 * 32 / 1.1) and one.parts["rest"] == pytest.approx(0.5)
    assert two.seconds == two.seconds.__class__(1.5, 0.0)
    flops = flops_per_token(made.base.model, 32).causal
    assert points(made, peak=1e9)[0].mfu == pytest.approx(16 * 32 / 1.1 * flops / 2e9)


def test_a_verdict_says_of_what_is_not_measured_that_it_is_predicted(tmp_path: Path) -> None:
    """And no interval reaches below 0, however little is known."""
    made, where = remembered(study("weak", tmp_path, nodes="1,2", repeats=2)), ("--cluster", "cpu-lab", "--json")

    def reported() -> dict[str, Any]:
        done = CliRunner().invoke(main, ["scale", "report", str(made.folder), *where])
        assert done.exit_code == 0, done.output
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    verdict = reported()["verdict"]
    assert all(text.startswith("predicted: ") for text in verdict)
    assert verdict[0].startswith("predicted: from 2 to 4 devices ") and "law fits" in verdict[-1]
    for nodes, run, seconds in ((1, 0, 1.0), (1, 1, 3.0), (2, 0, 1.0), (2, 1, 4.0)):
        record(made, nodes, run, 12, seconds, 0.1)
    found = reported()
    assert not any("predicted" in text for text in found["verdict"])
    for row in found["rows"]:
        for name in ("tokens_per_second", "step_seconds"):
            assert row[f"{name}_low"] == 0 < row[name] < row[f"{name}_high"]


def test_messages_and_bytes_of_a_data_parallel_step(tmp_path: Path) -> None:
    """Engine none: gradients in buckets of 25 MiB, an all-reduce over four ranks in rings."""
    size = study("strong", tmp_path, "parallel.tp=1", nodes="2").size(2)
    numel = sum(spec.numel for spec in parameter_specs(size.model))
    messages, bytes_ = sent(size, Layout(dp=4))
    assert messages == 6 and bytes_ == pytest.approx(wire("all_reduce", numel * 4, 4))
    assert sent(size, Layout()) == (0.0, 0.0)
