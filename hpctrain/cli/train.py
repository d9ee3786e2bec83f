"""`hpctrain train`."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import TYPE_CHECKING

import click

from hpctrain.cli import INTERRUPTED
from hpctrain.cli.overrides import overrides_argument

if TYPE_CHECKING:
    from pathlib import Path

    from hpctrain.config.schema import RunConfig
    from hpctrain.train.run import Summary


@click.command(epilog="Example: hpctrain train gpt-tiny name=mine sharding.stage=1 cluster.gpus_per_node=4")
@click.argument("recipe")
@overrides_argument()
def train(recipe: str, overrides: tuple[str, ...]) -> None:
    """Train RECIPE, a name from `hpctrain config list` or a YAML file.

    Alone, it starts cluster.gpus_per_node ranks on this machine. Under torchrun, srun or mpirun it is one of
    their ranks. A run lives in folder/name and is continued if it has a checkpoint there; name=OTHER begins another.
    """
    from hpctrain.config.load import load
    from hpctrain.launch.life.identity import detect

    config = load(recipe, overrides)
    identity = detect(os.environ)
    if identity is not None:
        as_rank(config.model_dump(mode="json"), identity.rank)
    else:
        on_this_machine(config)


def as_rank(settings: dict[str, object], rank: int) -> None:
    """Train as one of the ranks that a launcher has started."""
    from hpctrain.launch.rank.body import run_rank
    from hpctrain.train.run import rank_main

    summary = run_rank(rank_main, (settings, True))
    if rank == 0:
        _show(summary)


def on_this_machine(config: RunConfig) -> None:
    """Train with the ranks of one node, here, and show it."""
    from hpctrain.errors import ConfigError
    from hpctrain.launch.local.run import run_local
    from hpctrain.telemetry.console import ConsoleView, follow
    from hpctrain.telemetry.sinks import METRICS_FILE
    from hpctrain.train.preflight import check_folder, check_here, make_run_folder, preflight
    from hpctrain.train.run import rank_main

    if config.cluster.nodes > 1:
        raise ConfigError(
            "cluster.nodes", config.cluster.nodes, "this command starts ranks on one machine",
            "set cluster.nodes=1, or start it on every node with srun or torchrun",
        )  # fmt: skip
    for name in ("health", "spares"):
        if value := getattr(config.cluster, name):
            raise ConfigError(
                f"cluster.{name}", value, "this is for jobs of Slurm", "leave it out, or use hpctrain submit"
            )
    world = config.cluster.gpus_per_node
    preflight(config, world)
    check_here(config, world)
    check_folder(config)
    make_run_folder(config)
    print(f"run folder {config.run_folder}", flush=True)
    view, done, began = ConsoleView(config.train.steps, sys.stdout), threading.Event(), time.time()

    def show() -> None:
        try:
            for record in follow(config.run_folder / METRICS_FILE, done.is_set):
                if str(record.get("time", "")) >= _iso(began):
                    view.write(record)
        except BrokenPipeError:  # whoever read our output has seen enough; training goes on
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115

    viewer = threading.Thread(target=show, daemon=True)
    viewer.start()
    left: list[Summary | None] = []
    try:
        settings = config.model_dump(mode="json")
        threads = config.cluster.threads
        left = run_local(rank_main, (settings, False), world, config.run_folder, threads, when_asked=left.extend)
    except (KeyboardInterrupt, SystemExit) as asked:
        code = INTERRUPTED if isinstance(asked, KeyboardInterrupt) else asked.code
    else:
        code = None
    finally:
        done.set()
        viewer.join(5)
        view.close()
    if left and left[0] is not None:
        _show(left[0])
    else:
        print(_nothing_saved(config.run_folder))
    if code is not None:
        sys.exit(code)


def _nothing_saved(folder: Path) -> str:
    """Of a life that was ended before it could save."""
    from hpctrain.checkpoint.catalog import candidates

    newest = next(iter(candidates(folder)), None)
    start = f"goes on from {newest}" if newest else "begins anew"
    return f"stopped before a step was saved; the same command {start}"


def _iso(seconds: float) -> str:
    import datetime

    return datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc).isoformat(timespec="microseconds")


def _show(summary: Summary) -> None:
    if summary.stopped:
        print(f"stopped and saved after step {summary.steps}; the same command goes on from there")
    elif summary.steps_now == 0:
        print(f"all {summary.steps} steps were done already; more train.steps continue this run, name=OTHER begins one")
    if summary.loss is not None:
        entropy = summary.unigram_entropy
        print(f"validation loss {summary.loss:.4f} nats/token; the corpus' unigram entropy is {entropy:.4f}")
    print(f"run folder {summary.folder}")
