"""`hpctrain memory RECIPE`: what a rank holds in each phase of a step, before anything runs, or beside what it held."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpctrain.cli.outputs import picture_file
from hpctrain.cli.overrides import overrides_argument
from hpctrain.cli.tables import columns
from hpctrain.errors import ConfigError
from hpctrain.files import write_picture

if TYPE_CHECKING:
    from hpctrain.config.schema import RunConfig
    from hpctrain.layout.phases import OfRank


@click.command(epilog="\b\nExample:  hpctrain memory llama-8b sharding.stage=3 cluster.gpus_per_node=8")
@click.argument("recipe")
@overrides_argument()
@click.option("--rank", type=click.IntRange(0), help="Of which rank.  [default: one that needs the most]")
@click.option("--measure", is_flag=True, help="Run some steps on ranks of this machine's CPUs, and show both.")
@click.option("--picture", type=picture_file("--picture"), help="Draw the parts of each phase.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, in bytes.")
def memory(
    recipe: str,
    overrides: tuple[str, ...],
    rank: int | None,
    measure: bool,
    picture: Path | None,
    as_json: bool,
) -> None:
    """Show the memory that a rank of RECIPE needs in each phase of a step, by what it is for.

    Phases are the start of a step, the fullest moments of its forwards and its backwards, and the optimizer's update.
    With --measure a step of random tokens is run, over gloo, and the bytes of all tensors alive are counted.
    """
    from hpctrain.config.load import load
    from hpctrain.config.validate import validate
    from hpctrain.layout.activations import ON_CPU, OURS
    from hpctrain.layout.budget import within_budget
    from hpctrain.layout.fits import needed
    from hpctrain.layout.layout import Layout
    from hpctrain.layout.phases import fullest, phases

    config = load(recipe, overrides)
    world = config.cluster.nodes * config.cluster.gpus_per_node
    validate(config, world)
    if rank is not None and rank >= world:
        raise ConfigError("--rank", rank, f"there are ranks 0 to {world - 1}", f"use {world - 1} or less")
    layout = Layout.of(config.parallel, world)
    keeps = ON_CPU if measure or config.cluster.device == "cpu" else OURS
    config, chosen = within_budget(config, layout, keeps)
    said = fullest(config, layout, keeps) if rank is None else phases(config, layout, rank, keeps)
    found = _measure(config, world)[said.rank] if measure else {}
    if picture is not None:
        draw(said, found, picture)
    if as_json:
        plain = {"rank": said.rank, "peak": said.peak, "phases": {n: p.plain() for n, p in said.at.items()}}
        more = {"measured": found} if measure else {}
        settled = {"train": config.train.settled()} if chosen else {}
        click.echo(json.dumps({**plain, **more, **settled}, indent=2))
    else:
        if chosen:
            click.echo(chosen)
        for line in lines(said, found):
            click.echo(line)
        if (building := needed(config, layout, keeps).building) > said.peak and rank is None:
            click.echo(f"while its engine is built {_gib(building)} GiB, which a run is held against")


def _measure(config: RunConfig, world: int) -> Sequence[Mapping[str, int]]:
    """Of each rank, the most bytes of each phase.

    Raises:
        ConfigError: the ranks would not fit on this machine.
    """
    from hpctrain.config.validate import validate
    from hpctrain.layout.fits import check_memory
    from hpctrain.layout.layout import Layout
    from hpctrain.train.preflight import room_here
    from hpctrain.verify.judge import Local

    here = config.model_copy(update={"cluster": config.cluster.model_copy(update={"device": "cpu"})})
    check_memory(here, Layout.of(here.parallel, world), room_here(here, world), validate)
    with Local({config.engine}) as local:
        return local.memory(config, world)


def lines(said: OfRank, found: Mapping[str, int]) -> list[str]:
    """The table, and what it says.

    Args:
        said: of the model.
        found: by phase, bytes that were measured; empty where nothing was.
    """
    from hpctrain.layout.phases import PARTS
    from hpctrain.layout.units import GIB

    rows: list[dict[str, object]] = []
    for name, parts in said.at.items():
        row: dict[str, object] = {"phase": name, **{part: _gib(getattr(parts, part)) for part in PARTS}}
        row["all"] = _gib(parts.device)
        if found:
            row["measured"], row["off by"] = _gib(found[name]), f"{parts.device / found[name] - 1:+.1%}"
        rows.append(row)
    start = said.at["start"]
    out = [f"rank {said.rank}, GiB", *columns(rows), f"at most {said.peak / GIB:.4g} GiB"]
    if start.host:
        out.append(
            f"in host memory {start.host / GIB:.4g} GiB, of it page-locked beside a GPU {start.pinned / GIB:.4g}"
        )
    if start.disk:
        out.append(f"on its disk {start.disk / GIB:.4g} GiB")
    if found:
        most = max(found.values())
        out.append(f"measured at most {most / GIB:.4g} GiB; predicted {said.peak / most - 1:+.1%}")
    return out


def _gib(size: int) -> str:
    from hpctrain.layout.units import GIB

    return f"{size / GIB:.4g}" if size >= 1e-4 * GIB else f"{size / GIB:.1e}" if size else "0"


def draw(said: OfRank, found: Mapping[str, int], path: Path) -> None:
    """Stacked bars, one a phase; what was measured as a line across."""
    from matplotlib.figure import Figure

    from hpctrain.layout.phases import PARTS
    from hpctrain.layout.units import GIB

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes, names = figure.add_subplot(), list(said.at)
    below = [0.0] * len(names)
    for number, part in enumerate(PARTS):
        sizes = [getattr(said.at[name], part) / GIB for name in names]
        axes.bar(names, sizes, bottom=below, label=part, color=f"C{number}")
        below = [a + b for a, b in zip(below, sizes)]
    for at, name in enumerate(names if found else ()):
        label = "measured" if at == 0 else "_"  # in the legend once
        axes.hlines(found[name] / GIB, at - 0.45, at + 0.45, color="black", linestyle="--", label=label)
    axes.set(ylabel="GiB", title=f"rank {said.rank}")
    axes.legend(fontsize=8)
    write_picture(path, figure, dpi=100)
