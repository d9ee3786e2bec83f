"""`hpctrain memory`: its table, JSON and picture."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner, Result

from hpctrain.cli import main

RECIPE = ["memory", "llama-8b", "sharding.stage=3", "cluster.nodes=1", "cluster.gpus_per_node=8", "parallel.tp=1"]


def call(*more: str) -> Result:
    return CliRunner().invoke(main, [*RECIPE, *more])


def test_json_has_every_part_of_every_phase_in_bytes() -> None:
    """llama-8b over 8 ranks: of 8,030,261,248 weights an eighth, moments and master weights of 4 bytes each."""
    found = json.loads(call("train.precision=bf16", "--json").stdout)
    assert list(found["phases"]) == ["start", "forward", "backward", "step"]
    start, backward = found["phases"]["start"], found["phases"]["backward"]
    assert start["optimizer"] == 12 * 8_030_261_248 // 8 and start["weights"] == 2 * 8_030_261_248 // 8
    assert start["activations"] == start["logits"] == 0 < backward["activations"]
    parts = ("weights", "gradients", "optimizer", "activations", "logits", "buffers")
    for phase in found["phases"].values():
        assert phase["device"] == sum(phase[part] for part in parts)
    assert found["peak"] == max(phase["device"] for phase in found["phases"].values())


def test_the_table_names_rank_parts_and_peak() -> None:
    lines = call().stdout.splitlines()
    assert lines[0] == "rank 0, GiB" and lines[1].split()[:4] == ["phase", "weights", "gradients", "optimizer"]
    assert [line.split()[0] for line in lines[2:6]] == ["start", "forward", "backward", "step"]
    assert lines[6].startswith("at most ")


def test_host_memory_and_disk_of_what_is_offloaded() -> None:
    text = call("sharding.offload.optimizer=nvme", "sharding.offload.path=/tmp").stdout
    assert "in host memory" in text and "on its disk" in text
    assert "on its disk" not in call("sharding.offload.optimizer=cpu").stdout


def test_what_a_budget_chose_is_said() -> None:
    """And the table, and the JSON, are of that."""
    budget = ("data.seq=4096", "train.micro_batch=1", "train.activation_budget=16")
    first, *table = call(*budget).stdout.splitlines()
    assert first.startswith("train.activation_budget=16 chose train.recompute=selective train.recompute_ops=[")
    assert table[0] == "rank 0, GiB"
    found = json.loads(call(*budget, "--json").stdout)
    assert found["train"]["recompute"] == "selective" and found["train"]["recompute_ops"] == ["layernorm", "activation"]
    backward = found["phases"]["backward"]
    assert 10 * 2**30 < backward["activations"] + backward["logits"] <= 16 * 2**30
    assert "train" not in json.loads(call("--json").stdout)


def test_a_budget_that_nothing_keeps_to_is_refused() -> None:
    done = call("data.seq=4096", "train.micro_batch=1", "train.activation_budget=0.1")
    assert done.exit_code == 2 and "GiB on the fullest rank at the least" in done.stderr


def test_building_is_shown_where_it_is_more_than_any_phase() -> None:
    """It is what a run is refused by then; with more activations it is not."""
    tokens = "sharding.stage=2", "train.micro_batch=1", "sharding.torch_adam=false"
    *_, peak, building = call(*tokens, "data.seq=1").stdout.splitlines()
    assert building.startswith("while its engine is built ")
    assert float(building.split()[5]) > float(peak.removeprefix("at most ").removesuffix(" GiB"))
    assert "built" not in call(*tokens, "data.seq=8192").stdout


def test_a_rank_that_is_not_there_is_refused() -> None:
    done = call("--rank", "8")
    assert done.exit_code == 2 and "there are ranks 0 to 7" in done.stderr


def test_ranks_that_would_not_fit_here_are_not_measured() -> None:
    """Be it that they are too large, or too many."""
    for more in (["model.layers=4000"], ["cluster.gpus_per_node=100000", "train.global_batch=400000"]):
        done = call("--measure", *more)
        said = done.stderr.splitlines()[-1]
        assert done.exit_code == 2 and said.startswith("error: memory='") and "that a rank has" in said
        assert not done.stdout


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    assert call("--picture", str(tmp_path / "memory.svg")).exit_code == 0
    text = (tmp_path / "memory.svg").read_text()
    assert "<svg" in text and len(text) > 5000
