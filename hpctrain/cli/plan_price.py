"""`hpctrain plan RECIPE`, `plan explain`, `plan sweep`: layouts searched, one explained, one knob turned."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from rich.console import Console

from hpctrain.cli.outputs import make_folder, picture_file
from hpctrain.cli.overrides import overrides_argument
from hpctrain.cli.tables import columns
from hpctrain.errors import ConfigError
from hpctrain.files import write_picture

if TYPE_CHECKING:
    from hpctrain.config.schema import RunConfig
    from hpctrain.plan.links import Machine
    from hpctrain.plan.search import Plan
    from hpctrain.plan.work import Work

F = TypeVar("F", bound=Callable[..., Any])
DAY = 86400.0


def _common(function: F) -> F:
    """Options that all three have."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print JSON."),
        click.option(
            "--profile", type=click.Path(path_type=Path), help="What was measured there, before other numbers."
        ),
        click.option("--fp8", is_flag=True, help="Matrix products in fp8; the rest as the recipe says."),
        click.option("--gpus", type=click.IntRange(1), help="Devices.  [default: those of the recipe]"),
        click.option("--cluster", metavar="NAME|FILE", default="dgx-h100", show_default=True, help="Kind of cluster."),
    ):
        function = option(function)
    return function


def _start(
    recipe: str, overrides: tuple[str, ...], cluster: str, gpus: int | None, fp8: bool, profile: Path | None
) -> tuple[RunConfig, Machine, int, Work]:
    from hpctrain.config.load import load
    from hpctrain.plan.constants import constants
    from hpctrain.plan.constants import profile as measured
    from hpctrain.plan.hardware import hardware
    from hpctrain.plan.links import Machine
    from hpctrain.plan.work import Work

    config = load(recipe, overrides)
    machine = Machine(hardware(cluster), constants(), measured(profile) if profile else None)
    if machine.profile and machine.profile.cluster != machine.hardware.name:
        allowed = f"was measured on {machine.profile.cluster}"
        raise ConfigError("profile", str(profile), allowed, f"use --cluster {machine.profile.cluster}")
    devices = gpus or config.cluster.nodes * config.cluster.gpus_per_node
    per_host = machine.hardware.host.devices
    if devices > per_host and devices % per_host:
        near = devices // per_host * per_host
        allowed = f"must be whole hosts of {per_host} devices"
        raise ConfigError("gpus", devices, allowed, f"use {near} or {near + per_host}")
    work = Work.of(config, dtype="fp8" if fp8 else None)
    machine.hardware.peak(work.dtype)
    return config, machine, devices, work


@click.command(epilog="\b\nExample:  hpctrain plan llama-70b --cluster dgx-h100 --gpus 512 --top 3")
@click.argument("recipe")
@overrides_argument()
@_common
@click.option("--top", type=click.IntRange(1, 50), default=5, show_default=True, help="Layouts that are shown.")
@click.option("--offload", is_flag=True, help="Let optimizer state be kept on hosts and drives.")
@click.option("--write", type=click.Path(dir_okay=False, path_type=Path), help="Write the best as a recipe here.")
def search(
    recipe: str,
    overrides: tuple[str, ...],
    cluster: str,
    gpus: int | None,
    fp8: bool,
    profile: Path | None,
    as_json: bool,
    top: int,
    offload: bool,
    write: Path | None,
) -> None:
    """Search for the fastest layouts of RECIPE that fit: axes, micro-batch, schedule, recomputation, sharding.

    Each comes with what its step is made of and what it lacks against the best.
    """
    from hpctrain.config.load import dump
    from hpctrain.plan.held import OVERWRITTEN
    from hpctrain.plan.search import search as find

    config, machine, devices, work = _start(recipe, overrides, cluster, gpus, fp8, profile)
    if chosen := [key for key in (text.partition("=")[0] for text in overrides) if key in OVERWRITTEN]:
        click.echo(f"searched for, and not held: {', '.join(chosen)} (plan explain prices what is said)", err=True)
    if write:
        make_folder("--write", write.parent)
    with Console(stderr=True).status("searching"):
        plans = find(config, machine, devices, work, top, offload)
    if not plans:
        raise ConfigError("memory", recipe, "what seemed to fit does not", "use more devices")
    if as_json:
        click.echo(json.dumps([plain(plan, machine) for plan in plans], indent=2))
    else:
        _show_search(plans, machine, devices)
    if write:
        write.write_text(dump(plans[0].config), encoding="utf-8")
        click.echo(f"wrote {write}", err=True)


