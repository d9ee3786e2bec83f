"""Layouts as they are written on a command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpctrain.errors import ConfigError
from hpctrain.verify.cases import cases

SMALL = ["model.layers=4", "train.global_batch=8", "train.micro_batch=2"]


def test_bare_names_are_parallel_and_dp_counts_ranks() -> None:
    text = "tp=2 ; dp=2,sharding.stage=1;pp=2, parallel.schedule=gpipe ,dp=2;"
    text += "pp=2,stage_layers=[1,3],train.micro_batch=1;dp=2,sharding.engine=fsdp"
    found = cases(text, "gpt-tiny", SMALL, 3, "float64")
    assert [(c.text, c.world, c.refused) for c in found] == [
        ("tp=2", 2, ""),
        ("dp=2,sharding.stage=1", 2, ""),
        ("pp=2, parallel.schedule=gpipe ,dp=2", 4, ""),
        ("pp=2,stage_layers=[1,3],train.micro_batch=1", 2, ""),
        ("dp=2,sharding.engine=fsdp", 2, ""),
    ]
    configs = [c.config for c in found]
    assert [c.parallel.tp for c in configs] == [2, 1, 1, 1, 1]
    assert configs[2].parallel.schedule == "gpipe"
    assert (configs[3].parallel.stage_layers, configs[3].train.micro_batch) == ((1, 3), 1)
    assert [c.train.precision for c in configs] == ["float64", "float32", *["float64"] * 3], "DeepSpeed has none"
    assert {(c.train.steps, c.optimizer.warmup_steps, c.optimizer.schedule) for c in configs} == {(3, 0, "constant")}
    assert [c.cluster.gpus_per_node for c in configs] == [2, 2, 4, 2, 2]


@pytest.mark.parametrize(
    ("text", "world"),
    [("ep=2", 2), ("tp=2,ep=2", 2), ("tp=2,ep=4", 4), ("tp=2,etp=2,ep=2,pp=2", 8), ("cp=2,ep=4", 4), ("ep=2,dp=4", 4)],
)
def test_dp_is_as_large_as_experts_need(text: str, world: int) -> None:
    (found,) = cases(text, "moe-tiny", ["train.global_batch=8", "train.micro_batch=2"], 3, "float64")
    assert (found.world, found.refused) == (world, "")


def test_the_layout_of_the_recipe_is_put_aside(tmp_path: Path) -> None:
    """All of it: a schedule, chunks or stages of a pipeline that is none would refuse every other layout."""
    parallel = dict(tp=2, sp=True, pp=2, schedule="interleaved", chunks=2, stage_layers=[1, 1, 1, 1])
    sharding = dict(engine="deepspeed", stage=3, bucket_mib=1.0, torch_adam=False)
    cluster = dict(nodes=2, gpus_per_node=4)
    recipe = tmp_path / "big.yaml"
    recipe.write_text(
        json.dumps({"model": {"layers": 4}, "parallel": parallel, "sharding": sharding, "cluster": cluster})
    )
    for found in cases("tp=2;pp=2;pp=2,schedule=zb-v,chunks=2;dp=2,sharding.stage=1", recipe, [], 1, "float64"):
        assert not found.refused and found.world == 2
        asked = {part.partition("=")[0].rpartition(".")[2] for part in found.text.split(",")}
        config = found.config
        for section in (config.parallel, config.sharding):
            assert asked >= {name for name, value in section if value != getattr(type(section)(), name)}
        assert config.cluster.nodes == 1
    (found,) = cases("pp=2", recipe, ["parallel.schedule=gpipe"], 1, "float64")
    assert found.config.parallel.schedule == "gpipe", "what is asked for all layouts is not the recipe's"


def test_a_layout_that_cannot_run_is_a_case_with_the_reason() -> None:
    (bad, good) = cases("tp=3;tp=2", "gpt-tiny", SMALL, 3, "float32")
    assert bad.refused.startswith("parallel.tp=3: must divide model.heads=4") and not good.refused


@pytest.mark.parametrize("override", ["train.precision=bf16", "train.steps=3", "optimizer.warmup_steps=1"])
def test_what_verify_sets_itself_is_refused_for_all_layouts_too(override: str) -> None:
    with pytest.raises(ConfigError, match=f"{override}.*has no effect here: .*; leave it out"):
        cases("tp=2", "gpt-tiny", [override], 3, "float64")
    cases("tp=2", "gpt-tiny", ["cluster.gpus_per_node=4"], 3, "float64")


def test_a_setting_without_effect_is_not_passed() -> None:
    (alone, ulysses) = cases("schedule=zb-h1;cp_method=ulysses", "gpt-tiny", SMALL, 3, "float64")
    assert "has no effect without a pipeline" in alone.refused
    assert ulysses.refused.startswith("parallel.cp_method='ulysses': has no effect with parallel.cp=1")


def test_what_the_reference_has_too() -> None:
    found = cases(
        "tp=2,model.layers=3;train.micro_batch=1,pp=2,data.seq=64,optimizer.lr=1", "gpt-tiny", SMALL, 3, "bf16"
    )
    assert [case.shared for case in found] == [("model.layers=3",), ("data.seq=64", "optimizer.lr=1")]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "names no layout"),
        (" ; ", "names no layout"),
        ("tp", "--layouts='tp': is no KEY=VALUE"),
        ("tp=2,=3", "is no KEY=VALUE"),
        ("dp=0", "--layouts='dp=0': must be a whole number of at least 1"),
        ("dp=x", "must be a whole number"),
        ("tp=x", "parallel.tp='x'"),
        ("zp=2", "parallel.zp"),
        ("sharding.stage=9", "sharding.stage=9"),
        ("tp=2,,pp=2", "--layouts='tp=2,,pp=2': has nothing beside a comma"),
        ("tp=2,", "has nothing beside a comma"),
        ("tp=2;;pp=2", "has nothing between two semicolons"),
        ("pp=2,pp=4", "--layouts='pp=2,pp=4': sets parallel.pp twice; semicolons separate layouts."),
        ("pp=2,parallel.pp=2", "sets parallel.pp twice"),
        ("dp=2,dp=4", "sets parallel.dp twice"),
        (
            "tp=2,train.precision=bf16",
            "verify='train.precision=bf16': has no effect here: --dtype says it; leave it out.",
        ),
        ("train.steps=9", "--steps says it"),
        ("optimizer.schedule=cosine", "every step has the full learning rate"),
        ("checkpoint.every=1", "nothing is saved"),
        ("tp=2,cluster.gpus_per_node=4", "dp=N says how many ranks a layout has"),
    ],
)
def test_what_cannot_be_read_is_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        cases(text, "gpt-tiny", SMALL, 3, "float64")
    assert said in str(caught.value) and "\n" not in str(caught.value)
