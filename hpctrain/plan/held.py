"""Settings that a search can be made for value by value: those it chooses and holds, and those it starts from."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np

from hpctrain.config.keys import keys
from hpctrain.config.schema import OF_FSDP, RunConfig
from hpctrain.errors import ConfigError
from hpctrain.plan.gemm import Array
from hpctrain.plan.work import NAMES, OFFLOAD, RECOMPUTE, Points

OFFLOADED = "sharding.offload.optimizer"

CHOSEN = {
    **{f"parallel.{name}": name for name in ("tp", "pp", "cp", "ep", "schedule", "chunks")},
    **{f"train.{name}": name for name in ("micro_batch", "recompute")},
    "sharding.stage": "stage",
    "sharding.reshard_after_forward": "reshard",
    OFFLOADED: "offload",
}
"""What the search chooses itself, and what it is called of layouts (`Points`)."""

OVERWRITTEN = (
    *CHOSEN,
    *("parallel.sp", "parallel.etp", "parallel.stage_layers", "sharding.engine"),
    *(f"sharding.{name}" for name in OF_FSDP),
)
"""What a search says otherwise than the configuration does."""

PLACES = {"schedule": NAMES, "recompute": RECOMPUTE, "offload": OFFLOAD}
"""Of which layouts have a place in a tuple."""

DEVICES = ("cluster.nodes", "cluster.gpus_per_node")
"""Settings that say how many devices there are."""

GIVEN = (
    *("data.seq", "data.document_mask", "train.global_batch", "train.precision", "train.overlap"),
    *("parallel.cp_method", *DEVICES),
)
"""What the search takes as the configuration has it, beside all of the model."""


def check_sweep(key: str, gpus: int | None = None) -> None:
    """Whether a price follows a setting. Keys that do not exist are left to the configuration's own sentence.

    Args:
        gpus: how many devices there are, if that was said beside the configuration.

    Raises:
        ConfigError: the search neither holds nor reads it, so that its rows would be alike.
    """
    if key in DEVICES and gpus is not None:
        raise ConfigError("over", key, "devices are those of --gpus, whatever it says", "leave --gpus out")
    if key not in keys() or key.startswith("model.") or key in CHOSEN or key in GIVEN:
        return
    allowed = "has no price in a search, so its rows would be alike: must be one of gpus, model.*, "
    raise ConfigError("over", key, allowed + ", ".join([*GIVEN, *CHOSEN]), "sweep over one of these")


def value_of(config: RunConfig, key: str) -> Any:
    """What a configuration has at a dotted key."""
    return reduce(getattr, key.split("."), config)


def layouts_with(config: RunConfig, held: tuple[str, ...]) -> Callable[[Points], Array]:
    """Of many layouts, which have these settings as the configuration has them; settings that are not chosen, all."""
    values = {CHOSEN[key]: value_of(config, key) for key in held if key in CHOSEN}

    def kept(points: Points) -> Array:
        chosen = np.ones(len(points), dtype=bool)
        for name, value in values.items():
            chosen &= getattr(points, name) == (PLACES[name].index(value) if name in PLACES else value)
        return chosen

    return kept