def _show_search(plans: list[Plan], machine: Machine, devices: int) -> None:
    from hpctrain.plan.search import lacks

    best = plans[0]
    model, seq = best.work.model, best.work.seq
    click.echo(
        f"{best.config.name}: {model.layers} layers of {model.hidden}, sequences of {seq}, "
        f"global batch {best.work.global_batch}, {best.work.dtype}"
    )
    click.echo(f"{devices} x {machine.hardware.gpu.name} ({machine.hardware.name})\n")
    rows = [
        {
            "layout": plan.describe(),
            "step s": f"{plan.seconds:.3f}",
            "tokens/s/GPU": f"{plan.tokens_per_second / devices:,.0f}",
            "MFU %": f"{100 * plan.mfu(machine):.1f}",
            "GiB": f"{plan.memory.training / 2**30:.1f}",
            "against the best": "" if plan is best else lacks(best, plan),
        }
        for plan in plans
    ]
    for line in columns(rows):
        click.echo(line)
    click.echo("")
    _show_parts(best, "the best")
    _show_calendar(best, machine, devices)


def _show_parts(plan: Plan, heading: str) -> None:
    total = plan.seconds
    click.echo(f"{heading}, {total:.3f} s, most of it in {plan.price.bound()}:")
    parts: dict[str, float] = {name: value for name, value in plan.price.at(0).items() if value > 5e-4 * total}
    detail = ", ".join(f"{name} {100 * float(value) / total:.1f}%" for name, value in plan.price.detail.items())
    for name, value in parts.items():
        more = f"  ({detail})" if name == "compute" else ""
        click.echo(f"  {name:<10} {value:8.3f} s  {100 * value / total:5.1f}%{more}")
    click.echo(f"memory of the fullest rank: {plan.memory.describe()}")


def _show_calendar(plan: Plan, machine: Machine, devices: int) -> None:
    from hpctrain.layout.parameters import trained_specs
    from hpctrain.plan.goodput import checkpoint_seconds, goodput

    numel = sum(spec.numel for spec in trained_specs(plan.work.model))
    stop = checkpoint_seconds(machine.hardware, numel, devices)
    left = goodput(machine.hardware, devices, stop)
    days = plan.config.train.steps * plan.seconds / DAY
    every = f"{left.mtbf / 3600:,.1f} h" if left.mtbf >= 360 else f"{left.mtbf:,.1f} s"
    often = f"{plan.config.train.steps:,} steps: {days:,.1f} days, with failures every {every}"
    if left.hopeless:
        click.echo(f"{often} it never gets there: {left.hopeless}")
        return
    share, apart = 100 * left.share, left.interval / 60
    click.echo(f"{often} {days / left.share:,.1f} (goodput {share:.1f}%, a checkpoint every {apart:,.0f} min)")


def plain(plan: Plan, machine: Machine) -> dict[str, Any]:
    """For JSON."""
    layout = plan.layout
    return {
        "layout": plan.describe(),
        "axes": {axis: getattr(layout, axis) for axis in ("pp", "dp", "cp", "tp", "ep", "etp")},
        "schedule": layout.schedule,
        "chunks": layout.chunks,
        "seconds": plan.seconds,
        "tokens_per_second": plan.tokens_per_second,
        "mfu_causal": plan.mfu(machine),
        "parts": plan.price.at(0),
        "compute": {name: float(value) for name, value in plan.price.detail.items()},
        "bound": plan.price.bound(),
        "memory_bytes": plan.memory.training,
    }


@click.command(epilog="\b\nExample:  hpctrain plan explain gpt-175b --cluster dgx-a100 train.recompute=full")
@click.argument("recipe")
@overrides_argument()
@_common
def explain(
    recipe: str,
    overrides: tuple[str, ...],
    cluster: str,
    gpus: int | None,
    fp8: bool,
    profile: Path | None,
    as_json: bool,
) -> None:
    """Price the layout that RECIPE and its settings say, and show what its step is made of."""
    from hpctrain.layout.units import in_gib
    from hpctrain.plan.search import available, priced

    config, machine, devices, work = _start(recipe, overrides, cluster, gpus, fp8, profile)
    made = priced(config, machine, devices, work)
    if as_json:
        click.echo(json.dumps(plain(made, machine), indent=2))
        return
    click.echo(f"{config.name} on {devices} x {machine.hardware.gpu.name}: {made.describe()}")
    mfu, rate = 100 * made.mfu(machine), made.tokens_per_second / devices
    click.echo(f"{made.seconds:.3f} s a step, {rate:,.0f} tokens/s a device, MFU {mfu:.1f}% (causal)\n")
    _show_parts(made, "a step")
    there = available(machine, work)
    for kind, need, have in (
        ("a device has", made.memory.total, there.device),
        ("of its host's memory a rank has", made.memory.host, there.host),
        ("of its host's drives a rank has", made.memory.disk, there.disk),
    ):
        if need > have:
            click.echo(f"does not fit: {kind} {in_gib(have)} GiB for it, and it needs {in_gib(need)}")
    for name, how in _ways(made, machine).items():
        click.echo(f"{name}: {how}")
    _show_calendar(made, machine, devices)


