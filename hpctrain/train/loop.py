"""The training loop."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch

from hpctrain.config.schema import RunConfig
from hpctrain.data.prefetch import Prefetch
from hpctrain.errors import TrainError
from hpctrain.launch.life.stop import StopRequest
from hpctrain.model.batch import Batch
from hpctrain.parallel.comm import all_reduce, gather_objects
from hpctrain.parallel.pipeline import Pipeline
from hpctrain.sharding.engine import Engine, StepResult
from hpctrain.telemetry.memory import peak_memory
from hpctrain.telemetry.metrics import EvalMetrics, StepMetrics, StepTime, event
from hpctrain.telemetry.sinks import Sinks
from hpctrain.train.progress import Progress, save_checkpoint
from hpctrain.train.schedule import learning_rate
from hpctrain.train.session import Session


@dataclass(frozen=True)
class Ending:
    """How the loop ended.

    Attributes:
        loss: the last validation loss, nats a token; None where nothing is kept for validation or it was stopped.
        stopped: it was asked to stop, and has saved.
    """

    loss: float | None
    stopped: bool = False


def train(session: Session, progress: Progress, sinks: Sinks, stop: StopRequest) -> Ending:
    """Run all steps that are left, save and evaluate; or save and leave at a step's end when asked to stop.

    An evaluation that was given up for that is made up for by the next life.

    Args:
        session: what this rank trains with.
        progress: where the run stands; kept up to date.
        sinks: take the records of rank 0.
        stop: a request that may come to any rank at any time.

    Raises:
        TrainError: too many non-finite steps in a row.
    """
    config, settings = session.config, session.config.train
    meter, lap = session.mesh.meter, _Lap(session)
    evaluated, saved, skipped_in_a_row = None, progress.step, 0
    if progress.evaluated < progress.step < settings.steps and _due(progress.step, settings.eval_every):
        evaluate(session, progress, sinks, stop)
        lap.restart()
    pin = (
        session.mesh.device.type == "cuda"
    )  # by the threads that read, so that the copy to the device is all that waits
    with Prefetch(
        lambda sample: session.training.batch(sample).pinned() if pin else session.training.batch(sample),
        progress.samples,
        settings.global_batch,
        config.data.prefetch,
        config.data.workers,
    ) as batches:
        while progress.step < settings.steps:
            stop.begin_step()
            meter.step = progress.step + 1
            with meter.phase("data"):
                batch = next(batches)
            lr = learning_rate(config.optimizer, settings, progress.step)
            loss, result = train_step(config, session.pipeline, session.engine, batch, lr)

            progress.step += 1
            progress.samples += settings.global_batch
            progress.tokens += session.throughput.tokens_per_step
            lap.steps += 1
            if not result.backed_off:
                skipped_in_a_row = skipped_in_a_row + 1 if result.skipped else 0
            if result.skipped:
                progress.skipped += 1
                reason = _reason(session, loss, result)
                sinks.write(event("skip", progress.step, reason))
                if skipped_in_a_row == settings.max_skipped:
                    raise TrainError(
                        f"{skipped_in_a_row} steps in a row up to step {progress.step} were not finite ({reason}): "
                        f"lower optimizer.lr, or look at the data from sample "
                        f"{progress.samples - skipped_in_a_row * settings.global_batch} on."
                    )

            if progress.step % settings.log_every == 0 or progress.step in (1, settings.steps):
                sinks.write(lap.metrics(progress, loss.mean, lr, result).record())
            if _due(progress.step, settings.eval_every):
                evaluated = evaluate(session, progress, sinks, stop)
                lap.restart()
            asked = _agreed(stop, session)
            if (asked or _due(progress.step, config.checkpoint.every)) and not skipped_in_a_row:
                saved = _save(session, progress, sinks, stop)
                lap.restart()
            if asked and not skipped_in_a_row:
                return _stopped(progress, sinks, stop)
    if progress.evaluated != progress.step:
        evaluated = None
    if skipped_in_a_row or (evaluated is not None and not math.isfinite(evaluated)):
        raise TrainError(
            f"training ended at step {progress.step} with a loss or gradient that is not finite, so its last state was "
            f"not saved: lower optimizer.lr and go on from the newest checkpoint."
        )
    if config.checkpoint.at_end and saved != progress.step:
        saved = _save(session, progress, sinks, stop)
    if evaluated is None:  # after the save: a time limit may come in it
        evaluated = evaluate(session, progress, sinks, stop)
        if evaluated is not None and not math.isfinite(evaluated):
            raise TrainError(
                f"training ended at step {progress.step} with a validation loss that is not finite: lower optimizer.lr "
                f"and go on from a checkpoint before that."
            )
        if evaluated is None and session.validation is not None:
            if saved != progress.step:
                _save(session, progress, sinks, stop)
            return _stopped(progress, sinks, stop)
    return Ending(evaluated)


def _stopped(progress: Progress, sinks: Sinks, stop: StopRequest) -> Ending:
    sinks.write(event("stop", progress.step, f"asked to by {stop.reason}"))
    return Ending(None, stopped=True)


@dataclass(frozen=True)
class StepLoss:
    """Loss of a step.

    Attributes:
        mean: over the valid tokens of the whole global batch, nats a token; the same on every rank.
        own: this rank's sum, to find out where a loss that is not finite comes from.
    """

    mean: float
    own: float


def train_step(
    config: RunConfig, pipeline: Pipeline, engine: Engine, batch: Batch, lr: float
) -> tuple[StepLoss, StepResult]:
    """One optimizer step over this rank's part of a global batch; the ranks of a pipeline have the same part."""
    mesh = pipeline.mesh
    micro_batches = [part.to(mesh.device) for part in batch.split(config.train.micro_batch)]
    valid = torch.tensor([batch.valid_tokens], dtype=torch.int64, device=mesh.device)
    valid_tokens = int(all_reduce(valid, mesh.loss).item())
    engine.begin_step(valid_tokens, len(micro_batches))
    loss_sum = pipeline.train(micro_batches)
    mean = all_reduce(loss_sum, mesh.total).item() / max(valid_tokens, 1)
    with mesh.meter.phase("optimizer"):
        result = engine.step(lr, math.isfinite(mean))
    return StepLoss(mean, loss_sum.item()), result


