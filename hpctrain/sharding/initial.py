"""Initial values as state to be read: each rank draws those of the parts that it keeps."""

from __future__ import annotations

import torch
from torch import Tensor

from hpctrain.config.schema import RunConfig
from hpctrain.layout.parameters import parameter_specs
from hpctrain.layout.placement import Box, Index
from hpctrain.model.random import initial_values
from hpctrain.sharding.state import WEIGHT


class InitialValues:
    """The state that a run begins with, to be read like a checkpoint. It has master weights only; of a run that begins
    with those of a checkpoint (`checkpoint.base`) zeros, in whose place they will come."""

    def __init__(self, config: RunConfig) -> None:
        self._specs = {spec.name: spec for spec in parameter_specs(config.model)}
        self._seed, self._drawn = config.train.seed, config.checkpoint.base is None

    def read(self, name: str, kind: str, start: Index, shape: Index) -> Tensor:
        assert kind == WEIGHT, kind
        if not self._drawn:
            return torch.zeros(shape)
        return initial_values(self._specs[name], self._seed, Box(start, (0,) * len(shape), shape))

    def scalars(self) -> dict[str, float]:
        return {"step": 0.0}