def _ways(plan: Plan, machine: Machine) -> dict[str, str]:
    """Which way the large collectives go."""
    layout, model = plan.layout, plan.work.model
    tokens = float(plan.points.micro_batch[0]) * plan.work.seq / layout.cp
    out = {}
    if layout.tp > 1:
        group = machine.group(layout.tp, 1)
        size = tokens * model.hidden * plan.work.width
        operation = "reduce_scatter" if layout.sp else "all_reduce"
        out["tp"] = f"{operation} of {size / 2**20:.1f} MiB by {machine.chosen(operation, size, group)}"
    if layout.dp * layout.cp > 1:
        from hpctrain.plan.step import numels

        numel = sum(numels(model).values()) if layout.pp == 1 else numels(model)["dense"]
        group = machine.group(layout.dp * layout.cp, layout.tp)
        size = numel / layout.tp * plan.work.runtime.reduce_bytes
        out["dp"] = f"all_reduce of {size / 2**20:.1f} MiB by {machine.chosen('all_reduce', size, group)}"
    return out


@click.command(epilog="\b\nExample:  hpctrain plan sweep llama-8b --over gpus=8,16,32,64 --png curve.png")
@click.argument("recipe")
@overrides_argument()
@_common
@click.option("--over", required=True, metavar="KEY=V1,V2", help="A setting, or gpus; each value is searched for.")
@click.option("--png", type=picture_file("png"), help="Draw the curve into this file.")
def sweep(
    recipe: str,
    overrides: tuple[str, ...],
    cluster: str,
    gpus: int | None,
    fp8: bool,
    profile: Path | None,
    as_json: bool,
    over: str,
    png: Path | None,
) -> None:
    """Search once for each value of a setting, and show how speed follows it.

    A setting that the search chooses itself (axes, micro-batch, recomputation, ZeRO, offload) is held at each value.
    """
    from hpctrain.plan.held import check_sweep
    from hpctrain.plan.search import best_with

    key, equals, text = over.partition("=")
    values = [value for value in text.split(",") if value]
    if not equals or not values:
        raise ConfigError("over", over, "must be written key=value,value", "for example gpus=8,16,32")
    if key != "gpus":
        check_sweep(key, gpus)
    rows: list[dict[str, Any]] = []
    with Console(stderr=True).status("searching"):
        for value in values:
            rows.append(_of_value(best_with, recipe, overrides, cluster, gpus, fp8, profile, key, value))
    if as_json:
        click.echo(json.dumps(rows, indent=2))
    else:
        for line in columns(rows):
            click.echo(line)
    if png:
        _draw(rows, key, png)


def _of_value(
    best_with: Callable[..., Plan],
    recipe: str,
    overrides: tuple[str, ...],
    cluster: str,
    gpus: int | None,
    fp8: bool,
    profile: Path | None,
    key: str,
    value: str,
) -> dict[str, Any]:
    if key == "gpus":
        if not value.isdigit() or not int(value):
            raise ConfigError("gpus", value, "must be a whole number above 0")
        config, machine, devices, work = _start(recipe, overrides, cluster, int(value), fp8, profile)
        held = {}
    else:
        config, machine, devices, work = _start(recipe, (*overrides, f"{key}={value}"), cluster, gpus, fp8, profile)
        held = {key: value}
    try:
        plan = best_with(config, machine, devices, work, tuple(held))
    except ConfigError as error:
        return {key: value, "layout": f"none: {error.allowed}", "step s": None, "tokens/s": None, "MFU %": None}
    return {
        key: value,
        "layout": plan.describe(),
        "step s": f"{plan.seconds:.3f}",
        "tokens/s": round(plan.tokens_per_second),
        "MFU %": f"{100 * plan.mfu(machine):.1f}",
    }


def _draw(rows: list[dict[str, Any]], key: str, png: Path) -> None:
    from matplotlib.figure import Figure

    found = [row for row in rows if row["tokens/s"] is not None]
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.add_subplot()
    names = [row[key] for row in found]
    numbers = all(name.replace(".", "", 1).isdigit() for name in names)
    axes.plot([float(n) for n in names] if numbers else names, [row["tokens/s"] for row in found], "o-")
    axes.set(xlabel=key, ylabel="tokens/s", ylim=(0, None))
    write_picture(png, figure)
