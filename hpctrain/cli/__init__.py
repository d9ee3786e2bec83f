"""The command line. Commands are imported when they are used, so that help answers at once."""

from __future__ import annotations

from typing import Any, NoReturn

import click

from hpctrain import __version__
from hpctrain.cli.groups import Lazy, LazyGroup
from hpctrain.errors import HpctrainError, os_sentence

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells report it."""

COMMANDS = {
    "train": Lazy("hpctrain.cli.train:train", "Train a recipe on the ranks it asks for."),
    "finetune": Lazy("hpctrain.cli.finetune:finetune", "Train a recipe from the weights of a checkpoint."),
    "submit": Lazy("hpctrain.cli.submit:submit", "Train a recipe as a job of a Slurm cluster."),
    "jobs": Lazy("hpctrain.cli.jobs:jobs", "List submitted runs, and how their jobs stand."),
    "logs": Lazy("hpctrain.cli.jobs:logs", "Show a run's records, or what a rank printed."),
    "cancel": Lazy("hpctrain.cli.jobs:cancel", "End the jobs of a run."),
    "requeue": Lazy("hpctrain.cli.jobs:requeue", "Have a run's job start anew from its newest checkpoint."),
    "verify": Lazy("hpctrain.cli.verify:verify", "Hold layouts against one process: is this difference normal?"),
    "generate": Lazy("hpctrain.cli.generate:generate", "Continue a text with the weights of a checkpoint."),
    "config": Lazy("hpctrain.cli.config:config", "Show recipes, and what every setting means."),
    "data": Lazy("hpctrain.cli.data:data", "Build HDF5 corpora from text, and look at them."),
    "ckpt": Lazy("hpctrain.cli.ckpt:ckpt", "List, verify and show checkpoints."),
    "plan": Lazy("hpctrain.cli.plan:plan", "See what a layout costs before anything runs."),
    "memory": Lazy("hpctrain.cli.memory:memory", "See what a rank holds in each phase of a step."),
    "scale": Lazy("hpctrain.cli.scale:scale", "Scaling studies: run, predict, see what stops the curve."),
    "topo": Lazy("hpctrain.cli.topo:topo", "See nodes, NICs and switches, and which rank goes where."),
    "bench": Lazy("hpctrain.cli.bench:bench", "Test the fabric: collectives, pairs, who is slow, is it worse."),
    "lab": Lazy("hpctrain.cli.lab:lab", "Bring up a private Slurm on this machine, and take it down."),
    "doctor": Lazy("hpctrain.cli.doctor:doctor", "Check this machine and what is installed on it."),
}


class Main(LazyGroup):
    """The group of all commands, and the one place where errors become exit codes."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except HpctrainError as error:
            _stop(ctx, str(error), error.exit_code)
        except KeyboardInterrupt:
            _stop(ctx, "interrupted.", INTERRUPTED)
        except OSError as error:
            sentence = os_sentence(error)
            if sentence is None:
                raise
            _stop(ctx, sentence, 1)


def _stop(ctx: click.Context, sentence: str, code: int) -> NoReturn:
    click.echo(f"error: {sentence}", err=True)
    ctx.exit(code)


@click.group(cls=Main, lazy=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="hpctrain")
def main() -> None:
    """Train transformers that do not fit, in memory or in time, on one GPU.

    \b
    Example:
      hpctrain data stdlib corpora/stdlib.h5
      hpctrain train gpt-tiny name=mine parallel.tp=2 train.steps=300
    """