def evaluate(session: Session, progress: Progress, sinks: Sinks, stop: StopRequest) -> float | None:
    """Mean loss over the first `train.eval_batches` global batches of the validation part, on all ranks.

    Returns:
        None where there is none, or when asked to stop on the way.
    """
    data, settings, mesh = session.validation, session.config.train, session.mesh
    if data is None:
        return None
    began = time.perf_counter()
    totals = torch.zeros(2, dtype=torch.float64, device=mesh.device)
    rounds = min(settings.eval_batches, math.ceil(data.samples / settings.global_batch))
    with mesh.meter.phase("evaluation"):
        for i in range(rounds):
            if i and _agreed(stop, session):
                return None
            with mesh.meter.phase("data"):
                batch = data.batch(i * settings.global_batch)
            micro_batches = batch.split(settings.micro_batch)
            totals[0] += session.pipeline.evaluate([micro_batch.to(mesh.device) for micro_batch in micro_batches])
            if mesh.pp.index == mesh.pp.size - 1:
                totals[1] += sum(micro_batch.valid_tokens for micro_batch in micro_batches)
        loss_sum, tokens = all_reduce(totals, mesh.total).tolist()
    loss, seconds = loss_sum / max(tokens, 1), time.perf_counter() - began
    metrics = EvalMetrics(progress.step, loss, int(tokens), seconds, session.data.entropy)
    sinks.write(metrics.record())
    progress.evaluated = progress.step
    return float(loss)


class _Lap:
    """The stretch of steps since the last record."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.restart()

    def restart(self) -> None:
        self.steps, self.began = 0, time.perf_counter()
        self.session.mesh.meter.reset()

    def metrics(self, progress: Progress, loss: float, lr: float, result: StepResult) -> StepMetrics:
        """The record of the stretch, which ends here. Collective."""
        session = self.session
        times = StepTime.of(session.mesh.meter, time.perf_counter() - self.began, max(self.steps, 1))
        mfu = session.throughput.mfu(times.step)
        memory = peak_memory(session.mesh.device)
        highest = all_reduce(torch.tensor([memory.gib], dtype=torch.float64, device=session.mesh.device),
                             session.mesh.world, "max")  # fmt: skip
        scale = session.engine.scalars().get("loss_scale") if session.config.train.precision == "fp16" else None
        metrics = StepMetrics(
            step=progress.step,
            loss=loss,
            grad_norm=result.grad_norm,
            lr=lr,
            tps=session.throughput.tps(times.step),
            mfu_palm=mfu.palm if mfu else None,
            mfu_causal=mfu.causal if mfu else None,
            memory_gib=highest.item(),
            memory_kind=memory.kind,
            consumed_samples=progress.samples,
            consumed_tokens=progress.tokens,
            skipped_steps=progress.skipped,
            loss_scale=scale,
            engine=session.config.engine_name,
            time=times,
            moe=session.engine.routers.report(),
            data=_epochs(session, progress.samples),
        )
        self.restart()
        return metrics


def _epochs(session: Session, samples: int) -> dict[str, float]:
    """How often each corpus of a blend was read."""
    if session.data.blend is None:
        return {}
    return {f"data/epochs_{n}": round(epochs, 6) for n, epochs in enumerate(session.training.epochs(samples))}


def _agreed(stop: StopRequest, session: Session) -> bool:
    """Whether any rank is to stop, after a step or a batch of an evaluation. Collective."""
    asked = torch.tensor([float(stop.at_boundary())], device=session.mesh.device)
    return all_reduce(asked, session.mesh.world, "max").item() > 0


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _reason(session: Session, loss: StepLoss, result: StepResult) -> str:
    """Why a step was skipped. Collective."""
    if result.backed_off:
        return "the gradient overflowed and the loss scale was lowered"
    finite = gather_objects(math.isfinite(loss.own), session.mesh.world)
    ranks = [rank for rank, fine in enumerate(finite) if not fine]
    if not ranks:
        return "the loss was finite on every rank, the gradient was not"
    return f"loss not finite on rank {', '.join(map(str, ranks))}"


def _save(session: Session, progress: Progress, sinks: Sinks, stop: StopRequest) -> int:
    with session.mesh.meter.phase("checkpoint"):
        report = save_checkpoint(session, progress)
    facts = dict(bytes=report.bytes, seconds=round(report.seconds, 3))
    sinks.write(event("checkpoint", progress.step, f"saved {report.path}", **facts))
    if too_late := stop.saved(report.seconds):
        sinks.write(event("warning", progress.step, too_late))
    return progress.step
