"""Results wherever they are: our files, nccl-tests' JSON, HDF5 stores, and what was published."""

from __future__ import annotations

import csv
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from hpctrain.comms import nccltests, store
from hpctrain.comms.groups import Where
from hpctrain.comms.result import FORMAT, RESULT_FILE, Result, Row
from hpctrain.errors import DataError
from hpctrain.layout.bus import factor

PUBLISHED = "published:"

NAMES = {
    "a100": ("A100-80GB NVLink3", "all_reduce"),
    "h100": ("H100 NVLS", "all_reduce"),
    "h200": ("H200 NVLink4 (NVLS)", "all_reduce"),
    "b200": ("B200 NVLink5 (P6-B200)", "all_reduce"),
    "b200-4-nodes": ("B200 + EFAv4 8x400Gb/s per node", "all_reduce"),
    "h200-gpus": ("H200", "all_reduce"),
    "h200-gpus-ring": ("H200 NVLS off (Ring)", "all_reduce"),
    "b200-gpus": ("B200", "all_reduce"),
    "b200-gpus-ring": ("B200 NVLS off (Ring)", "all_reduce"),
    "h100-2-nodes": ("H100 2x8, 8x400G", "all_reduce"),
    "h100-2-nodes-misperforming": ("H100 2x8, 8x400G RoCE (MIS-PERFORMING)", "all_reduce"),
}
"""Of `published:NAME`: the table's word for the hardware, and the operation. With -gpus: 4 to 8 of a node, 8 GiB."""

LARGE = 8 << 30
"""Bytes that a published figure without a size, `for large sizes`, is taken for."""


def load(name: str) -> Result:
    """The result of a name: a file, a folder of a measurement, `FILE.h5:MEASUREMENT`, or `published:a100`.

    Raises:
        DataError: there is none, or it cannot be read.
    """
    if name.startswith(PUBLISHED):
        return published(name.removeprefix(PUBLISHED))
    file, _, inside = name.partition(".h5:")
    path = Path(f"{file}.h5" if inside else name)
    if path.is_dir():
        path = path / RESULT_FILE
    if not path.exists():
        raise DataError(f"{path} is not there: name a result, or one of {', '.join(PUBLISHED + n for n in NAMES)}.")
    if path.suffix in (".h5", ".hdf5"):
        return store.read(path, inside)
    try:
        plain = json.loads(path.read_text())
        return Result.of(plain) if plain.get("format") == FORMAT else nccltests.read(plain)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise DataError(
            f"{path} is no result ({type(error).__name__}: {error}): name a result.json of ours, what --json printed, "
            "or the JSON of nccl-tests."
        ) from None


def table() -> list[dict[str, str]]:
    """All published rows."""
    text = files("hpctrain.comms").joinpath("published.csv").read_text(encoding="utf-8")
    return list(csv.DictReader([line for line in text.splitlines() if not line.startswith("#")]))


def published(name: str) -> Result:
    """A published sweep as a result: one iteration a row, since no more is known.

    Raises:
        DataError: none has that name.
    """
    if name not in NAMES:
        raise DataError(f"nothing is published as {name!r}: choose from {', '.join(NAMES)}.")
    gpu, operation = NAMES[name]
    rows = [row for row in table() if row["gpu"] == gpu and row["collective"] == operation]
    sources = sorted({f"{row['source']}, {row['tool']}" for row in rows})
    return Result({}, tuple(map(_row, rows)), _where(rows), library=f"published: {gpu}", extra={"sources": sources})


def _where(rows: list[dict[str, str]]) -> tuple[Where, ...]:
    """Ranks on as many hosts as the table says, equally many on each."""
    ranks, nodes = max((int(row["n_gpus"]), int(row["n_nodes"])) for row in rows)
    return tuple(Where(f"node{rank * nodes // ranks}", rank % (ranks // nodes)) for rank in range(ranks))


def _row(row: dict[str, Any]) -> Row:
    ranks, size = int(row["n_gpus"]), int(row["size_bytes"] or LARGE)
    seconds = factor(row["collective"], ranks) * size / float(row["busbw_GB/s"]) / 1e9
    return Row(
        operation=row["collective"],
        backend="nccl",
        groups="world",
        ranks=tuple(range(ranks)),
        size=size,
        count=size // 4,
        dtype="float32",
        times=((seconds,),) * ranks,
        reduction="sum",
        placement="in_place",
    )
