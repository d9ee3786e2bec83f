"""`hpctrain scale`: a training on more and more nodes, run, predicted and drawn."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from hpctrain.cli.groups import Group
from hpctrain.cli.outputs import make_folder
from hpctrain.cli.overrides import overrides_argument
from hpctrain.cli.tables import columns
from hpctrain.errors import ConfigError

if TYPE_CHECKING:
    from hpctrain.plan.links import Machine
    from hpctrain.scale.report import Report
    from hpctrain.scale.study import Study

F = TypeVar("F", bound=Callable[..., Any])


@click.group(cls=Group, epilog="\b\nExample:  hpctrain scale weak gpt-tiny nodes=1,2,4")
def scale() -> None:
    """Scaling studies: run them, predict them, see what stops the curve."""


def _running(function: F) -> F:
    """Options of studies that are run."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print JSON."),
        click.option("--detach", is_flag=True, help="Return when jobs are queued; the same command collects them."),
        click.option("--time", "time_limit", metavar="TIME", help="Time limit as Slurm writes it, over the profile."),
        click.option("--qos", help="Quality of service, over the profile."),
        click.option("--account", help="Who pays, over the profile."),
        click.option("--partition", help="Where jobs go, over the profile."),
        click.option("--profile", metavar="NAME|FILE", help="Site profile.  [default: cluster.profile]"),
        click.option("--repeats", type=click.IntRange(1, 100), default=1, show_default=True, help="Runs of each size."),
        click.option(
            "--warm-up", type=click.IntRange(0), default=5, show_default=True, help="Steps that do not count."
        ),
        click.option("--steps", type=click.IntRange(2), default=30, show_default=True, help="Steps of a run."),
    ):
        function = option(function)
    return _priced(function)


def _priced(function: F) -> F:
    """Options of the prediction."""
    for option in (
        click.option(
            "--measured", type=click.Path(path_type=Path), metavar="FILE", help="What hpctrain bench measured there."
        ),
        click.option(
            "--cluster", metavar="NAME|FILE", default="dgx-h100", show_default=True, help="Hardware, for predictions."
        ),
    ):
        function = option(function)
    return function


@scale.command(epilog="\b\nExample:  hpctrain scale weak gpt-tiny nodes=1,2,4 --cluster cpu-lab --repeats 3")
@click.argument("recipe")
@overrides_argument()
@_running
def weak(recipe: str, overrides: tuple[str, ...], **given: Any) -> None:
    """Run RECIPE on each number of nodes, with the batch of the smallest for each of its share of nodes.

    As jobs of Slurm, one size after the other; without Slurm on this machine. Called again, it finishes what is
    missing, and sizes and repeats may be added.
    """
    _run("weak", recipe, overrides, **given)


@scale.command(epilog="\b\nExample:  hpctrain scale strong gpt-tiny nodes=1,2,4 train.global_batch=64")
@click.argument("recipe")
@overrides_argument()
@_running
def strong(recipe: str, overrides: tuple[str, ...], **given: Any) -> None:
    """Run RECIPE on each number of nodes, with the same batch for all.

    As jobs of Slurm, one size after the other; without Slurm on this machine. Called again, it finishes what is
    missing, and sizes and repeats may be added.
    """
    _run("strong", recipe, overrides, **given)


def _run(
    kind: Any,
    recipe: str,
    overrides: tuple[str, ...],
    cluster: str,
    measured: Path | None,
    profile: str | None,
    steps: int,
    warm_up: int,
    repeats: int,
    detach: bool,
    as_json: bool,
    **options: str | None,
) -> None:
    from hpctrain.launch.slurm import client
    from hpctrain.launch.slurm.profile import check_time
    from hpctrain.launch.submit.sbatch import Options
    from hpctrain.launch.submit.sweep import anchored
    from hpctrain.scale import jobs, study

    here, limit = not client.has_slurm(), options.pop("time_limit")
    if here:
        _refuse(detach, options, limit)
    if profile:
        overrides = (*overrides, f"cluster.profile={profile}")
    nodes, rest = study.apart(overrides)
    made = study.make(kind, recipe, rest, nodes, steps, warm_up, repeats, here)
    made = _anchored(made, anchored)
    machine = _machine(made, cluster, measured)
    jobs.check(made)
    made = study.remembered(made)
    if here:
        ranks = made.base.cluster.gpus_per_node
        word = "a rank" if ranks == 1 else f"{ranks} ranks"
        click.echo(f"there is no Slurm here (no sbatch on PATH): a node stands for {word} of this machine", err=True)
    else:
        asked = Options(time=check_time(limit) if limit else None, **options)  # type: ignore[arg-type]
        jobs.queue(made, asked, lambda text: click.echo(text, err=True))
        if detach:
            click.echo(f"queued; the same command, or hpctrain scale report {made.folder}, collects them", err=True)
            return
    click.echo(f"study {made.folder}", err=True)
    try:
        for number in jobs.run_here(made) if here else jobs.collected(made):
            _progress(made, number)
    except KeyboardInterrupt:
        goes_on = "" if here else "; its jobs go on, and hpctrain cancel ends them"
        click.echo(f"the same command finishes what is missing{goes_on}", err=True)
        raise
    finally:
        _show(_report(made, machine), as_json)


