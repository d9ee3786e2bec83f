"""Everything one rank trains with, put together once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from hpctrain.checkpoint.collective import Found
from hpctrain.checkpoint.verify import Verdict
from hpctrain.config.schema import RunConfig
from hpctrain.config.validate import validate
from hpctrain.data.batches import Batches
from hpctrain.data.dataset import Dataset, batches, open_dataset
from hpctrain.layout.budget import checked
from hpctrain.layout.context import spans
from hpctrain.layout.fits import Room
from hpctrain.layout.layout import Layout
from hpctrain.layout.placement import replica_groups
from hpctrain.parallel.agree import everywhere
from hpctrain.parallel.comm import gather_objects
from hpctrain.parallel.mesh import Mesh, build_mesh
from hpctrain.parallel.parallelize import build_chunks
from hpctrain.parallel.pipeline import Pipeline
from hpctrain.sharding.build import build_engine, takes_values
from hpctrain.sharding.engine import Engine
from hpctrain.telemetry.flops import Throughput, flops_per_token, peak_flops
from hpctrain.telemetry.memory import UNLIMITED, available_memory, host_memory
from hpctrain.telemetry.meter import Meter
from hpctrain.train.preflight import disk_here


@dataclass
class Session:
    """One rank's parts of a run.

    Attributes:
        config: of the run, its recomputation settled.
        mesh: this rank's view of all ranks.
        engine: model, optimizer and their state.
        pipeline: runs micro-batches through the engine's chunks.
        training: this rank's samples, or its part of them, by global sample count.
        validation: the same of the part kept for it; None where there is none.
        data: what both read.
        throughput: turns step times into rates.
        chosen: what a budget of activations has settled, in words; empty where there is none.
        refused: checkpoints that were stepped over when the run began.
        base: what a fine-tuning stands on.
        may_save: raises where the run folder is no longer this run's; asked before every save.
    """

    config: RunConfig
    mesh: Mesh
    engine: Engine
    pipeline: Pipeline
    training: Batches
    validation: Batches | None
    data: Dataset
    throughput: Throughput
    chosen: str = ""
    refused: tuple[Verdict, ...] = ()
    base: Found | None = None
    may_save: Callable[[], None] = lambda: None


def open_session(
    config: RunConfig,
    device: torch.device,
    world: int,
    sharing: int = 1,
    meter: Meter | None = None,
    timeout_s: float = 600.0,
) -> Session:
    """Put a rank's parts together. Collective: every rank of the job calls it alike.

    Args:
        config: validated for `world` ranks.
        device: where this rank computes.
        world: number of ranks.
        sharing: ranks on this host, which share its memory.
        meter: counters of this rank; new ones by default.
        timeout_s: of every process group.

    Raises:
        DataError: the corpus is not there, damaged, too small or of another vocabulary.
        ConfigError: the run does not fit in memory, or in the budget of its activations.
    """
    layout = Layout.of(config.parallel, world)
    mesh = build_mesh(layout, device, replica_groups(config.model, layout), timeout_s, meter)
    data = everywhere(lambda: open_dataset(config, cached=True), mesh.world)
    config, chosen = checked(config, layout, _room_of_a_rank(config, mesh, sharing), validate)

    def read(training: bool) -> Batches:
        kept = spans(config.parallel.cp_method, config.data.seq, mesh.cp.size, mesh.cp.index)
        return batches(config, data, training, mesh.dp.index, mesh.dp.size, kept)

    chunks, records = build_chunks(config, mesh, materialize=takes_values(config))
    engine = build_engine(chunks, records, mesh, config)
    return Session(
        config=config,
        mesh=mesh,
        engine=engine,
        pipeline=Pipeline(engine, mesh, config),
        training=read(True),
        validation=read(False) if data.validation else None,
        data=data,
        throughput=_throughput(config, mesh),
        chosen=chosen,
    )


def _room_of_a_rank(config: RunConfig, mesh: Mesh, sharing: int) -> Room:
    """What the rank with the least may use: of its device, and of its share of the host's memory and disk."""
    apart, host = mesh.device.type == "cuda", host_memory().bytes // sharing
    device = available_memory(mesh.device).bytes if apart else host
    disk = everywhere(lambda: disk_here(config, sharing), mesh.world)
    free = UNLIMITED if disk is None else disk
    least = [min(of_all) for of_all in zip(*gather_objects((device, host, free), mesh.world))]
    return Room(least[0], least[1] if apart else None, least[2])


def _throughput(config: RunConfig, mesh: Mesh) -> Throughput:
    name = torch.cuda.get_device_name(mesh.device) if mesh.device.type == "cuda" else "cpu"
    return Throughput(
        tokens_per_step=config.train.global_batch * config.data.seq,
        devices=mesh.world.size,
        flops=flops_per_token(config.model, config.data.seq),
        peak=peak_flops(name, config.train.precision),
    )
