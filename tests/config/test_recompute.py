"""What is computed again: rules between its settings, and the mends that they name."""

from __future__ import annotations

from itertools import product
from typing import get_args

import pytest

from hpctrain.config.load import load
from hpctrain.config.schema import Operation
from hpctrain.config.validate import validate
from hpctrain.errors import ConfigError
from tests.config.rules import refuses

# as in test_validate.py: overrides of llama-tiny, ranks, the setting blamed, words of the sentence, overrides that mend
CASES = [
    ("train.recompute_every=2", 2, "train.recompute_every", "computes none of them again", "train.recompute=full"),
    ("train.recompute_ops=[mlp]", 2, "train.recompute_ops", "and it is none", "train.recompute=selective"),
    (
        "train.recompute=selective train.recompute_ops=[]",
        2,
        "train.recompute_ops",
        "nothing",
        "train.recompute_ops=[mlp]",
    ),
    (
        "train.recompute=selective train.recompute_ops=[moe,mlp]",
        2,
        "train.recompute_ops",
        "there are no experts; use [mlp]",
        "train.recompute_ops=[mlp]",
    ),
    (
        "train.recompute=selective train.recompute_ops=[mlp,activation]",
        2,
        "train.recompute_ops",
        "names activation, which is in mlp",
        "train.recompute_ops=[mlp]",
    ),
    (
        "model.moe.experts=4 train.recompute=selective train.recompute_ops=[mlp]",
        2,
        "train.recompute_ops",
        "all layers have experts",
        "model.moe.dense_layers=1",
    ),
    (
        "train.recompute=selective train.recompute_ops=[layernorm,layernorm]",
        2,
        "train.recompute_ops",
        "layernorm twice",
        "train.recompute_ops=[layernorm]",
    ),
    (
        "train.activation_budget=1 train.recompute=full",
        2,
        "train.activation_budget",
        "and these are set; leave them out, or use null",
        "train.activation_budget=null",
    ),
    (
        "train.activation_budget=1 train.recompute_every=2",
        2,
        "train.activation_budget",
        "are set",
        "train.recompute_every=1",
    ),
    (
        "train.activation_budget=1 sharding.offload.activations=cpu",
        2,
        "train.activation_budget",
        "activations=cpu takes them off it",
        "sharding.offload.activations=none",
    ),
]


@pytest.mark.parametrize(("overrides", "world", "path", "words", "mend"), CASES)
def test_rule(overrides: str, world: int, path: str, words: str, mend: str) -> None:
    refuses(overrides, world, path, words, mend)


@pytest.mark.parametrize("recipe", ["llama-tiny", "moe-tiny"])
def test_what_is_said_of_named_operations_is_no_mistake_itself(recipe: str) -> None:
    """Of all lists of two or three names, whatever is wrong with them."""
    names = get_args(Operation)
    for given in (*product(names, repeat=2), *product(names, repeat=3)):
        settings = ["train.recompute=selective", f"train.recompute_ops=[{','.join(given)}]"]
        try:
            validate(load(recipe, settings), 2)
        except ConfigError as error:
            fix = str(error).rpartition("use ")[2].rstrip(".")
            validate(load(recipe, [settings[0], f"train.recompute_ops={fix}"]), 2)


@pytest.mark.parametrize(
    ("given", "example"), [("mlp", "[mlp]"), ("[attention]", "[core_attn]"), ("[mlp,norm]", "[mlp]")]
)
def test_a_list_of_names_is_shown_as_it_is_written(given: str, example: str) -> None:
    with pytest.raises(ConfigError, match="each one of core_attn, layernorm") as caught:
        load("llama-tiny", [f"train.recompute_ops={given}"])
    assert f"write it in brackets and quotes, such as '{example}'" in str(caught.value)
