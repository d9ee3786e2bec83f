"""What is to be verified: a recipe under several layouts, from the words of a command line. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.config.load import load
from hpctrain.config.schema import Precision, RunConfig
from hpctrain.config.validate import validate
from hpctrain.errors import ConfigError

ONLY_NONE = "float64"
"""The precision that only sharding.engine=none computes in; other engines are verified in float32 instead."""


@dataclass(frozen=True)
class Case:
    """One layout of a recipe.

    Attributes:
        text: as it was asked for.
        config: of its ranks.
        world: number of them.
        refused: why it cannot run; empty where it can.
    """

    text: str
    config: RunConfig
    world: int
    refused: str = ""


def base(recipe: str | Path, overrides: Sequence[str], steps: int, precision: Precision) -> RunConfig:
    """The recipe as it is verified: all steps with the full learning rate, nothing saved or evaluated."""
    fixed = [
        f"train.steps={steps}",
        f"train.precision={precision}",
        "train.eval_every=0",
        "train.eval_batches=0",
        "optimizer.schedule=constant",
        "optimizer.warmup_steps=0",
        "optimizer.decay_steps=0",
        "checkpoint.every=0",
        "checkpoint.at_end=false",
    ]
    return load(recipe, [*_plain("parallel"), *_plain("sharding"), "cluster.nodes=1", *overrides, *fixed])


def _plain(section: str) -> list[str]:
    """Every setting of a section as in the schema: what the recipe says of its own layout is put aside."""
    defaults = getattr(RunConfig(), section).model_dump(mode="json")
    return [f"{section}.{name}={json.dumps(value)}" for name, value in defaults.items()]


def cases(
    layouts: str, recipe: str | Path, overrides: Sequence[str], steps: int, precision: Precision
) -> tuple[Case, ...]:
    """The layouts of `"tp=2;pp=2,schedule=1f1b;dp=2,sharding.stage=3"`, each checked.

    Args:
        layouts: bare names mean `parallel.*`; `dp` is the number of data-parallel ranks; any other key is dotted.
        recipe: name or file.
        overrides: settings of all layouts.
        steps: optimizer steps.
        precision: of engines that can compute in it.

    Raises:
        ConfigError: a layout that cannot be read. One that is read and refused is a `Case` with the sentence.
    """
    found = [part.strip() for part in layouts.split(";") if part.strip()]
    if not found:
        raise ConfigError("--layouts", layouts, "names no layout", 'for example "tp=2;pp=2,schedule=1f1b"')
    return tuple(_case(text, recipe, overrides, steps, precision) for text in found)


def _case(text: str, recipe: str | Path, overrides: Sequence[str], steps: int, precision: Precision) -> Case:
    dp, settings = 1, []
    for part in _settings(text):
        key, equals, value = part.partition("=")
        key = key.strip()
        if not equals or not key:
            raise ConfigError("--layouts", part.strip(), "is no KEY=VALUE", "for example tp=2 or sharding.stage=1")
        if key in ("dp", "parallel.dp"):
            dp = _count(value)
        else:
            settings.append(f"{key if '.' in key else f'parallel.{key}'}={value.strip()}")
    config = base(recipe, [*overrides, *settings], steps, precision)
    if config.engine != "none" and precision == ONLY_NONE:
        config = base(recipe, [*overrides, *settings], steps, "float32")
    world = dp * config.parallel.pp * config.parallel.cp * config.parallel.tp
    config = config.model_copy(update={"cluster": config.cluster.model_copy(update={"gpus_per_node": world})})
    try:
        validate(config, world)
    except ConfigError as error:
        return Case(text, config, world, str(error))
    return Case(text, config, world)


def _settings(text: str) -> list[str]:
    """Parts between commas that are not inside brackets: `stage_layers=[1,2],tp=2` has two."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "[{") - (letter in "]}")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part for part in parts if part.strip()]


def _count(value: str) -> int:
    try:
        count = int(value)
    except ValueError:
        count = 0
    if count < 1:
        raise ConfigError("--layouts", f"dp={value}", "must be a whole number of at least 1")
    return count
