"""`hpctrain config`: recipes, resolved configurations, and the meaning of every key."""

from __future__ import annotations

import json

import click

from hpctrain.cli.groups import Group
from hpctrain.cli.overrides import overrides_argument
from hpctrain.config.keys import as_written, keys
from hpctrain.config.load import description, dump, load, recipes
from hpctrain.config.schema import RunConfig
from hpctrain.config.validate import validate
from hpctrain.errors import ConfigError
from hpctrain.layout.parameters import active, parameter_specs

JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group(cls=Group)
def config() -> None:
    """Show recipes, and what every setting means."""


@config.command(epilog="\b\nExample:  hpctrain config show gpt-tiny parallel.tp=1")
@click.argument("recipe")
@overrides_argument()
@JSON
def show(recipe: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """Print the whole configuration that RECIPE and overrides stand for.

    RECIPE is a name from `hpctrain config list` or a YAML file; what this prints is such a file.
    """
    resolved = load(recipe, overrides)
    click.echo(resolved.model_dump_json(indent=2) if as_json else dump(resolved).rstrip())


@config.command("list", epilog="\b\nExample:  hpctrain config list")
@JSON
def list_(as_json: bool) -> None:
    """List the recipes of the package: name, parameters, what it is."""
    rows = sorted((*_sizes(name), name, description(name), _lacks(name)) for name in recipes())
    if as_json:
        names = ("parameters", "active", "name", "description", "lacks")
        click.echo(json.dumps([dict(zip(names, row)) for row in rows], indent=2))
        return
    width = max(len(name) for _, _, name, _, _ in rows)
    for parameters, _, name, about, lacks in rows:
        note = f" (cannot run yet: {lacks})" if lacks else ""
        click.echo(f"{name:{width}} {_short(parameters):>6}  {about}{note}")


@config.command(epilog="\b\nExample:  hpctrain config schema | grep -A1 optimizer")
@JSON
def schema(as_json: bool) -> None:
    """Print every key with its default, what it accepts and what it means; --json prints a JSON schema."""
    if as_json:
        click.echo(json.dumps(RunConfig.model_json_schema(), indent=2))
        return
    for key in keys().values():
        if key.kind == "section":
            click.echo(f"\n# {key.path}: {key.description}")
        else:
            click.echo(f"{key.path}={as_written(key.default)}")
            click.echo("    " + f"{key.allowed.removeprefix('must be ')}. {key.description}".strip())


def _sizes(name: str) -> tuple[int, int]:
    """Parameters of a recipe's model, and those that a token uses."""
    model = load(name).model
    specs = parameter_specs(model)
    return sum(spec.numel for spec in specs), sum(active(spec, model) for spec in specs)


def _lacks(name: str) -> str:
    """The setting that keeps a recipe from running in this version; empty if none does."""
    recipe = load(name)
    try:
        validate(recipe, recipe.cluster.nodes * recipe.cluster.gpus_per_node)
    except ConfigError as error:
        return error.path
    return ""


def _short(count: int) -> str:
    """Three digits of a count with k, M, B or T: 8.03B."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return str(count)
