"""`hpctrain bench pairs`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from hpctrain.cli.bench_collectives import spec_of
from hpctrain.cli.bench_options import measure, place, place_options, prepare
from hpctrain.cli.bench_unused import refuse_unused
from hpctrain.cli.outputs import picture_file
from hpctrain.cli.tables import columns

MOST_COLUMNS = 16
"""Of a matrix that is printed; larger ones are in the picture and in the JSON."""


@click.command(epilog="\b\nExample:  hpctrain bench pairs --ranks 4 --sizes 1M --slow")
@click.option("--sizes", default="4M", show_default=True, help="Of a message.")
@click.option("--dtype", "dtypes", default="float32", show_default=True)
@click.option(
    "--slow", "search", is_flag=True, help="Find who is slow, with few pairs; the status is 1 if somebody is."
)
@click.option("--searches", type=click.IntRange(1, 1000), default=1, show_default=True, help="With --slow: how often.")
@click.option(
    "--expect",
    type=click.FloatRange(0, min_open=True),
    metavar="GB/S",
    help="With --slow: what a pair is to reach each way.",
)
@click.option("--alone", is_flag=True, help="One pair after the other, not disjoint ones at once.")
@click.option("-n", "--iterations", type=click.IntRange(1, 10**6), default=10, show_default=True)
@click.option("-w", "--warm-up", type=click.IntRange(0, 10**6), default=2, show_default=True)
@place_options
@click.option(
    "--png", type=picture_file("--png"), help="Heat maps: FILE of ranks, FILE-rails and FILE-nodes beside it."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--inject", default="", hidden=True, help="Damage, for tests: JSON of a Fault.")
def pairs(search: bool, png: Path | None, as_json: bool, **given: Any) -> None:
    """Measure every rank with every other, both ways at once: bandwidth by pair, by rail and by node.

    With --slow it measures few pairs, narrows down who is slow, a node, a rail of it or a way between two, measures
    suspects again, and says what it knows that by. It knows only how ranks do beside each other, unless --expect says
    what they are to reach.
    """
    from hpctrain.comms.result import BenchError

    at = place(given)
    refuse_unused(
        [
            ("searches", search, "goes with --slow"),
            ("expect", search, "goes with --slow"),
            ("alone", not search, "--slow measures disjoint pairs at once"),
            ("png", not search, "--slow has no matrix to draw: it measures few pairs"),
            ("sizes", "," not in given["sizes"] and ":" not in given["sizes"], "pairs exchange messages of one size"),
            ("dtypes", "," not in given["dtypes"], "pairs exchange messages of one dtype"),
        ]
    )
    prepare(at, {})
    kind = "slow" if search else "pairs"
    for folder, result in measure(spec_of(given, at, kind), at, kind):
        extra = result.extra
        if as_json:
            click.echo(json.dumps(result.plain()))
        elif search:
            for line in extra["said"]:
                click.echo(line)
            if extra["searches"] > 1:
                times = ", ".join(f"{name} in {count}" for name, count in extra["named"].items()) or "nobody in any"
                click.echo(f"named: {times} of {extra['searches']} searches")
        else:
            _show(extra, result, folder)
        if png and not search:
            _draw(extra, result, png)
        if extra["lost"]:
            shown = ", ".join(f"{a}-{b} ({elements} elements)" for a, b, elements in extra["lost"][:6])
            raise BenchError(f"wrong data between ranks {shown}: do not train on this; have their links looked at.")
        if search and extra["bad"]:
            who = [" - ".join(culprit["names"]) for culprit in extra["culprits"]]
            who += [f"rail {lane} of everybody" for lane in extra["lanes"]] + ["everybody"] * extra["everybody"]
            raise BenchError(f"slow: {', '.join(who)}; keep it out (--exclude of sbatch) and have its links looked at.")


def _show(extra: Any, result: Any, folder: Path) -> None:
    hosts = list(dict.fromkeys(at.host for at in result.where))
    rows = [(f"{rank} {at.host}", rank) for rank, at in enumerate(result.where)]
    several = len(hosts) > 1
    click.echo(f"# {result.library}: GB/s (1e9 B/s) each way, both ways at once, messages of {extra['size']} bytes")
    for title, matrix, labels in (
        ("rank", extra["ranks"], [name for name, _ in rows] if several else [str(rank) for _, rank in rows]),
        ("rail (median over nodes)", extra["rails"], [str(i) for i in range(len(extra["rails"]))]),
        ("node (median over rails; inside on the diagonal)", extra["nodes"] if several else [], hosts),
    ):
        if matrix and len(matrix) <= MOST_COLUMNS:
            click.echo(f"\n# by {title}")
            heads = [label.split()[0] for label in labels]
            for line in columns([_cells(label, heads, cells) for label, cells in zip(labels, matrix)]):
                click.echo(line)
    slowest = sorted(extra["pairs"], key=lambda pair: -pair[2])[:3]
    shown = ", ".join(f"{a}-{b} {extra['size'] / seconds / 1e9:.3g}" for a, b, seconds in slowest)
    click.echo(f"\n# {len(extra['pairs'])} pairs in {extra['seconds']:.1f} s; slowest (GB/s): {shown}")
    click.echo(f"# Result: {folder / 'result.json'}")


def _cells(label: str, heads: list[str], cells: list[float | None]) -> dict[str, object]:
    return {"": label, **{h: "" if v is None else f"{v:.3g}" for h, v in zip(heads, cells)}}


def _draw(extra: Any, result: Any, png: Path) -> None:
    from hpctrain.comms.plots import matrix

    unit, said = "GB/s each way", f"{result.library}, {extra['size']} bytes"
    ranks = [f"{at.host}:{at.local_rank}" for at in result.where]
    hosts = list(dict.fromkeys(at.host for at in result.where))
    matrix(extra["ranks"], png, f"pairs of ranks: {said}", unit, ranks, "rank")
    if extra["rails"]:
        rails = [str(i) for i in range(len(extra["rails"]))]
        matrix(extra["rails"], png.with_stem(f"{png.stem}-rails"), f"rails: {said}", unit, rails, "rail")
    if len(hosts) > 1:
        matrix(extra["nodes"], png.with_stem(f"{png.stem}-nodes"), f"nodes: {said}", unit, hosts, "node")
