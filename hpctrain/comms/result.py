"""What was measured: rows with every iteration of every rank, and what they were measured with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from hpctrain.comms.formulas import algbw, busbw, takes_part
from hpctrain.comms.groups import Where
from hpctrain.comms.timing import Spread, average, slowest, spread
from hpctrain.errors import TrainError
from hpctrain.files import write_whole

RESULT_FILE = "result.json"
FORMAT = "hpctrain-bench-1"

Curve = tuple[str, ...]


class Key(NamedTuple):
    """What a line is compared by: all but what was found, and which ranks exactly.

    Attributes:
        ranks: how many the group has.
        hosts: how many these are on.
    """

    operation: str
    backend: str
    algorithm: str
    groups: str
    ranks: int
    hosts: int
    dtype: str
    reduction: str
    placement: str
    size: int


class BenchError(TrainError):
    """A measurement that found something wrong: results, a slow part, a regression."""


@dataclass(frozen=True)
class Row:
    """One operation of one size in one group.

    Attributes:
        operation, backend, dtype: by name.
        algorithm: of ours; "" for the backend's own choice.
        groups: what kind of group.
        ranks: of the group, global.
        size: S, bytes.
        count: elements, as nccl-tests counts them.
        reduction: "none" where nothing is reduced.
        root: index in the group; -1 where there is none.
        placement: out_of_place or in_place.
        times: seconds of each iteration, of each rank of the group.
        checked: results that were checked.
        wrong: of these, how many were wrong.
        elements: wrong elements in them, on all ranks.
        average: how the times of ranks become one.
    """

    operation: str
    backend: str
    groups: str
    ranks: tuple[int, ...]
    size: int
    count: int
    dtype: str
    times: tuple[tuple[float, ...], ...]
    algorithm: str = ""
    reduction: str = "none"
    root: int = -1
    placement: str = "out_of_place"
    checked: int = 0
    wrong: int = 0
    elements: int = 0
    average: str = "mean"

    @cached_property
    def seconds(self) -> float:
        """Of one operation, of the ranks that take part; over an uneven all-to-all, of the slowest rank, as in
        nccl-tests."""
        n = len(self.times)
        times = [of for i, of in enumerate(self.times) if takes_part(self.operation, i, n)] or self.times
        return average(times, "max" if self.operation == "all_to_all_v" else self.average)

    @property
    def algbw(self) -> float | None:
        """GB/s; None where nothing is sent."""
        return algbw(self.size, self.seconds) if self.size and self.seconds else None

    @property
    def busbw(self) -> float | None:
        """GB/s; None for one rank."""
        return busbw(self.operation, self.size, self.seconds, len(self.ranks)) if self.size and self.seconds else None

    @cached_property
    def iterations(self) -> list[float]:
        """Seconds of each iteration on its slowest rank."""
        return slowest(self.times)

    @cached_property
    def spread(self) -> Spread:
        """Of the iterations."""
        return spread(self.iterations)

    @property
    def rate(self) -> float | None:
        """Share of the checked results that were wrong; None if none was checked."""
        return self.wrong / self.checked if self.checked else None

    @property
    def line(self) -> Curve:
        """What all sizes of a curve have in common."""
        return (
            *(self.operation, self.backend, self.algorithm, self.groups, str(len(self.ranks))),
            *(self.dtype, self.reduction, self.placement),
        )


@dataclass(frozen=True)
class Result:
    """A measurement.

    Attributes:
        spec: as plain data.
        rows: of it.
        where: each rank.
        environment: versions and those variables that matter, never all of them.
        start, end: ISO 8601, UTC.
        library: what sent.
        extra: of other kinds of measurement, by name.
    """

    spec: Mapping[str, Any]
    rows: tuple[Row, ...] = ()
    where: tuple[Where, ...] = ()
    environment: Mapping[str, Any] = field(default_factory=dict)
    start: str = ""
    end: str = ""
    library: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return {"format": FORMAT, **asdict(self)}

    @staticmethod
    def of(plain: Mapping[str, Any]) -> Result:
        """The inverse of `plain`."""
        kept = {key: value for key, value in plain.items() if key not in ("format", "rows", "where")}
        rows = tuple(
            Row(**{**row, "ranks": tuple(row["ranks"]), "times": tuple(map(tuple, row["times"]))})
            for row in plain["rows"]
        )
        return Result(rows=rows, where=tuple(Where(**at) for at in plain["where"]), **kept)

    def write(self, folder: Path) -> Path:
        """Put it into a folder; the file's path."""
        path = folder / RESULT_FILE
        write_whole(path, json.dumps(self.plain()) + "\n")
        return path

    def key(self, row: Row) -> Key:
        """What a row of it is compared by."""
        hosts = len({self.where[rank].host for rank in row.ranks})
        return Key(
            *(row.operation, row.backend, row.algorithm, row.groups, len(row.ranks), hosts),
            *(row.dtype, row.reduction, row.placement, row.size),
        )

    @property
    def damaged(self) -> list[Row]:
        """Rows with wrong results."""
        return [row for row in self.rows if row.wrong]


def check(result: Result) -> None:
    """Raise if a result was wrong.

    Raises:
        BenchError: names sizes and rates.
    """
    bad = result.damaged
    if bad:
        shown = "; ".join(
            f"{row.operation} of {row.size} bytes ({row.dtype}, {row.groups}, ranks {row.ranks[0]}-{row.ranks[-1]}): "
            f"{row.wrong} of {row.checked} results, {row.elements} elements"
            for row in bad[:4]
        )
        more = f"; and {len(bad) - 4} more lines" if len(bad) > 4 else ""
        raise BenchError(
            f"wrong results from {bad[0].backend}: {shown}{more}: do not train on this; "
            "repeat with --check 100, and look for what changed in driver, library or network."
        )