def _anchored(made: Study, anchored: Callable[..., Any]) -> Study:
    from dataclasses import replace

    return replace(made, base=anchored(made.base))


def _refuse(detach: bool, options: dict[str, str | None], limit: str | None) -> None:
    """What means nothing without Slurm."""
    given = {"--detach": detach or None, "--time": limit, **{f"--{name}": value for name, value in options.items()}}
    for flag, value in given.items():
        if value is not None:
            raise ConfigError(flag, value, "there is no Slurm here: no sbatch on PATH", "leave it out")


def _progress(made: Study, nodes: int) -> None:
    from hpctrain.scale.measure import point

    found = point(made, nodes)
    if found is not None:
        half = "" if found.rate.half is None else f" ± {found.rate.half:,.0f}"
        click.echo(f"nodes {nodes}, devices {found.devices}: {found.rate.value:,.0f}{half} tokens/s", err=True)


def _machine(made: Study, cluster: str, measured: Path | None) -> Machine:
    from hpctrain.plan.constants import constants
    from hpctrain.plan.constants import profile as of_file
    from hpctrain.plan.hardware import hardware
    from hpctrain.plan.links import Machine

    found = hardware(cluster)
    profile = of_file(measured) if measured else None
    if profile and profile.cluster != found.name:
        allowed = f"was measured on {profile.cluster}"
        raise ConfigError("measured", str(measured), allowed, f"use --cluster {profile.cluster}")
    return Machine(found.part(made.base.cluster.gpus_per_node), constants(), profile)


def _report(made: Study, machine: Machine) -> Report:
    """What is there now; measured against the peak of the hardware that was named."""
    from hpctrain.scale.measure import points
    from hpctrain.scale.predict import points as priced
    from hpctrain.scale.report import Report

    peak = machine.hardware.gpu.peak.get(made.base.train.precision)
    measured = points(made, peak.value if peak else None)
    return Report(made, measured, priced(machine, made), f"{machine.hardware.name} for predictions and MFU")


def _show(report: Report, as_json: bool, folder: Path | None = None) -> None:
    """Print a report and, where there is anything, write its files."""
    from hpctrain.scale.report import rows, table, verdict, write

    if as_json:
        click.echo(json.dumps({"rows": rows(report), "verdict": verdict(report) if report.shown else []}, indent=2))
    else:
        for line in columns(table(report)):
            click.echo(line)
        for text in verdict(report) if report.shown else []:
            click.echo(text)
    for nodes, said in report.predicted.items():
        if isinstance(said, str):
            click.echo(f"{nodes} nodes are not predicted: {said}", err=True)
    if report.shown and (folder is not None or report.measured):
        written = write(report, folder or report.study.folder)
        click.echo("wrote " + ", ".join(map(str, written)), err=True)


@scale.command(epilog="\b\nExample:  hpctrain scale predict llama-8b nodes=1,2,4,8,16 cluster.gpus_per_node=8")
@click.argument("recipe")
@overrides_argument()
@_priced
@click.option("--strong", is_flag=True, help="The same batch for all sizes.")
@click.option("--best", is_flag=True, help="The best layout at each size, in the place of the recipe's.")
@click.option("--into", type=click.Path(file_okay=False, path_type=Path), help="Write table, figure and page here.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def predict(
    recipe: str,
    overrides: tuple[str, ...],
    cluster: str,
    measured: Path | None,
    strong: bool,
    best: bool,
    into: Path | None,
    as_json: bool,
) -> None:
    """Predict the curve of RECIPE over numbers of nodes; nothing runs."""
    from hpctrain.scale import study
    from hpctrain.scale.predict import points
    from hpctrain.scale.report import Report

    nodes, rest = study.apart(overrides)
    made = study.make("strong" if strong else "weak", recipe, rest, nodes, 100, 0, 1, False, best)
    machine = _machine(made, cluster, measured)
    guesses = points(machine, made, best)
    if not any(not isinstance(guess, str) for guess in guesses.values()):
        first: Sequence[Any] = list(guesses.values())
        raise ConfigError("nodes", ",".join(map(str, nodes)), "no size can be priced", str(first[0]).rstrip("."))
    if into is not None:
        make_folder("--into", into)
    kind = "best layouts" if best else "layout of the recipe"
    _show(Report(made, (), guesses, f"predicted for {machine.hardware.name}, {kind}"), as_json, into)


@scale.command(epilog="\b\nExample:  hpctrain scale report runs/gpt-tiny-weak --cluster cpu-lab")
@click.argument("folder", type=click.Path(path_type=Path))
@_priced
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def report(folder: Path, cluster: str, measured: Path | None, as_json: bool) -> None:
    """Draw the study in FOLDER anew, from what its runs have measured so far."""
    from hpctrain.scale.study import read

    made = read(folder)
    found = _report(made, _machine(made, cluster, measured))
    if missing := found.missing():
        click.echo(f"not measured yet: {', '.join(map(str, missing))} nodes", err=True)
    _show(found, as_json, folder)
