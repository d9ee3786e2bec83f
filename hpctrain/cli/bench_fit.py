"""`hpctrain bench fit`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from hpctrain.cli.bench_unused import refuse_unused
from hpctrain.cli.outputs import Output, picture_file
from hpctrain.cli.tables import columns
from hpctrain.errors import ConfigError

NO_RATE = "times do not grow with bytes by more than they differ anyway, so no rate is known"
LARGER = "measure larger sizes, or more iterations"


@click.command(epilog="\b\nExample:  hpctrain bench fit published:h200 --profile h200.yaml --cluster dgx-h200")
@click.argument("results", nargs=-1, required=True)
@click.option(
    "--hold", type=click.IntRange(0), default=3, show_default=True, help="Every n-th size is held out, from 2; 0 none."
)
@click.option("--profile", type=Output("--profile"), help="Add the fits to this profile, for hpctrain plan.")
@click.option("--cluster", default="measured", show_default=True, help="The hardware that the profile is of.")
@click.option("--png", type=picture_file("--png"), help="Draw the curves with the fitted lines.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def fit(
    results: tuple[str, ...], hold: int, profile: Path | None, cluster: str, png: Path | None, as_json: bool
) -> None:
    """Fit latency and bandwidth to RESULTS, and see how well that predicts sizes that were held out.

    Time is the least over a few lines of latency + bytes / rate, for every operation, kind of group and backend.
    """
    from hpctrain.comms.fit import fits
    from hpctrain.comms.load import load
    from hpctrain.comms.profile import collectives, planned, update

    refuse_unused([("cluster", profile is not None, "is of a profile, and goes with --profile")])
    if hold == 1:
        raise ConfigError("--hold", 1, "would hold out every size, and leave none to fit", "use 2 or more, or 0")
    loaded = [load(name) for name in results]
    made = [fits(result.rows, [at.host for at in result.where], hold) for result in loaded]
    found = [f for several in made for f in several]
    if not found:
        raise ConfigError("RESULTS", ", ".join(results), "must have at least 3 sizes of one operation")
    flat = [f"{_name(f)} over {f.groups} of {f.ranks}" for f in found if not f.rated]
    if profile:
        _refuse_mixed(loaded)
        if any(planned(f) and not f.rated for f in found):
            raise ConfigError("--profile", str(profile), f"{', '.join(flat)}: {NO_RATE}", LARGER)
        update(profile, cluster, collectives(found))
    if png:
        from hpctrain.comms.plots import curves

        curves(loaded, png, made)
    if as_json:
        click.echo(json.dumps([_plain(f) for f in found], indent=2))
        return
    for line in columns([row for f in found for row in _lines(f)]):
        click.echo(line)
    click.echo("")
    for line in columns([row for f in found for row in _held(f)]):
        click.echo(line)
    if flat:
        click.echo(f"{', '.join(flat)}: {NO_RATE}; {LARGER}")
    errors = [f.median_error for f in found if f.median_error is not None]
    if errors:
        click.echo(f"median error of sizes held out: {', '.join(f'{error:.1%}' for error in errors)}")


def _name(f: Any) -> str:
    return f"{f.operation} {f.algorithm}".strip()


def _plain(f: Any) -> dict[str, Any]:
    """For JSON, which has no infinity."""
    lines = [{"latency": line.latency, "rate": line.rate if f.rated else None} for line in f.lines]
    return asdict(f) | {"lines": lines, "median_error": f.median_error, "noise": f.noise}


def _refuse_mixed(loaded: Sequence[Any]) -> None:
    """A profile is of one choice of algorithms."""
    from hpctrain.comms.environments import chosen

    several = {json.dumps(chosen(result.environment.get("variables", {})), sort_keys=True) for result in loaded}
    if len(several) > 1:
        said = " and ".join(sorted(several))
        raise ConfigError("RESULTS", said, "were measured with different algorithms chosen", "fit those of one choice")


def _lines(f: Any) -> Iterator[dict[str, object]]:
    for number, line in enumerate(f.lines):
        head = {"operation": _name(f), "backend": f.backend, "groups": f.groups, "n": f.ranks, "hosts": f.hosts}
        first = head if number == 0 else dict.fromkeys(head, "")
        rate = f"{line.rate / 1e9:.4g}" if f.rated else "n/a"
        yield {**first, "latency (us)": f"{line.latency * 1e6:.1f}", "rate (GB/s)": rate}


def _held(f: Any) -> Iterator[dict[str, object]]:
    for (bytes_, seconds), error in zip(f.held, f.errors(f.held)):
        yield {
            "held out": _name(f),
            "groups": f.groups,
            "sent (B)": round(bytes_),
            "measured (us)": f"{seconds * 1e6:.1f}",
            "predicted (us)": f"{f.seconds(bytes_) * 1e6:.1f}",
            "error": f"{error:+.1%}",
        }
