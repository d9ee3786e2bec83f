"""The engine that a configuration asks for."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from hpctrain.config.schema import RunConfig
from hpctrain.layout.placement import Placement
from hpctrain.parallel.mesh import Mesh
from hpctrain.sharding.engine import Engine


def takes_values(config: RunConfig) -> bool:
    """Whether the engine takes chunks with their initial values. The others draw them themselves, each rank those
    that it keeps, so that no rank ever holds all that it computes with in master precision."""
    return config.engine == "none"


def build_engine(chunks: Sequence[nn.Module], records: dict[str, Placement], mesh: Mesh, config: RunConfig) -> Engine:
    """Make the engine of one rank from its chunks.

    Args:
        chunks: with initial values in master precision where `takes_values`; else they may be on the meta device.
        records: placements of all their parameters, by name.
        mesh: the process groups of the run.
        config: of the run.

    Raises:
        ConfigError: the engine cannot do what is asked on this machine.
    """
    if config.engine == "none":
        from hpctrain.sharding.none.engine import PlainEngine

        return PlainEngine(chunks, records, mesh, config)
    if config.engine == "deepspeed":
        from hpctrain.sharding.deepspeed.engine import DeepSpeedEngine

        return DeepSpeedEngine(chunks, records, mesh, config)
    from hpctrain.sharding.fsdp.engine import FsdpEngine

    return FsdpEngine(chunks, records, mesh, config)
