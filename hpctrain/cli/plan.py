"""`hpctrain plan`: what a layout will cost, before anything runs."""

from __future__ import annotations

import click

from hpctrain.cli.groups import Group
from hpctrain.cli.plan_price import explain, search, sweep
from hpctrain.cli.plan_schedule import schedule


class Searching(Group):
    """A group whose first argument is a command, or else a recipe to search for."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            args = ["search", *args]
        return super().resolve_command(ctx, args)


@click.group(
    cls=Searching,
    epilog="\b\nExample:  hpctrain plan llama-70b --cluster dgx-h100 --gpus 512",
    subcommand_metavar="RECIPE|COMMAND [ARGS]...",
)
def plan() -> None:
    """See what a layout costs before anything runs.

    With the name of a recipe it searches for the best layouts, as `hpctrain plan search` does.
    """


for _command in (search, explain, sweep, schedule):
    plan.add_command(_command)
