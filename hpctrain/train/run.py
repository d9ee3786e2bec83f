"""What one rank does from the first line to the last."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.config.load import dump
from hpctrain.config.schema import RunConfig
from hpctrain.config.validate import validate
from hpctrain.launch.bootstrap import process_group
from hpctrain.launch.identity import ALONE, detect
from hpctrain.telemetry.console import ConsoleView
from hpctrain.telemetry.environment import write_environment
from hpctrain.telemetry.metrics import event
from hpctrain.telemetry.report import loss_curve
from hpctrain.telemetry.sinks import METRICS_FILE, Sinks, open_sinks


@dataclass(frozen=True)
class Summary:
    """How a run ended.

    Attributes:
        folder: of the run.
        steps: done in all.
        steps_now: of them, done in this life.
        loss: of validation, nats a token, if there was one.
        unigram_entropy: of the corpus, to compare it with.
    """

    folder: Path
    steps: int
    steps_now: int
    loss: float | None
    unigram_entropy: float


def rank_main(settings: dict[str, Any], console: bool) -> Summary:
    """Train as one rank of a job.

    Args:
        settings: the resolved configuration, as plain data.
        console: whether rank 0 shows progress itself; otherwise somebody follows its metrics.
    """
    config = RunConfig.model_validate(settings)
    identity = detect(os.environ) or ALONE
    validate(config, identity.world)
    cluster = config.cluster
    with process_group(identity, config.run_folder, cluster.device, cluster.timeout_s, cluster.threads) as world:
        from hpctrain.train.loop import train
        from hpctrain.train.progress import resume
        from hpctrain.train.session import open_session

        session = open_session(config, world.device, identity.world)
        progress, found = resume(session)
        before = progress.step
        sinks = _sinks(config, before, console) if identity.rank == 0 else Sinks([], _warn)
        if found is not None:
            refused = f"; refused {len(found.refused)} newer" if found.refused else ""
            sinks.write(event("resume", before, f"from {found.path}{refused}"))
        layout = session.mesh.layout.describe()
        facts = {f"seconds_{phase}": round(seconds, 2) for phase, seconds in world.seconds.items()}
        sinks.write(event("start", before, f"{identity.world} ranks, {layout}, on {world.device.type}", **facts))
        try:
            loss = train(session, progress, sinks)
        finally:
            sinks.close()
            session.engine.close()
        summary = Summary(config.run_folder, progress.step, progress.step - before, loss, session.corpus.header.entropy)
        if identity.rank == 0:
            loss_curve(config.run_folder / METRICS_FILE, config.run_folder / "loss.png", summary.unigram_entropy)
    return summary


def _sinks(config: RunConfig, after_step: int, console: bool) -> Sinks:
    folder = config.run_folder
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(dump(config))
    write_environment(folder)
    view = [ConsoleView(config.train.steps, sys.stdout)] if console else []
    return open_sinks(folder, after_step, _warn, *view)


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr)
