"""What a fine-tuning stands on: the weights of another run's checkpoint, with new adapters or with trained ones.

Checkpoints of a run with adapters hold these alone, and say which checkpoint they belong to.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hpctrain.checkpoint.collective import Found, find
from hpctrain.config.schema import RunConfig
from hpctrain.errors import CheckpointError
from hpctrain.layout.activations import Keeps
from hpctrain.layout.fits import needed
from hpctrain.layout.layout import Layout
from hpctrain.layout.parameters import parameter_specs, saved_shapes, trained_specs
from hpctrain.layout.placement import Box, Index
from hpctrain.model.random import initial_values, row_norms
from hpctrain.parallel.comm import Axis
from hpctrain.sharding.state import WEIGHT, StateReader
from hpctrain.train.preflight import check_base, no_base, nothing_at_base, without_adapters


class NewAdapters:
    """The state at step 0 of a run over given weights: its adapters as they begin, if it has any; no moments.

    Args:
        base: has the weights.
        config: of the run.
    """

    def __init__(self, base: StateReader, config: RunConfig) -> None:
        self._base, self._seed = base, config.train.seed
        adapted = config.model.adapter is not None
        self._new = {spec.name: spec for spec in trained_specs(config.model) if adapted}

    def read(self, name: str, kind: str, start: Index, shape: Index) -> Tensor:
        """As `StateReader`."""
        if kind != WEIGHT:
            return torch.zeros(shape)
        spec, box = self._new.get(name), Box(start, (0,) * len(start), shape)
        if spec is None:
            return self._base.read(name, WEIGHT, start, shape)
        if spec.init.norms_of is None:
            return initial_values(spec, self._seed, box)
        weight = spec.init.norms_of
        return row_norms(lambda at, size: self._base.read(weight.name, WEIGHT, at, size), weight.shape[-1], box)

    def scalars(self) -> dict[str, float]:
        """As `StateReader`."""
        return {"step": 0.0}


class TrainedAdapters:
    """Adapters of one checkpoint over the weights of another.

    Args:
        own: has the adapters.
        base: has the weights.
        config: of the run.
    """

    def __init__(self, own: StateReader, base: StateReader, config: RunConfig) -> None:
        self._own, self._base = own, base
        self._names = {spec.name for spec in trained_specs(config.model)}

    def read(self, name: str, kind: str, start: Index, shape: Index) -> Tensor:
        """As `StateReader`."""
        return (self._own if name in self._names else self._base).read(name, kind, start, shape)

    def scalars(self) -> dict[str, float]:
        """As `StateReader`."""
        return self._own.scalars()


def open_base(config: RunConfig, world: Axis, adapters: Found | None = None) -> Found:
    """The checkpoint that a run stands on. Collective.

    Args:
        config: of the run.
        world: all ranks.
        adapters: a checkpoint that the run goes on from, which says what it stands on.

    Raises:
        CheckpointError: there is none, none valid, it is of another model, or not what the adapters stand on.
        ConfigError: none is named.
    """
    note: dict[str, Any] = adapters.extra.get("base", {}) if adapters is not None else {}
    there = note.get("path")
    path = Path(there) if there and Path(there).exists() else config.checkpoint.base
    if path is None:
        raise no_base(config)
    found = find(path, world)
    if found is None:
        raise nothing_at_base(path)
    check_base(config, found.path, found.extra)
    found.reader.expect(saved_shapes(without_adapters(config).model))
    if adapters is not None and note.get("identity") != found.identity:
        raise CheckpointError(
            f"{adapters.path} has adapters for {there}, and {found.path} is another checkpoint: name the one that they "
            f"were trained over with checkpoint.base=PATH."
        )
    return found


def note_of(base: Found) -> dict[str, Any]:
    """What a checkpoint of adapters says of what it stands on."""
    return {"path": str(base.path.absolute()), "identity": base.identity}


def in_numbers(config: RunConfig, layout: Layout, keeps: Keeps) -> str:
    """What is trained, and the memory that takes on a device that keeps so much."""
    adapter = config.model.adapter
    trained, held = (sum(spec.numel for spec in specs(config.model)) for specs in (trained_specs, parameter_specs))
    who = f"{adapter.kind} of rank {adapter.rank}" if adapter is not None else "this run"
    share = f"{trained / held:.3%}" if trained < held else "all"
    need = needed(config, layout, keeps).describe()
    return f"{who} trains {trained:,} of {held:,} parameters ({share}); the fullest rank needs {need}"
