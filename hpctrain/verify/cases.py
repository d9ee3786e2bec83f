"""What is to be verified: a recipe under several layouts, from the words of a command line. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.config.load import load
from hpctrain.config.schema import Precision, RunConfig
from hpctrain.config.validate import validate
from hpctrain.errors import ConfigError, TrainError

FIXED = {
    "train.precision": "--dtype says it",
    "train.steps": "--steps says it",
    "train.eval_every": "nothing is evaluated",
    "train.eval_batches": "nothing is evaluated",
    "optimizer.schedule": "every step has the full learning rate",
    "optimizer.warmup_steps": "every step has the full learning rate",
    "optimizer.decay_steps": "every step has the full learning rate",
    "checkpoint.every": "nothing is saved",
    "checkpoint.at_end": "nothing is saved",
}
"""What verify sets itself, and why a setting of it would be without effect."""

COUNTED = dict.fromkeys(("cluster.nodes", "cluster.gpus_per_node"), "dp=N says how many ranks a layout has")
"""What a layout cannot set beside."""

OWN = (
    "parallel.",
    "sharding.",
    "cluster.",
    "train.micro_batch",
    "train.recompute",
    "train.activation_budget",
    "train.overlap",
    "train.loss_scale",
)
"""Beginnings of keys that say how something is computed; others say what, and hold for the reference too."""

NOT_DEEPSPEED = "float64"
"""The precision that DeepSpeed does not compute in; under it layouts are verified in float32 instead."""


class CannotJudge(TrainError):
    """One process in a precision is so far from float64 that nothing can be held against it."""


@dataclass(frozen=True)
class Case:
    """One layout of a recipe.

    Attributes:
        text: as it was asked for.
        config: of its ranks.
        world: number of them.
        refused: why it cannot run; empty where it can.
        shared: settings of it that the process it is held against has too, because they change what is computed.
    """

    text: str
    config: RunConfig
    world: int
    refused: str = ""
    shared: tuple[str, ...] = ()


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
        layouts: bare names mean `parallel.*`; `dp` is the number of data-parallel ranks, by default the fewest that
            experts can be spread over as asked; any other key is dotted.
        recipe: name or file.
        overrides: settings of all layouts.
        steps: optimizer steps.
        precision: of engines that can compute in it.

    Raises:
        ConfigError: a layout that cannot be read. One that is read and refused is a `Case` with the sentence.
    """
    for override in overrides:
        _check_free(override.partition("=")[0].strip(), override, FIXED)
    found = [part.strip() for part in layouts.split(";")]
    found = found[: -1 if len(found) > 1 and not found[-1] else None]
    if not any(found):
        raise ConfigError("--layouts", layouts, "names no layout", 'for example "tp=2;pp=2,schedule=1f1b"')
    if not all(found):
        raise ConfigError(
            "--layouts", layouts, "has nothing between two semicolons", "name a layout there, or take one out"
        )
    return tuple(_case(text, recipe, overrides, steps, precision) for text in found)


def _check_free(key: str, text: str, fixed: Mapping[str, str]) -> None:
    """Refuse a setting that would have no effect."""
    if key in fixed:
        raise ConfigError("verify", text, f"has no effect here: {fixed[key]}", "leave it out")


def _case(text: str, recipe: str | Path, overrides: Sequence[str], steps: int, precision: Precision) -> Case:
    dp: int | None = None
    settings: dict[str, str] = {}
    for part in _settings(text):
        if not part.strip():
            raise ConfigError(
                "--layouts", text, "has nothing beside a comma", "name a setting there, or take the comma out"
            )
        key, equals, value = part.partition("=")
        key = key.strip()
        if not equals or not key:
            raise ConfigError("--layouts", part.strip(), "is no KEY=VALUE", "for example tp=2 or sharding.stage=1")
        key = key if "." in key else f"parallel.{key}"
        if key in settings:
            raise ConfigError("--layouts", text, f"sets {key} twice", "semicolons separate layouts")
        _check_free(key, part.strip(), {**FIXED, **COUNTED})
        settings[key] = f"{key}={value.strip()}"
        if key == "parallel.dp":
            dp = _count(value)
    given = [*overrides, *(setting for key, setting in settings.items() if key != "parallel.dp")]
    config = base(recipe, given, steps, precision)
    if config.engine == "deepspeed" and precision == NOT_DEEPSPEED:
        config = base(recipe, given, steps, "float32")
    shared = tuple(setting for key, setting in settings.items() if not key.startswith(OWN))
    parallel = config.parallel
    inner, spread = parallel.cp * parallel.tp, parallel.ep * parallel.etp
    world = (dp or spread // math.gcd(spread, inner)) * parallel.pp * inner
    config = config.model_copy(update={"cluster": config.cluster.model_copy(update={"gpus_per_node": world})})
    try:
        if parallel.cp == 1 and "parallel.cp_method" in settings:
            allowed = "has no effect with parallel.cp=1"
            raise ConfigError("parallel.cp_method", parallel.cp_method, allowed, "leave it out, or add cp=2")
        validate(config, world)
    except ConfigError as error:
        return Case(text, config, world, str(error), shared)
    return Case(text, config, world, shared=shared)


def _settings(text: str) -> list[str]:
    """Parts between commas that are not inside brackets: `stage_layers=[1,2],tp=2` has two."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "[{") - (letter in "]}")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def _count(value: str) -> int:
    try:
        count = int(value)
    except ValueError:
        count = 0
    if count < 1:
        raise ConfigError("--layouts", f"dp={value}", "must be a whole number of at least 1")
    return count
