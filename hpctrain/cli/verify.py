"""`hpctrain verify`: is this difference between layouts normal?"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING, Any

import click

from hpctrain.cli.overrides import overrides_argument
from hpctrain.cli.tables import columns, whole_lines
from hpctrain.errors import ConfigError, TrainError

if TYPE_CHECKING:
    from hpctrain.verify.cases import Case
    from hpctrain.verify.jobs import Jobs
    from hpctrain.verify.judge import Runner, Verdict

EXAMPLE = 'hpctrain verify gpt-tiny --layouts "tp=2;pp=2,schedule=1f1b;dp=2,sharding.stage=3"'


class LayoutsDiffer(TrainError):
    """A layout that differs by more than rounding, or did not run."""


@click.command(epilog=f"\b\nExample:  {EXAMPLE}")
@click.argument("recipe")
@overrides_argument()
@click.option("--layouts", required=True, help="Settings with commas between, layouts with semicolons.")
@click.option("--steps", type=click.IntRange(1, 1000), default=3, show_default=True, help="Optimizer steps.")
@click.option(
    "--dtype",
    type=click.Choice(["float64", "float32", "bf16", "fp16"]),
    default="float64",
    show_default=True,
    help="Of the layouts; DeepSpeed has no float64 and is verified in float32 then.",
)
@click.option("--slurm", is_flag=True, help="Each layout as a job, on nodes of cluster.gpus_per_node ranks.")
@click.option("--profile", metavar="NAME|FILE", help="Site profile of the jobs.  [default: cluster.profile]")
@click.option("--partition", help="Where the jobs go, over the profile.")
@click.option("--account", help="Who pays, over the profile.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def verify(
    recipe: str,
    overrides: tuple[str, ...],
    layouts: str,
    steps: int,
    dtype: Any,
    slurm: bool,
    profile: str | None,
    partition: str | None,
    account: str | None,
    as_json: bool,
) -> None:
    """Train RECIPE for a few steps under each layout, and hold it against one process in float64.

    Bare names in --layouts mean parallel.*; dp is the number of data-parallel ranks, by default 1 or what ep needs.
    What changes the result, such as model.layers, holds for that one process too.
    Compared are the loss and the gradient's norm of each step, every gradient of the first step, and every weight
    after the last, on random tokens with unequal masks. Ranks run on this machine's CPUs; with --slurm where jobs run,
    on GPUs where they are. The status is 1 if any layout differs by more than rounding explains, or does not run.
    """
    from hpctrain.verify.cases import cases
    from hpctrain.verify.judge import Judge, Local

    if profile:
        overrides = (*overrides, f"cluster.profile={profile}")
    found = cases(layouts, recipe, overrides, steps, dtype)
    engines = {case.config.engine for case in found if not case.refused}
    with ExitStack() as stack:
        local = stack.enter_context(Local(engines))
        status = stack.enter_context(_status(as_json))

        def begin(case: Any) -> None:
            if status is not None:
                status.update(f"{case.text} on {case.world} ranks")

        run: Runner = local
        if slurm:
            found, jobs = _queue(found, recipe, overrides, steps, partition, account)
            run = stack.enter_context(jobs)
        verdicts = list(Judge(local, steps).verdicts(found, run, begin))
    if as_json:
        click.echo(json.dumps([verdict.plain() for verdict in verdicts], indent=2))
    else:
        _show(verdicts)
    bad = [verdict.case.text for verdict in verdicts if not verdict.good]
    if bad:
        raise LayoutsDiffer(f"{len(bad)} of {len(verdicts)} layouts did not pass: {'; '.join(bad)}.")


def _queue(
    found: Sequence[Case],
    recipe: str,
    overrides: Sequence[str],
    steps: int,
    partition: str | None,
    account: str | None,
) -> tuple[tuple[Case, ...], Jobs]:
    """The cases as jobs."""
    from hpctrain.config.load import load
    from hpctrain.launch.slurm import client
    from hpctrain.launch.slurm.profile import site
    from hpctrain.launch.submit.sbatch import Options
    from hpctrain.verify.jobs import Jobs, spread

    if not client.has_slurm():
        raise ConfigError("--slurm", True, "there is no Slurm here: no sbatch on PATH", "leave it out")
    config = load(recipe, overrides)
    found = spread(found, config.cluster.gpus_per_node, config.folder)

    def warn(text: str) -> None:
        click.echo(f"warning: {text}", err=True)

    return found, Jobs(found, steps, site(config.cluster.profile), Options(partition, account), warn)


def _status(as_json: bool) -> Any:
    """What is under way, on a terminal."""
    import sys

    if as_json or not sys.stderr.isatty():
        return nullcontext(None)
    return whole_lines(sys.stderr).status("reference")


def _show(verdicts: Sequence[Verdict]) -> None:
    for line in columns([_row(verdict) for verdict in verdicts]):
        click.echo(line)
    for line in _notes(verdicts):
        click.echo(line)


def _row(verdict: Verdict) -> dict[str, object]:
    found, config = verdict.found, verdict.case.config
    cells: dict[str, object] = {"layout": verdict.case.text, "ranks": verdict.case.world, "engine": config.engine_name}
    cells["dtype"] = config.train.precision
    for kind in ("loss", "norm"):
        cells[kind] = f"{found[kind].worst:.1e}" if found else ""
    for kind in ("gradient", "weight"):
        cells[f"worst {kind}"] = f"{found[kind].worst:.1e} {found[kind].where}" if found else ""
    cells["verdict"] = verdict.word
    return cells


def _notes(verdicts: Sequence[Verdict]) -> Iterator[str]:
    """What was allowed and why; what was wrong."""
    yield "Differences are shares: of the loss, of the norm, of the largest value of the gradient named, of the way"
    yield "that training moved the weight named. Allowed are"
    yield from sorted({f"  {verdict.why}" for verdict in verdicts if verdict.why})
    for verdict in verdicts:
        if verdict.case.shared and verdict.found:
            yield f"{verdict.case.text}: the process it is held against has {' and '.join(verdict.case.shared)} too"
    for verdict in verdicts:
        if verdict.error:
            yield f"{verdict.case.text}: {verdict.error}"
        for found in verdict.found.values():
            if not found.good:
                yield (
                    f"{verdict.case.text}: {found.kind} differs by {found.worst:.1e} at {found.where}, "
                    f"and may by {found.limit:.1e}"
                )
