"""`hpctrain bench sweep`: for every night."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpctrain.cli.bench_collectives import spec_of
from hpctrain.cli.bench_options import FILE, measure, place, place_options, prepare, warn
from hpctrain.cli.bench_unused import of_groups, of_operations, refuse_unused
from hpctrain.cli.outputs import Output

if TYPE_CHECKING:
    from hpctrain.comms.compare import Verdict
    from hpctrain.comms.history import Before
    from hpctrain.comms.result import Result

OPERATIONS = "all_reduce,all_gather,reduce_scatter,all_to_all,ping_pong,barrier"


@click.command(epilog="\b\nExample:  hpctrain bench sweep --store bench/nights.h5 --submit --nodes 2,4 --ranks 8")
@click.option("--store", type=FILE, required=True, help="HDF5 file of the nights; this one is added.")
@click.option("--nights", type=click.IntRange(1, 365), default=7, show_default=True, help="That it is held against.")
@click.option("--op", "operations", default=OPERATIONS, show_default=True, help="With commas between, or all.")
@click.option("--sizes", default="1K:64M:8", show_default=True, help="BEGIN:END:FACTOR, or sizes with commas between.")
@click.option("--groups", default="world", show_default=True, help="As of bench collectives.")
@click.option("--layout", default="", metavar="tp=2,dp=4", help="Of the ranks, for groups by axis.")
@click.option("--tolerance", type=click.FloatRange(0, 10), default=0.15, show_default=True, help="Of the median time.")
@click.option("-n", "--iterations", type=click.IntRange(1, 10**6), default=20, show_default=True)
@click.option("-w", "--warm-up", type=click.IntRange(0, 10**6), default=5, show_default=True)
@click.option("--check", "checks", type=click.IntRange(0), default=3, show_default=True, help="Results of a line.")
@click.option("--slow/--no-slow", "search", default=True, help="Also look for who is slow.")
@click.option(
    "--profile-out",
    type=Output("--profile-out"),
    help="Add fits of the collectives to this profile, for hpctrain plan.",
)
@click.option("--cluster", default="measured", show_default=True, help="The hardware that the profile is of.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@place_options
def sweep(
    store: Path,
    nights: int,
    tolerance: float,
    search: bool,
    profile_out: Path | None,
    cluster: str,
    as_json: bool,
    **given: Any,
) -> None:
    """Measure what a training sends, hold it against the nights before, and keep it in a store.

    For cron: prints what is worse, and the status is 1 if a line is slower than noise and nights explain, a result is
    wrong, or somebody is slow. Runs are kept either way; a slower one is no measure for later nights, so what stays
    slow is said every night. Nights on another library, hardware or with other variables are another series, and what
    has changed is said.
    """
    from hpctrain.comms import store as stored
    from hpctrain.comms.compare import compare, tally
    from hpctrain.comms.fit import fits
    from hpctrain.comms.history import WORSE, before, pace
    from hpctrain.comms.profile import check as check_profile
    from hpctrain.comms.profile import collectives, planned, update
    from hpctrain.comms.result import BenchError

    at = place(given)
    spec = spec_of(given, at, "night" if search else "collectives")
    cluster_used = ("cluster", profile_out is not None, "is of a profile, and goes with --profile-out")
    refuse_unused([cluster_used, *of_operations(spec.operations), *of_groups(spec.groups)])
    prepare(at, {"--store": store})
    if profile_out:
        check_profile(profile_out, cluster)
    bad: list[str] = []
    report: list[dict[str, Any]] = []
    for _, result in measure(spec, at, "sweep"):
        found = before(store, result, nights)
        verdicts = compare(found.nights, result, tolerance) if found.nights else []
        slower = [*_slower(verdicts), *filter(None, [pace(result, found.nights)])]
        name = stored.append(store, replace(result, extra={**result.extra, WORSE: slower}))
        said = result.extra.get("said", [])
        bad += slower + _damaged(result) + (said if result.extra.get("bad") else [])
        bad += [f"wrong data between ranks {a} and {b}: {n} elements" for a, b, n in result.extra.get("lost", [])]
        counts = {"nights": len(found.nights), "changes": found.changes}
        report.append({"name": name, **counts, "verdicts": [asdict(v) for v in verdicts], "slow": said})
        if profile_out:
            made = fits(result.rows, [w.host for w in result.where])
            update(profile_out, cluster, collectives(made))
            for f in made:
                if planned(f) and not f.rated:
                    warn(f"{f.operation} over {f.groups} of {f.ranks} is not in {profile_out}: no rate is known")
        if not as_json:
            counted = ", ".join(f"{n} {word}" for word, n in tally(verdicts).items()) or f"{len(result.rows)} lines"
            click.echo(f"{name}: {len(result.where)} ranks, {_against(found)}: {counted}")
            click.echo("\n".join(said), nl=bool(said))
    if as_json and report:
        click.echo(json.dumps({"runs": report, "problems": bad}, indent=2))
    if bad:
        raise BenchError(f"{len(bad)} problems: {'; '.join(bad[:6])}{'; ...' if len(bad) > 6 else ''}")


def _against(found: Before) -> str:
    if found.nights:
        return f"against {len(found.nights)} nights"
    if not found.changes:
        return "the first of its kind"
    more = f" and {len(found.changes) - 3} more" if len(found.changes) > 3 else ""
    return f"the first of a new series, since {'; '.join(found.changes[:3])}{more}"


def _slower(verdicts: list[Verdict]) -> list[str]:
    return [
        f"{v.key.operation} of {v.key.size} bytes over {v.key.groups} of {v.key.ranks} takes {1 + (v.change or 0):.2f} "
        "times as long"
        for v in verdicts
        if v.word == "slower"
    ]


def _damaged(result: Result) -> list[str]:
    return [f"{r.operation} of {r.size} bytes: {r.wrong} of {r.checked} results wrong" for r in result.damaged]
