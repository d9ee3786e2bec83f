"""What one rank does from the first line to the last."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.checkpoint.lock import hold
from hpctrain.config.load import dump
from hpctrain.config.schema import RunConfig
from hpctrain.config.validate import validate
from hpctrain.data.tokenizer import TOKENIZER_FILE
from hpctrain.launch.life.identity import ALONE, Identity, detect, slurm_job
from hpctrain.launch.life.limit import TimeLimit
from hpctrain.launch.life.lives import Life, begin, excused, knock
from hpctrain.launch.life.stop import StopRequest
from hpctrain.launch.life.succession import WAIT_S, Tenancy
from hpctrain.launch.rank.bootstrap import process_group
from hpctrain.layout.activations import ON_CPU, OURS
from hpctrain.telemetry.console import ConsoleView
from hpctrain.telemetry.environment import write_environment
from hpctrain.telemetry.metrics import event
from hpctrain.telemetry.report import loss_curve
from hpctrain.telemetry.sinks import METRICS_FILE, Sinks, open_sinks

if TYPE_CHECKING:
    from hpctrain.data.dataset import Dataset


@dataclass(frozen=True)
class Summary:
    """How a run ended.

    Attributes:
        folder: of the run.
        steps: done in all.
        steps_now: of them, done in this life.
        stopped: it was asked to stop before its last step, and has saved.
        loss: of validation, nats a token, if there was one.
        unigram_entropy: of the corpus, to compare it with.
        outlived: it stopped because a later life of its job had begun; known on the first rank.
    """

    folder: Path
    steps: int
    steps_now: int
    loss: float | None
    unigram_entropy: float
    stopped: bool = False
    outlived: bool = False


def rank_main(settings: dict[str, Any], console: bool) -> Summary:
    """Train as one rank of a job.

    Args:
        settings: the resolved configuration, as plain data.
        console: whether rank 0 shows progress itself; otherwise somebody follows its metrics.
    """
    identity = detect(os.environ) or ALONE
    config = on_these_ranks(RunConfig.model_validate(settings), identity)
    validate(config, identity.world)
    cluster = config.cluster
    folder = config.run_folder
    restarts = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    tenancy = Tenancy(folder, identity.key, restarts)
    stop = _stop_request(tenancy, identity)
    if identity.rank == 0:
        knock(folder, identity.key, restarts)
    with (
        excused(folder, identity.key, stop) if stop.limit is not None else nullcontext(),
        process_group(identity, folder, cluster.device, cluster.timeout_s, cluster.threads, cluster.silence_s) as world,
        ExitStack() as held,
        stop.listening(),
    ):
        from hpctrain.parallel.agree import everywhere
        from hpctrain.parallel.comm import Axis, broadcast_object
        from hpctrain.train.base import in_numbers
        from hpctrain.train.finished import finished
        from hpctrain.train.loop import train
        from hpctrain.train.progress import differences, engine_in_words, in_words, offload_in_words, resume
        from hpctrain.train.session import open_session

        first = identity.rank == 0
        everyone = Axis("world", tuple(range(identity.world)), identity.rank, None, world.meter)
        if done := broadcast_object(finished(config) if first else None, everyone):
            last = done.last
            return Summary(
                folder, done.steps, 0, last.loss if last else None, last.unigram_entropy or 0.0 if last else 0.0
            )
        session = open_session(
            config, world.device, identity.world, identity.local_world, world.meter, world.group_timeout_s
        )
        config = session.config
        # Meanwhile the other ranks wait for the first one, and no longer than for anything else.
        wait_s = min(WAIT_S, cluster.timeout_s / 2) if slurm_job(os.environ) else 0.0
        lock = tenancy.held(wait_s, hold)
        everywhere(lambda: held.enter_context(lock) if first else None, session.mesh.world)
        session.may_save = tenancy.check if first else session.may_save
        progress, found = resume(session)
        everywhere(lambda: _keep_tokenizer(session.data, folder) if first else None, session.mesh.world)
        before = progress.step
        sinks = everywhere(lambda: _sinks(config, before, console) if first else Sinks([], _warn), session.mesh.world)
        if found is not None:
            sinks.write(event("resume", before, in_words(found, differences(session, found))))
        if session.base is not None:
            sinks.write(event("base", before, f"weights {in_words(session.base, iter(()))}"))
            keeps = ON_CPU if world.device.type == "cpu" else OURS
            sinks.write(event("trained", before, in_numbers(config, session.mesh.layout, keeps)))
        layout = session.mesh.layout.describe()
        facts = {f"seconds_{phase}": round(seconds, 2) for phase, seconds in world.seconds.items()}
        if world.proof:
            sinks.write(event("proof", before, world.proof))
        sinks.write(
            event("start", before, f"{layout}, {engine_in_words(config)}, on {world.device.type}, in {folder}", **facts)
        )
        if session.chosen:
            sinks.write(event("recompute", before, session.chosen))
        if config.sharding.offload.state and config.engine == "deepspeed":
            sinks.write(event("offload", before, offload_in_words(session)))
        life = Life(identity.key, before)
        everywhere(lambda: begin(folder, life, restarts) if first else None, session.mesh.world)
        try:
            ending = train(session, progress, sinks, stop)
        finally:
            sinks.close()
            session.engine.close()
        entropy = session.data.entropy
        if first and not ending.stopped:  # else there may be no time for it
            _picture(folder, entropy)
    return Summary(folder, progress.step, progress.step - before, ending.loss, entropy, ending.stopped, stop.outlived)


def _keep_tokenizer(data: Dataset, folder: Path) -> None:
    """Put what gives ids their meaning beside the weights: corpora are moved and deleted."""
    if text := data.corpora[0].tokenizer_json:
        (folder / TOKENIZER_FILE).write_bytes(text)


def _stop_request(tenancy: Tenancy, identity: Identity) -> StopRequest:
    """The first rank looks after the time limit, and whether Slurm has started the job anew elsewhere."""
    if identity.rank:
        return StopRequest()
    return StopRequest(TimeLimit.of_job(os.environ), lambda: tenancy.successor() is not None)


def on_these_ranks(config: RunConfig, identity: Identity) -> RunConfig:
    """The configuration with the number of nodes and ranks that the launcher really started."""
    nodes = -(-identity.world // identity.local_world)
    facts = {"nodes": nodes, "gpus_per_node": identity.local_world}
    return config.model_copy(update={"cluster": config.cluster.model_copy(update=facts)})


def _picture(folder: Path, entropy: float) -> None:
    """A finished run does not fail because of its picture."""
    try:
        loss_curve(folder / METRICS_FILE, folder / "loss.png", entropy)
    except Exception as error:
        _warn(f"loss.png was not drawn: {error}")


def _sinks(config: RunConfig, after_step: int, console: bool) -> Sinks:
    folder = config.run_folder
    if after_step < config.train.steps:  # else nothing is done that these would describe
        (folder / "config.yaml").write_text(dump(config))
        write_environment(folder)
    view = [ConsoleView(config.train.steps, sys.stdout)] if console else []
    return open_sinks(folder, after_step, _warn, *view)


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr)
