"""The result as one flat table: a row for each tuple of what was varied, measures as columns."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import TextIO

from hpctrain.comms.result import Result, Row
from hpctrain.comms.table import named

VARIED = (
    *("operation", "backend", "algorithm", "groups", "ranks", "n", "size_bytes", "count", "dtype", "redop", "root"),
    *("placement", "iterations"),
)
MEASURED = (
    *("time_us", "algbw_GB/s", "busbw_GB/s", "min_us", "max_us", "mean_us", "p50_us", "p95_us", "p99_us", "stdev_us"),
    *("checked", "wrong_results", "wrong_elements"),
)


def flat(row: Row) -> dict[str, object]:
    """One line, by column."""
    spread = row.spread
    micro = [s * 1e6 for s in (spread.min, spread.max, spread.mean, spread.p50, spread.p95, spread.p99)]
    varied = (
        *(row.operation, row.backend, row.algorithm, row.groups, named(row.ranks), len(row.ranks), row.size, row.count),
        *(row.dtype, row.reduction, row.root, row.placement, len(row.iterations)),
    )
    measured = (
        *(row.seconds * 1e6, row.algbw, row.busbw, *micro, spread.deviation * 1e6),
        *(row.checked, row.wrong, row.elements),
    )
    return dict(zip((*VARIED, *MEASURED), (*varied, *measured)))


def write(result: Result, target: Path | TextIO) -> None:
    """Write it as CSV, with a line of names."""
    if isinstance(target, Path):
        with target.open("w", newline="") as file:
            write(result, file)
        return
    writer = csv.DictWriter(target, (*VARIED, *MEASURED), lineterminator="\n")
    writer.writeheader()
    writer.writerows({k: "" if v is None else v for k, v in flat(row).items()} for row in result.rows)
