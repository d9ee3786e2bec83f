"""`hpctrain bench overlap` and `hpctrain bench mix`."""

from __future__ import annotations

import json
from typing import Any

import click

from hpctrain.cli.bench_collectives import spec_of
from hpctrain.cli.bench_options import backend_of, measure, place, place_options, prepare, together
from hpctrain.cli.bench_unused import of_groups, of_operations, refuse_unused
from hpctrain.cli.tables import columns

how = together(
    click.option("-n", "--iterations", type=click.IntRange(1, 10**6), default=20, show_default=True),
    click.option("-w", "--warm-up", type=click.IntRange(0, 10**6), default=3, show_default=True),
    click.option("--json", "as_json", is_flag=True, help="Print JSON."),
)


@click.command(epilog="\b\nExample:  hpctrain bench overlap --op all_reduce --sizes 1M,16M --ranks 2")
@click.option("--op", "operations", default="all_reduce", show_default=True, help="With commas between.")
@click.option("--sizes", default="1M,16M", show_default=True, help="BEGIN:END:FACTOR, or sizes with commas between.")
@click.option("--dtype", "dtypes", default="float32", show_default=True)
@click.option("--groups", default="world", show_default=True, help="As of bench collectives; one.")
@click.option("--layout", default="", metavar="tp=2,dp=4", help="Of the ranks, for groups by axis.")
@how
@place_options
def overlap(as_json: bool, **given: Any) -> None:
    """Measure a collective beside a stream of matrix products: how much each slows down, how much is hidden.

    The overlapped fraction is 1 where both take as long as the longer one alone, 0 where as long as one after the
    other.
    """
    at = place(given)
    spec = spec_of(given, at, "overlap")
    one = [
        ("groups", len(spec.groups) == 1, "one kind of groups is measured beside products"),
        ("dtypes", len(spec.dtypes) == 1, "one dtype is measured beside products"),
    ]
    refuse_unused([*one, *of_operations(spec.operations), *of_groups(spec.groups)])
    prepare(at, {})
    for folder, result in measure(spec, at, "overlap"):
        extra = result.extra
        if as_json:
            click.echo(json.dumps(result.plain()))
        else:
            click.echo(f"# {result.library}: over {extra['groups']} of {extra['ranks']} ranks; of the slowest rank")
            if extra["threads"]:
                click.echo(f"# {extra['threads']}")
            for line in columns([_overlap_row(line) for line in extra["lines"]]):
                click.echo(line)
            click.echo(f"# Result: {folder / 'result.json'}")
        _refuse_wrong({f"{line['operation']} of {line['size']} bytes": line["wrong"] for line in extra["lines"]})


def _refuse_wrong(elements: dict[str, int]) -> None:
    """Raise if results beside something else were wrong."""
    from hpctrain.comms.result import BenchError

    bad = [f"{name}: {count} elements" for name, count in elements.items() if count]
    if bad:
        raise BenchError(f"wrong results: {'; '.join(bad)}: do not train on this.")


def _overlap_row(line: dict[str, Any]) -> dict[str, object]:
    return {
        "operation": line["operation"],
        "size (B)": line["size"],
        "alone (ms)": f"{1e3 * line['first'] / line['calls']:.3f}",
        "beside (ms)": f"{1e3 * line['first_beside'] / line['calls']:.3f}",
        "slower": f"{line['slowdown']:.2f}x",
        "products": f"{line['products']} of {line['side']}",
        "products slower": f"{line['product_slowdown']:.2f}x",
        "overlapped": f"{line['fraction']:.0%}",
    }


@click.command(epilog="\b\nExample:  hpctrain bench mix gpt-tiny parallel.tp=2 --ranks 4")
@click.argument("recipe")
@click.argument("overrides", metavar="[KEY=VALUE]...", nargs=-1)
@click.option("--check", "checks", type=click.IntRange(0), default=1, show_default=True, help="Results of a line.")
@how
@place_options
def mix(recipe: str, overrides: tuple[str, ...], as_json: bool, **given: Any) -> None:
    """Measure the collectives of one training step of RECIPE: its sizes, its groups, all groups of an axis at once.

    The status is 1 if a result is wrong.
    """
    from dataclasses import replace

    from hpctrain.comms.result import check
    from hpctrain.comms.spec import Spec
    from hpctrain.config.load import load

    config = load(recipe, overrides)
    at = place(given)
    if not at.ranks:
        at = replace(at, ranks=config.cluster.gpus_per_node)
    spec = Spec(
        kind="mix",
        backend=backend_of(given["backend"], at),
        warm_up=given["warm_up"],
        iterations=given["iterations"],
        checks=given["checks"],
        timeout_s=given["timeout"],
        threads=given["threads"],
        environ=dict(pair.split("=", 1) for pair in given["variables"]),
        recipe=config.model_dump(mode="json"),
    )
    prepare(at, {})
    for folder, result in measure(spec, at, "mix"):
        if as_json:
            click.echo(json.dumps(result.plain()))
        else:
            _show_mix(result, folder)
        check(result)
        _refuse_wrong({"collectives at the same time": (result.extra.get("beside") or {}).get("wrong", 0)})


def _show_mix(result: Any, folder: Any) -> None:
    extra = result.extra
    click.echo(f"# {result.library}: one step on {extra['layout']}, in {extra['dtype']}")
    for line in columns([_mix_row(part) for part in extra["parts"]]):
        click.echo(line)
    if not extra["parts"]:
        click.echo("# nothing is sent: every axis has one rank")
    if both := extra.get("beside"):
        click.echo(
            f"# reductions of gradients beside the path: {both['slowdowns'][0]:.2f}x as long, the path "
            f"{both['slowdowns'][1]:.2f}x; {both['fraction']:.0%} of the shorter is hidden"
        )
        if both["threads"]:
            click.echo(f"# {both['threads']}")
    click.echo(f"# Result: {folder / 'result.json'}")


def _mix_row(part: dict[str, Any]) -> dict[str, object]:
    return {
        "axis": part["axis"],
        "n": part["ranks"],
        "operation": part["operation"],
        "calls a step": part["calls"],
        "size (B)": part["size"],
        "time (us)": f"{part['seconds'] * 1e6:.1f}",
        "busbw (GB/s)": "" if part["busbw"] is None else f"{part['busbw']:.3g}",
        "a step (ms)": f"{part['step_seconds'] * 1e3:.2f}",
    }
