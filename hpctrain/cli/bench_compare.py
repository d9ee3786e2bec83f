"""`hpctrain bench compare`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import click

from hpctrain.cli.tables import columns
from hpctrain.errors import ConfigError


@click.command(epilog="\b\nExample:  hpctrain bench compare published:h200 published:a100")
@click.argument("baseline")
@click.argument("result")
@click.option("--also", multiple=True, metavar="BASELINE", help="More runs of the baseline: how much do runs differ?")
@click.option("--tolerance", type=click.FloatRange(0, 10), default=0.1, show_default=True, help="Of the median time.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def compare(baseline: str, result: str, also: tuple[str, ...], tolerance: float, as_json: bool) -> None:
    """Hold RESULT against BASELINE, line by line.

    Each is a result.json or its folder, what --json printed, the JSON of nccl-tests, FILE.h5 or FILE.h5:MEASUREMENT, or
    published:NAME (a100, h100, h200, b200, b200-4-nodes, ...). The status is 1 if a line is slower than noise explains.
    """
    from hpctrain.comms.load import load

    judge([load(baseline), *map(load, also)], load(result), tolerance, as_json)


def judge(baselines: Sequence[Any], result: Any, tolerance: float, as_json: bool, quiet: bool = False) -> None:
    """Print verdicts, and raise if a line is slower.

    Raises:
        BenchError: names the worst.
        ConfigError: nothing can be compared.
    """
    from hpctrain.comms.compare import compare as held
    from hpctrain.comms.compare import tally
    from hpctrain.comms.result import BenchError

    verdicts = held(baselines, result, tolerance)
    counted = tally(verdicts)
    if not {"slower", "same", "faster"} & counted.keys():
        raise ConfigError("BASELINE", "no line in common", f"must have lines of the same {_apart(verdicts)}")
    if as_json:
        click.echo(json.dumps([{**asdict(v), "change": v.change} for v in verdicts], indent=2))
    elif not quiet:
        for line in columns([_row(verdict) for verdict in verdicts]):
            click.echo(line)
        click.echo(", ".join(f"{count} {word}" for word, count in counted.items()))
    slower = [v for v in verdicts if v.word == "slower"]
    if slower:
        worst = max(slower, key=lambda v: v.change or 0.0)
        raise BenchError(
            f"{len(slower)} of {len(verdicts)} lines are slower than the baseline, most of all "
            f"{worst.key.operation} of {worst.key.size} bytes: {(worst.change or 0.0) + 1:.2f} times its time."
        )


def _apart(verdicts: Sequence[Any]) -> str:
    """In what all lines of the one differ from all lines of the other."""
    old, new = ([v.key._asdict() for v in verdicts if v.word == word] for word in ("gone", "new"))

    def values(keys: Sequence[Any], name: str) -> set[str]:
        return {str(key[name]) for key in keys}

    names = [name for name in old[0] if not values(old, name) & values(new, name)] if old and new else []
    if not names:
        return "operation, backend, groups, ranks, hosts, dtype and size"
    return ", ".join(
        f"{name} (it has {', '.join(sorted(values(old, name)))}, not {', '.join(sorted(values(new, name)))})"
        for name in names
    )


def _row(verdict: Any) -> dict[str, object]:
    operation, _, algorithm, groups, ranks, hosts, dtype, reduction, placement, size = verdict.key

    def micro(seconds: float | None) -> str:
        return "" if seconds is None else f"{seconds * 1e6:.1f}"

    def rate(value: float | None) -> str:
        return "" if value is None else f"{value:.3g}"

    return {
        "operation": f"{operation} {algorithm}".strip(),
        "groups": groups,
        "n": ranks,
        "hosts": hosts,
        "type": f"{dtype} {reduction}",
        "placement": placement,
        "size (B)": size,
        "before (us)": micro(verdict.before),
        "after (us)": micro(verdict.after),
        "busbw before": rate(verdict.bus[0]),
        "after (GB/s)": rate(verdict.bus[1]),
        "time": "" if verdict.change is None else f"{verdict.change:+.1%}",
        "noise": f"{verdict.noise:.1%}" if verdict.change is not None else "",
        "verdict": verdict.word,
    }
