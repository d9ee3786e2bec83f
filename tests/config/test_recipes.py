"""Recipes hold the models they are named after, and can run where they say."""

from __future__ import annotations

import pytest

from hpctrain.config.load import description, load, recipes
from hpctrain.config.validate import validate
from hpctrain.layout.layout import Layout
from hpctrain.layout.parameters import parameter_specs

# Llama, Mixtral, Qwen3: counts of the published weights; papers round the latter to 47B (arXiv 2401.04088) and 30.5B
# (2505.09388). GPT-3: table 2.1 of arXiv 2005.14165 rounds to 175.0B; its formula gives 174.6B. 530B and 1T: table 1 of
# arXiv 2104.04473.
EXACT = {
    "llama-1b": 1_235_814_400,
    "llama-8b": 8_030_261_248,
    "llama-70b": 70_553_706_496,
    "llama-405b": 405_853_388_800,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-moe-30b-a3b": 30_532_122_624,
}
ROUNDED = {"gpt-175b": (174.6e9, 0.05e9), "gpt-530b": (529.6e9, 0.05e9), "gpt-1t": (1008.0e9, 0.05e9)}


def count(name: str) -> int:
    return sum(spec.numel for spec in parameter_specs(load(name).model))


def test_all_are_known() -> None:
    assert set(recipes()) == {"gpt-tiny", "llama-tiny", "moe-tiny", "lora", "qlora", *EXACT, *ROUNDED}


@pytest.mark.parametrize(("name", "parameters"), EXACT.items())
def test_count(name: str, parameters: int) -> None:
    assert count(name) == parameters


@pytest.mark.parametrize(("name", "published"), ROUNDED.items())
def test_count_rounded(name: str, published: tuple[float, float]) -> None:
    assert count(name) == pytest.approx(published[0], abs=published[1])


@pytest.mark.parametrize("name", recipes())
def test_runs_where_it_says(name: str) -> None:
    config = load(name)
    world = config.cluster.nodes * config.cluster.gpus_per_node
    layout = Layout.of(config.parallel, world)
    assert config.train.global_batch % (layout.dp * config.train.micro_batch) == 0
    assert layout.tp <= config.cluster.gpus_per_node
    assert layout.pp <= config.model.layers
    validate(config, world)


@pytest.mark.parametrize("name", recipes())
def test_has_a_description_and_its_own_name(name: str) -> None:
    assert load(name).name == name
    assert 20 < len(description(name)) < 110
