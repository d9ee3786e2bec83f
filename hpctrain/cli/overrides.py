"""Overrides on a command line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])


def overrides_argument() -> Callable[[F], F]:
    """The `key=value` arguments of a command that takes a recipe."""
    return click.argument("overrides", metavar="[KEY=VALUE]...", nargs=-1, callback=_told)


def _told(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> tuple[str, ...]:
    """Say which of several settings of one key counts."""
    last = {text.partition("=")[0].strip(): text for text in value}
    keys = [text.partition("=")[0].strip() for text in value]
    for key, text in last.items():
        if keys.count(key) > 1:
            click.echo(f"note: {key} is given {keys.count(key)} times; the last, {text}, counts", err=True)
    return value
