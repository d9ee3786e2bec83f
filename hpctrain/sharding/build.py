"""The engine that a configuration asks for."""

from __future__ import annotations

from torch import nn

from hpctrain.config.schema import RunConfig
from hpctrain.errors import ConfigError
from hpctrain.layout.placement import Placement
from hpctrain.parallel.mesh import Mesh
from hpctrain.sharding.engine import Engine


def build_engine(chunks: list[nn.Module], records: dict[str, Placement], mesh: Mesh, config: RunConfig) -> Engine:
    """Make the engine of one rank from its chunks, which hold initial values in master precision."""
    if config.engine == "none":
        from hpctrain.sharding.none.engine import PlainEngine

        return PlainEngine(chunks, records, mesh, config)
    if config.engine == "deepspeed":
        from hpctrain.sharding.deepspeed.engine import DeepSpeedEngine

        return DeepSpeedEngine(chunks, records, mesh, config)
    raise ConfigError("sharding.engine", config.engine, "this version has auto, none and deepspeed")
