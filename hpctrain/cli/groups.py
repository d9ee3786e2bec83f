"""Groups of commands: what all of them do with a name that is none, and those whose commands are imported when used."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import click

from hpctrain.errors import HpctrainError


class NoCommand(HpctrainError):
    """A word where a command is wanted, which is none."""

    exit_code = 2


class Group(click.Group):
    """A group that names the command that was most likely meant."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        word = args[0]
        if not word.startswith("-") and not ctx.resilient_parsing and self.get_command(ctx, word) is None:
            raise NoCommand(self._no_command(ctx, word))
        return super().resolve_command(ctx, args)

    def _no_command(self, ctx: click.Context, word: str) -> str:
        from hpctrain.config.keys import nearest

        names = self.list_commands(ctx)
        near = nearest(word, names)
        return f"{ctx.command_path} has no command {word!r}: " + (
            f"the nearest is {near}." if near else f"choose from {', '.join(names)}."
        )


Group.group_class = Group  # of groups in it, too


class Lazy(NamedTuple):
    """A command that is not imported yet: `module:attribute`, and the line that help shows for it."""

    target: str
    help: str


class LazyGroup(Group):
    """A group whose commands are imported when they are used, so that help answers at once.

    Args:
        lazy: its commands, by name.
    """

    def __init__(self, *args: Any, lazy: Mapping[str, Lazy], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lazy = lazy

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.lazy:
            return None
        module, _, attribute = self.lazy[cmd_name].target.partition(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command), command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, lazy.help) for name, lazy in self.lazy.items()])
