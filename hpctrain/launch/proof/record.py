"""Proof and rank table in the run folder.

Of thousands of ranks most things are the same: those are in the file once, as `usual`, and of each rank, a line each,
what it has otherwise. `ranks_of` puts them together again.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hpctrain.files import write_whole
from hpctrain.launch.place.tablefile import RECORD, JobTable
from hpctrain.launch.proof.finding import grouped
from hpctrain.launch.proof.verdict import FILE, Proof, Reports

PARTS = ("planned", "found")


def write(folder: Path, proof: Proof, job: JobTable | None, reports: Reports) -> None:
    """Keep proof and rank table in the run folder; a run does not fail because it cannot."""
    records = {FILE: plain(proof, reports)}
    if job is not None:
        records[RECORD] = job.record()
    for name, record in records.items():
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(folder / name, text(record))


def plain(proof: Proof, reports: Reports) -> dict[str, Any]:
    """For JSON."""
    whole: dict[int, dict[str, Any]] = {
        rank: {"planned": binding.plain() if binding else None, "found": found.plain()}
        for rank, (binding, found) in sorted(reports.items())
    }
    usual = {part: _usual([row[part] for row in whole.values() if row[part] is not None]) for part in PARTS}
    return {
        "summary": proof.summary,
        "stops": proof.stops,
        "findings": [{**asdict(one), "ranks": ranks} for ranks, one in grouped(proof.findings)],
        "usual": usual,
        "ranks": [
            {"rank": rank, **{part: _odd(row[part], usual[part]) for part in PARTS}} for rank, row in whole.items()
        ],
    }


def ranks_of(tree: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Of a proof that was read from its file: all of what each rank was to have, and what it found."""
    return [
        {**row, **{part: None if row[part] is None else _whole(row[part], tree["usual"][part]) for part in PARTS}}
        for row in tree["ranks"]
    ]


def text(record: Mapping[str, Any]) -> str:
    """JSON with a line for each rank."""
    head = json.dumps({key: value for key, value in record.items() if key != "ranks"}, indent=1)
    rows = ",\n".join(json.dumps(row) for row in record["ranks"])
    return f'{head[:-2]},\n "ranks": [\n{rows}\n ]\n}}\n'


def _usual(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The commonest value of each key; of what is a mapping itself, of each key in it."""
    out: dict[str, Any] = {}
    for key in dict.fromkeys(key for row in rows for key in row):
        values = [row[key] for row in rows if key in row]
        mappings = isinstance(values[0], Mapping)
        out[key] = _usual(values) if mappings else Counter(values).most_common(1)[0][0]
    return out


def _odd(row: Mapping[str, Any] | None, usual: Mapping[str, Any]) -> dict[str, Any] | None:
    """What is not as usual; a key that is usual and is not there is null."""
    return None if row is None else dict(_differences(row, usual))


def _differences(row: Mapping[str, Any], usual: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in usual.items():
        mine = row.get(key)
        if isinstance(value, Mapping) and isinstance(mine, Mapping):
            if inner := dict(_differences(mine, value)):
                yield key, inner
        elif mine != value:
            yield key, mine


def _whole(odd: Mapping[str, Any], usual: Mapping[str, Any]) -> dict[str, Any]:
    out = {**usual, **odd}
    for key, value in usual.items():
        if isinstance(value, Mapping):
            inner = _whole(odd.get(key) or {}, value)
            out[key] = {name: found for name, found in inner.items() if found is not None}
    return out
