"""The JSON of nccl-tests (version 3 of its format): written, with ours beside it, and read.

Field names and types are those of `src/util.cu` there: times in microseconds, GB/s, truth values as the strings "true"
and "false", what is no number as the string "nan", a placement that was not measured as null. Unlike nccl-tests' own,
`env` has the variables that matter and no others: the whole environment holds secrets.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from hpctrain.comms.formulas import OPERATIONS
from hpctrain.comms.groups import Where
from hpctrain.comms.result import Result, Row
from hpctrain.comms.sizes import DTYPES
from hpctrain.comms.table import mean_busbw, paired

VERSION = 3
OURS = "hpctrain"

NAMES = {"alltoall": "all_to_all", "alltoallv": "all_to_all_v"}
"""Programs of nccl-tests that are called otherwise than our operations."""


def document(result: Result, arguments: Sequence[str]) -> dict[str, Any]:
    """What `--json` prints. Under `hpctrain` lies the whole result.

    Args:
        arguments: of the command.
    """
    rows = result.rows
    wrong, mean = sum(row.elements for row in rows), mean_busbw(rows)
    return {
        "version": VERSION,
        "start_time": _time(result.start),
        "args": list(arguments),
        "env": [f"{name}={value}" for name, value in result.environment.get("variables", {}).items()],
        "nccl_version": _version(result.library),
        "config": _config(result),
        "results": [_line(*pair) for pair in paired(rows)],
        "out_of_bounds": {"count": wrong, "okay": _truth(not wrong)},
        "average_bus_bandwidth": {"bandwidth": _number(mean), "okay": "unchecked"},
        "errors": [],
        "end_time": _time(result.end),
        OURS: result.plain(),
    }


def _config(result: Result) -> dict[str, Any]:
    spec, sizes = result.spec, result.spec["sizes"]
    factor = sizes[1] / sizes[0] if len(sizes) > 1 else 2
    return {
        "nthreads": 1,
        "ngpus": 1,
        "minimum_bytes": sizes[0],
        "maximum_bytes": sizes[-1],
        "step_factor": int(factor) if factor == int(factor) else factor,
        "warmup_iters": spec["warm_up"],
        "iterations": spec["iterations"],
        "aggregated_iterations": 1,
        "validation": spec["checks"],
        "graph": spec["graph"],
        "blocking_collectives": _truth(spec["barrier"] or spec["backend"] != "nccl"),
        "per_iter_timing": _truth(True),
        "parallel_init": _truth(False),
        "devices": [
            {
                "rank": rank,
                "group": 0,
                "pid": at.pid,
                "hostname": at.host,
                "device": at.local_rank,
                "device_hex": "",
                "device_info": at.device,
            }
            for rank, at in enumerate(result.where)
        ],
    }


def _line(out: Row | None, inside: Row | None) -> dict[str, Any]:
    row = out or inside
    assert row is not None
    found: dict[str, Any] = {
        "size": row.size,
        "count": row.count,
        "type": DTYPES[row.dtype][0],
        "redop": row.reduction,
        "root": f"{row.root:6d}",
    }
    for name, of in (("out_of_place", out), ("in_place", inside)):
        found[name] = None if of is None else _measures(of)
        if of is not None:
            found[f"{name}_per_iter"] = _iterations(of)
    found["actual_iterations"] = len(row.iterations)
    found["experiment_name"] = row.operation
    # ours
    return {**found, "algorithm": row.algorithm, "groups": row.groups, "ranks": list(row.ranks)}


def _measures(row: Row) -> dict[str, Any]:
    return {
        "time": row.seconds * 1e6,
        "alg_bw": _number(row.algbw),
        "bus_bw": _number(row.busbw),
        "nwrong": float(row.elements) if row.checked else None,
    }


def _iterations(row: Row) -> dict[str, Any]:
    spread = row.spread
    return {
        "min_us": spread.min * 1e6,
        "max_us": spread.max * 1e6,
        "avg_us": spread.mean * 1e6,
        "p50_us": spread.p50 * 1e6,
        "p95_us": spread.p95 * 1e6,
        "p99_us": spread.p99 * 1e6,
        "stdev_us": spread.deviation * 1e6,
        "cv_pct": spread.variation,
        "times_us": [seconds * 1e6 for seconds in row.iterations],
        "per_process_max_times_us": [[seconds * 1e6 for seconds in times] for times in row.times],
    }


def read(plain: Mapping[str, Any]) -> Result:
    """The result in such a document, ours or one that nccl-tests wrote.

    Raises:
        KeyError, ValueError, TypeError: it is neither, or of a program that measures what we do not.
    """
    if OURS in plain:
        return Result.of(plain[OURS])
    devices = plain.get("devices") or plain["config"]["devices"]
    program = str(plain["args"][0]).rsplit("/", 1)[-1].removesuffix("_perf")
    operation = NAMES.get(program, program)
    if operation not in OPERATIONS:
        raise ValueError(f"{program!r} is none of {', '.join(OPERATIONS)}")
    # With NCCL_TESTS_SPLIT the ranks are in groups that run at once, and figures are of the group's size.
    ranks = tuple(i for i, device in enumerate(devices) if device["group"] == devices[0]["group"])
    rows = []
    for line in plain["results"]:
        for placement in ("out_of_place", "in_place"):
            found = line.get(placement)
            if found and not isinstance(found["time"], str) and found["time"] > 0:
                rows.append(_row(line, found, placement, ranks, len(devices), operation))
    times = (plain.get("start_time", ""), plain.get("end_time", ""))
    return Result({}, tuple(rows), _where(devices), {}, *times, f"nccl-tests, NCCL {_named(plain['nccl_version'])}")


def _where(devices: Sequence[Mapping[str, Any]]) -> tuple[Where, ...]:
    hosts = [device["hostname"] for device in devices]
    return tuple(
        Where(hosts[i], hosts[:i].count(hosts[i]), device["pid"], device["device_info"])
        for i, device in enumerate(devices)
    )


def _row(
    line: Mapping[str, Any], found: Mapping[str, Any], placement: str, ranks: tuple[int, ...], world: int, op: str
) -> Row:
    dtype = {name: ours for ours, (name, _) in DTYPES.items()}.get(line["type"], line["type"])
    iterations = (line.get(f"{placement}_per_iter") or {}).get("times_us") or [found["time"]]
    wrong = int(found.get("nwrong") or 0)
    return Row(
        operation=op,
        backend="nccl",
        groups="world" if len(ranks) == world else "split",
        ranks=ranks,
        size=line["size"],
        count=line["count"],
        dtype=dtype,
        times=tuple(tuple(us / 1e6 for us in iterations) for _ in ranks),
        reduction=line["redop"],
        root=int(line["root"]),
        placement=placement,
        checked=int(found.get("nwrong") is not None),
        wrong=int(wrong > 0),
        elements=wrong,
    )


def _number(value: float | None) -> float | str:
    return "nan" if value is None or math.isnan(value) else value


def _truth(value: bool) -> str:
    return "true" if value else "false"


def _time(iso: str) -> str:
    return iso[:19].replace("T", " ")


def _version(library: str) -> int:
    """As NCCL counts: 2.27.7 is 22707; 0 for other libraries."""
    name, _, version = library.partition(" ")
    if name != "NCCL":
        return 0
    major, minor, patch = (*map(int, version.split(".")[:3]), 0, 0)[:3]
    return major * 10000 + minor * 100 + patch


def _named(version: int) -> str:
    """The inverse of `_version`."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"
