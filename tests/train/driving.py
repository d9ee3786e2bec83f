"""What tests of the driver share: one life of a run on the ranks of a test."""

from __future__ import annotations

import torch
import torch.distributed as dist

from hpctrain.config.schema import RunConfig
from hpctrain.config.validate import validate
from hpctrain.launch.life.stop import StopRequest
from hpctrain.telemetry.metrics import read_records
from hpctrain.telemetry.sinks import METRICS_FILE, Sinks, open_sinks
from hpctrain.train.loop import train
from hpctrain.train.progress import resume
from hpctrain.train.session import open_session

STEPS = 6


class Cut(Sinks):
    """Sinks that end the run when a step is recorded, as a kill would; on every rank."""

    def __init__(self, inner: Sinks, step: int | None) -> None:
        self.inner, self.step = inner, step

    def write(self, record):
        self.inner.write(record)
        if record["kind"] == "train" and record["step"] == self.step:
            raise KeyboardInterrupt

    def close(self):
        self.inner.close()


def drive(config: RunConfig, world: int, until: int | None = None, poison: tuple[int, int] | None = None):
    """One life of a run on this rank. `until` ends it after that step; `poison` is (rank, first step)."""
    rank = dist.get_rank()
    validate(config, world)
    session = open_session(config, torch.device("cpu"), world)
    progress, _ = resume(session)
    config.run_folder.mkdir(parents=True, exist_ok=True)
    sinks = Cut(open_sinks(config.run_folder, progress.step, print) if rank == 0 else Sinks([], print), until)
    if poison is not None and rank == poison[0]:
        session.engine.chunks[0].norm.register_forward_hook(
            lambda module, inputs, out: out * (float("nan") if progress.step >= poison[1] else 1.0)
        )
    try:
        return train(session, progress, sinks, StopRequest()).loss
    except KeyboardInterrupt:
        return None
    finally:
        sinks.close()
        session.engine.close()


def losses(config: RunConfig) -> dict[int, float]:
    return {r["step"]: r["loss"] for r in read_records(config.run_folder / METRICS_FILE) if r["kind"] == "train"}


def evaluations(config: RunConfig) -> list[float]:
    return [r["loss"] for r in read_records(config.run_folder / METRICS_FILE) if r["kind"] == "eval"]


def engine_settings(stage: int) -> dict:
    return dict(sharding=dict(stage=stage), train=dict(precision="float32"))
