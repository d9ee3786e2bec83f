"""The command line. Commands are imported when they are used, so that help answers at once."""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple, NoReturn

import click

from hpctrain import __version__
from hpctrain.errors import HpctrainError, os_sentence

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells report it."""


class Lazy(NamedTuple):
    """A command that is not imported yet: `module:attribute`, and the line that help shows for it."""

    target: str
    help: str


COMMANDS = {
    "train": Lazy("hpctrain.cli.train:train", "Train a recipe on the ranks it asks for."),
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
    "lab": Lazy("hpctrain.cli.lab:lab", "Bring up a private Slurm on this machine, and take it down."),
    "doctor": Lazy("hpctrain.cli.doctor:doctor", "Check this machine and what is installed on it."),
}


class LazyGroup(click.Group):
    """A group whose commands are named in `COMMANDS`, and the one place where errors become exit codes."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name].target.partition(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command), command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, lazy.help) for name, lazy in COMMANDS.items()])

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


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="hpctrain")
def main() -> None:
    """Train transformers that do not fit, in memory or in time, on one GPU.

    \b
    Example:
      hpctrain data stdlib corpora/stdlib.h5
      hpctrain train gpt-tiny name=mine parallel.tp=2 train.steps=300
    """
