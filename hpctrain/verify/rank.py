"""One rank of a run that is verified: the same chunks, engine, schedule and step as in training."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hpctrain.config.schema import RunConfig
from hpctrain.config.validate import validate
from hpctrain.errors import LaunchError
from hpctrain.files import write_whole
from hpctrain.launch.life.identity import ALONE, detect
from hpctrain.launch.rank.bootstrap import process_group
from hpctrain.layout.budget import checked
from hpctrain.layout.fits import Room
from hpctrain.layout.layout import Layout
from hpctrain.layout.placement import replica_groups
from hpctrain.model.batch import Batch
from hpctrain.parallel.context import own_part
from hpctrain.parallel.mesh import build_mesh
from hpctrain.parallel.parallelize import build_chunks
from hpctrain.parallel.pipeline import Pipeline
from hpctrain.sharding.build import build_engine, takes_values
from hpctrain.sharding.engine import Engine
from hpctrain.telemetry.memory import available_memory, host_memory
from hpctrain.telemetry.meter import Meter
from hpctrain.train.loop import train_step
from hpctrain.train.schedule import learning_rate
from hpctrain.verify.samples import global_batch
from hpctrain.verify.trace import Part, Share

CPU = torch.device("cpu")

PATIENCE_S = 60.0
"""For so long an NFS client may go on believing that a file is not there (`acdirmax`)."""

POLL_S = 0.5


def run(
    settings: dict[str, Any],
    steps: int,
    device: torch.device = CPU,
    timeout_s: float | None = None,
    meter: Meter | None = None,
) -> Share:
    """Train as one rank of the default process group, or alone where there is none.

    Args:
        settings: a `RunConfig` as plain data.
        steps: optimizer steps.
        device: where this rank computes.
        timeout_s: of every process group; `cluster.timeout_s` by default.
        meter: counters of this rank; new ones by default.

    Raises:
        ConfigError: it does not fit in memory.
    """
    config = RunConfig.model_validate(settings)
    world = dist.get_world_size() if dist.is_initialized() else 1
    layout = Layout.of(config.parallel, world)
    sharing = 1 if device.type == "cuda" else config.cluster.gpus_per_node
    host = host_memory().bytes // config.cluster.gpus_per_node if device.type == "cuda" else None
    config = checked(config, layout, Room(available_memory(device).bytes // sharing, host), validate).config
    mesh = build_mesh(
        layout, device, replica_groups(config.model, layout), timeout_s or config.cluster.timeout_s, meter
    )
    chunks, records = build_chunks(config, mesh, materialize=takes_values(config))
    engine = build_engine(chunks, records, mesh, config)
    pipeline, share = Pipeline(engine, mesh, config), Share()
    for step in range(steps):
        mesh.meter.step = step + 1
        samples = samples_of(global_batch(config, step), mesh.dp.index, mesh.dp.size)
        batch = own_part(samples, config, mesh).to(device)
        lr = learning_rate(config.optimizer, config.train, step)
        loss, result = train_step(config, pipeline, engine, batch, lr)
        share.losses.append(loss.mean)
        share.norms.append(result.grad_norm)
        share.skipped += [step + 1] if result.skipped else []
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
    cluster, home = config.cluster, config.run_folder
    with process_group(identity, home, cluster.device, cluster.timeout_s, cluster.threads, cluster.silence_s) as world:
        share = run(settings, steps, world.device, world.group_timeout_s, world.meter)
    write_whole(share_file(Path(folder), identity.rank), pickle.dumps(share))


def share_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.share"


def read_shares(folder: Path, world: int, patience_s: float = PATIENCE_S) -> Sequence[Share]:
    """What the ranks of a job left; waits for what a shared file system does not show yet.

    Raises:
        LaunchError: a rank left nothing, or nothing that can be read.
    """
    deadline = time.monotonic() + patience_s
    return [_read_share(share_file(folder, rank), rank, deadline) for rank in range(world)]


def _read_share(path: Path, rank: int, deadline: float) -> Share:
    while True:
        try:
            share: Share = pickle.loads(path.read_bytes())
            return share
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            if time.monotonic() >= deadline:
                raise LaunchError(
                    f"the job has ended, but what rank {rank} computed cannot be read from {path} "
                    f"({type(error).__name__}): the folder must be shared by this machine and all nodes."
                ) from None
            time.sleep(POLL_S)


def samples_of(batch: Batch, index: int, size: int) -> Batch:
    """A data-parallel rank's samples of a global batch."""
    count = len(batch.samples) // size
    rows = slice(index * count, (index + 1) * count)
    documents = None if batch.documents is None else batch.documents[rows]
    return Batch(batch.tokens[rows], batch.labels[rows], documents, batch.samples[rows])


def _parts(engine: Engine, kind: str) -> list[Part]:
    return [(piece.name, piece.start, piece.fetch().clone()) for piece in engine.pieces() if piece.kind == kind]
