"""From what was asked for to the configurations of a job: paths that hold anywhere, and the elements of a sweep."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Sequence
from pathlib import Path

from hpctrain.config.load import load
from hpctrain.config.schema import RunConfig
from hpctrain.errors import ConfigError

MAX_ELEMENTS = 1000
"""Of a job array; Slurm's MaxArraySize is 1001 where nobody changed it."""


def anchored(config: RunConfig) -> RunConfig:
    """The same run with absolute paths: a job does not work in the folder that it was submitted from."""
    others = {
        key: _absolute(path) if (path := getattr(config.checkpoint, key)) else None for key in ("continue_from", "base")
    }
    blend = tuple(_absolute(path) for path in config.data.blend) if config.data.blend else config.data.blend
    data = config.data.model_copy(update={"corpus": _absolute(config.data.corpus), "blend": blend})
    checkpoint = config.checkpoint.model_copy(update=others)
    return config.model_copy(update={"folder": _absolute(config.folder), "data": data, "checkpoint": checkpoint})


def sweep(recipe: str, overrides: Sequence[str], axes: Sequence[str]) -> tuple[RunConfig, ...]:
    """The elements of a job array: one for each value of `KEY=v1,v2`; of more such axes, one for each combination.

    Element runs lie in the run folder of the plain configuration, each under the name of its values.

    Raises:
        ConfigError: an axis is not of that form, values do not fit their key, elements are alike or need other nodes.
    """
    whole = anchored(load(recipe, overrides))
    choices = [_axis(text) for text in axes]
    combinations = list(itertools.product(*choices))
    if len(combinations) > MAX_ELEMENTS:
        raise ConfigError("--array", len(combinations), f"a job array has at most {MAX_ELEMENTS} elements")
    found: dict[str, RunConfig] = {}
    for chosen in combinations:
        config = anchored(load(recipe, [*overrides, *(f"{key}={value}" for key, value in chosen)]))
        name = "_".join(f"{key.rpartition('.')[2]}-{_plain(value)}" for key, value in chosen)
        if name in found:
            raise ConfigError("--array", name, "two elements would have this run folder", "give each value once")
        found[name] = config.model_copy(update={"folder": whole.run_folder, "name": name})
    _same_size(list(found.values()))
    return tuple(found.values())


def _axis(text: str) -> list[tuple[str, str]]:
    key, equals, values = text.partition("=")
    listed = [value.strip() for value in values.split(",")]
    if not equals or not all(listed):
        raise ConfigError("--array", text, "must be written KEY=v1,v2", "for example optimizer.lr=1e-3,3e-4")
    if key in ("name", "folder"):
        raise ConfigError("--array", text, f"{key} is made from the values", "sweep over a setting")
    return [(key, value) for value in listed]


def _same_size(configs: Sequence[RunConfig]) -> None:
    for key in ("nodes", "gpus_per_node", "profile"):
        sizes = {getattr(config.cluster, key) for config in configs}
        if len(sizes) > 1:
            values = ", ".join(sorted(map(str, sizes)))
            raise ConfigError(f"cluster.{key}", values, "elements of one job array have it alike", "submit them apart")


def _plain(value: str) -> str:
    """A value as part of a file name."""
    return re.sub(r"[^A-Za-z0-9.+-]+", "-", value).replace("+", "").strip("-.") or "x"


def _absolute(path: Path) -> Path:
    return Path(os.path.abspath(path.expanduser()))
