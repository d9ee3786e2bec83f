"""One rank of a run that is verified: the same chunks, engine, schedule and step as in training."""

from __future__ import annotations

import os
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hpctrain.config.schema import RunConfig
from hpctrain.launch.bootstrap import process_group
from hpctrain.launch.identity import ALONE, detect
from hpctrain.layout.layout import Layout
from hpctrain.layout.memory import check_memory
from hpctrain.layout.placement import replica_groups
from hpctrain.model.batch import Batch
from hpctrain.parallel.context import own_part
from hpctrain.parallel.mesh import build_mesh
from hpctrain.parallel.parallelize import build_chunks
from hpctrain.parallel.pipeline import Pipeline
from hpctrain.sharding.build import build_engine, takes_values
from hpctrain.sharding.engine import Engine
from hpctrain.telemetry.memory import available_memory
from hpctrain.train.loop import train_step
from hpctrain.train.schedule import learning_rate
from hpctrain.verify.samples import global_batch
from hpctrain.verify.trace import Part, Share

CPU = torch.device("cpu")


def run(settings: dict[str, Any], steps: int, device: torch.device = CPU) -> Share:
    """Train as one rank of the default process group, or alone where there is none.

    Raises:
        ConfigError: it does not fit in memory.
    """
    config = RunConfig.model_validate(settings)
    world = dist.get_world_size() if dist.is_initialized() else 1
    layout = Layout.of(config.parallel, world)
    sharing = 1 if device.type == "cuda" else config.cluster.gpus_per_node
    check_memory(config, layout, available_memory(device).bytes // sharing)
    mesh = build_mesh(layout, device, replica_groups(config.model, layout))
    chunks, records = build_chunks(config, mesh, materialize=takes_values(config))
    engine = build_engine(chunks, records, mesh, config)
    pipeline, share = Pipeline(engine, mesh, config), Share()
    for step in range(steps):
        samples = _samples(global_batch(config, step), mesh.dp.index, mesh.dp.size)
        batch = own_part(samples, config, mesh).to(device)
        lr = learning_rate(config.optimizer, config.train, step)
        loss, result = train_step(config, pipeline, engine, batch, lr)
        share.losses.append(loss.mean)
        share.norms.append(result.grad_norm)
        if step == 0:
            scale = 1.0 / (1.0 - config.optimizer.beta1)
            share.gradients = [(n, start, values * scale) for n, start, values in _parts(engine, "exp_avg")]
    share.weights = _parts(engine, "weight")
    engine.close()
    return share


def run_in_job(settings: dict[str, Any], steps: int, folder: str) -> None:
    """Train as one rank of a job, and leave the share in a file of `folder`."""
    identity = detect(os.environ) or ALONE
    config = RunConfig.model_validate(settings)
    cluster = config.cluster
    with process_group(identity, config.run_folder, cluster.device, cluster.timeout_s, cluster.threads) as world:
        share = run(settings, steps, world.device)
    path = share_file(Path(folder), identity.rank)
    part = path.with_suffix(".part")
    part.write_bytes(pickle.dumps(share))
    part.replace(path)


def share_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.share"


def read_shares(folder: Path, world: int) -> Sequence[Share]:
    """What the ranks of a job left.

    Raises:
        FileNotFoundError: a rank left nothing.
    """
    return [pickle.loads(share_file(folder, rank).read_bytes()) for rank in range(world)]


def _samples(batch: Batch, index: int, size: int) -> Batch:
    """A data-parallel rank's samples of a global batch."""
    count = len(batch.samples) // size
    rows = slice(index * count, (index + 1) * count)
    documents = None if batch.documents is None else batch.documents[rows]
    return Batch(batch.tokens[rows], batch.labels[rows], documents, batch.samples[rows])


def _parts(engine: Engine, kind: str) -> list[Part]:
    return [(piece.name, piece.start, piece.fetch().clone()) for piece in engine.pieces() if piece.kind == kind]
