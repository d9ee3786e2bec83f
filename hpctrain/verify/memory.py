"""What the ranks of a layout hold in a step, measured: beside what `layout/phases.py` says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from hpctrain.config.schema import RunConfig
from hpctrain.layout.layout import Layout
from hpctrain.layout.placement import replica_groups
from hpctrain.parallel.context import own_part
from hpctrain.parallel.mesh import build_mesh
from hpctrain.parallel.parallelize import build_chunks
from hpctrain.parallel.pipeline import Pipeline
from hpctrain.sharding.build import build_engine, takes_values
from hpctrain.sharding.engine import Engine
from hpctrain.telemetry.live import LiveBytes
from hpctrain.train.loop import train_step
from hpctrain.verify.rank import CPU, samples_of
from hpctrain.verify.samples import global_batch

STEPS = 3
"""Two in which all that lasts comes to be, and the one that is measured."""


def measured(settings: dict[str, Any], device: torch.device = CPU) -> dict[str, int]:
    """Most bytes of tensors that were alive on this rank in each phase of a step.

    Of a rank of the default process group, or alone where there is none.

    Args:
        settings: a `RunConfig` as plain data.
        device: where this rank computes.
    """
    config = RunConfig.model_validate(settings)
    assert config.train.activation_budget is None, "a budget is settled before (`layout/budget.py`)"
    world = dist.get_world_size() if dist.is_initialized() else 1
    layout = Layout.of(config.parallel, world)
    with LiveBytes() as live:
        mesh = build_mesh(layout, device, replica_groups(config.model, layout), config.cluster.timeout_s)
        chunks, records = build_chunks(config, mesh, materialize=takes_values(config))
        engine = build_engine(chunks, records, mesh, config)
        del chunks
        pipeline = Pipeline(engine, mesh, config)
        _name_phases(engine, live)
        for step in range(STEPS):
            live.peaks = {}
            batch = own_part(samples_of(global_batch(config, step), mesh.dp.index, mesh.dp.size), config, mesh)
            with live.phase("start"):
                pass
            train_step(config, pipeline, engine, batch.to(device), config.optimizer.lr)
        engine.close()
    return dict(live.peaks)


def _name_phases(engine: Engine, live: LiveBytes) -> None:
    names = {"forward": "forward", "backward": "backward", "backward_input": "backward", "step": "step"}
    for method, phase in names.items():
        setattr(engine, method, _within(live, phase, getattr(engine, method)))


def _within(live: LiveBytes, phase: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def called(*args: Any, **kwargs: Any) -> Any:
        with live.phase(phase):
            out = call(*args, **kwargs)
        if phase == "backward" and callable(out):
            return _within(live, phase, out)
        return out

    return called
