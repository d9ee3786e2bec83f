"""What the tests of the DeepSpeed engine share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hpctrain.config.schema import RunConfig
from hpctrain.layout.parameters import bias_specs, parameter_specs
from hpctrain.layout.placement import Index
from hpctrain.parallel.comm import gather_objects
from hpctrain.parallel.mesh import Mesh
from hpctrain.parallel.parallelize import build_model
from hpctrain.sharding.build import build_engine, takes_values
from hpctrain.sharding.engine import Engine
from hpctrain.sharding.state import KINDS, WEIGHT
from tests.training import make_config, make_mesh


def zero_config(stage: int, tp: int = 1, model: dict[str, Any] | None = None, **train: Any) -> RunConfig:
    """ZeRO of a stage (0: engine `none`) in float32: two micro-batches a rank, buckets smaller than the model, and
    parameters that no number of ranks divides."""
    return make_config(
        model={"hidden": 21, **(model or {})},
        parallel={"tp": tp},
        train={"precision": "float32", "micro_batch": 2, **train},
        sharding={"stage": stage, "bucket_mib": 0.005},
    )


def start(config: RunConfig) -> tuple[Engine, Mesh]:
    """The mesh and engine of a rank of a test's world."""
    import torch.distributed as dist

    mesh = make_mesh(config, dist.get_world_size())
    model, records = build_model(config, mesh, materialize=takes_values(config))
    return build_engine([model], records, mesh, config), mesh


class Checkpoint:
    """A checkpoint in memory: the pieces of all ranks put together, and how often each element was written."""

    def __init__(self, config: RunConfig, engine: Engine, mesh: Mesh) -> None:
        self._scalars = engine.scalars()
        mine = [(p.name, p.kind, p.start, p.fetch().numpy()) for p in engine.pieces()]
        self.tensors: dict[tuple[str, str], Tensor] = {}
        self.writes: dict[tuple[str, str], Tensor] = {}
        stored = [(spec, kind) for spec in parameter_specs(config.model) for kind in KINDS]
        stored += [(spec, WEIGHT) for spec in bias_specs(config.model)]
        for spec, kind in stored:
            self.tensors[spec.name, kind] = torch.full(spec.shape, torch.nan)
            self.writes[spec.name, kind] = torch.zeros(spec.shape, dtype=torch.int64)
        for pieces in gather_objects(mine, mesh.world):
            for name, kind, begin, values in pieces:  # type: ignore[attr-defined]
                at = tuple(slice(a, a + n) for a, n in zip(begin, values.shape))
                self.tensors[name, kind][at] = torch.from_numpy(values)
                self.writes[name, kind][at] += 1

    def read(self, name: str, kind: str, start: Index, shape: Index) -> Tensor:
        return self.tensors[name, kind][tuple(slice(a, a + n) for a, n in zip(start, shape))].contiguous()

    def scalars(self) -> dict[str, float]:
        return dict(self._scalars)
