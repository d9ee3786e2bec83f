"""A measurement held against the nights before, out of an HDF5 store: those of the same series, which are of the same
settings, on as many ranks of as many hosts, under the same conditions. What has changed since the night before is said.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.comms import store
from hpctrain.comms.bisect import SLOW
from hpctrain.comms.result import Result

WORSE = "worse"
"""In `Result.extra`: why a night was judged slower than those before. It is no baseline, or what stays slow would be
said once and be usual from the next night on."""

IGNORED = ("kind", "note", "timeout_s", "environ", "fault")
"""Settings that do not make a measurement another one; variables are conditions of it."""

PACKAGES = ("hpctrain", "torch", "mpi4py")
"""Whose version counts."""

OF_A_JOB = (
    *("SLURM_", "MASTER_", "HPCTRAIN_", "OMPI_COMM_WORLD_", "TORCHELASTIC_"),
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES"),
)
"""Variables that are different in every job, or on every rank."""


@dataclass(frozen=True)
class Before:
    """What a store has of earlier nights.

    Attributes:
        nights: of the same series, the newest first.
        changes: since the last night of these settings, if that was of another series.
    """

    nights: tuple[Result, ...]
    changes: tuple[str, ...] = ()


def before(path: Path, result: Result, nights: int) -> Before:
    """The latest measurements in a store that can be compared with this one; none that was judged slower itself."""
    if not path.exists():
        return Before(())
    wanted, conditions_now = settings(result), conditions(result)
    found: list[Result] = []
    changed: tuple[str, ...] = ()
    for name in reversed(store.names(path)):
        if len(found) == nights:
            break
        other = store.read(path, name, rows=False)
        if settings(other) != wanted or other.extra.get(WORSE):
            continue
        then = conditions(other)
        if then == conditions_now:
            found.append(store.read(path, name))
        elif not found and not changed:
            changed = changes(then, conditions_now)
    return Before(tuple(found), () if found else changed)


def settings(result: Result) -> str:
    """What has to be equal for two measurements to be compared at all: settings, and how many ranks each host has."""
    spec = {key: value for key, value in result.spec.items() if key not in IGNORED}
    hosts = [at.host for at in result.where]
    shape = sorted(hosts.count(host) for host in set(hosts))
    return json.dumps([spec, shape], sort_keys=True)


def conditions(result: Result) -> dict[str, str]:
    """What a measurement was made under, beside its settings, by name."""
    kept = result.environment
    found = {"library": result.library, **{name: kept.get(name) for name in ("platform", "cpu", "cpus")}}
    found["devices"] = ", ".join(sorted({at.device for at in result.where}))
    found |= {f"version of {name}": kept.get("versions", {}).get(name) for name in PACKAGES}
    found |= {name: value for name, value in kept.get("variables", {}).items() if not name.startswith(OF_A_JOB)}
    found |= result.spec.get("environ", {})
    return {name: str(value) for name, value in found.items() if value is not None}


def changes(then: dict[str, str], now: dict[str, str]) -> tuple[str, ...]:
    """What is different, in words."""
    none = "not set"
    names = sorted({*then, *now})
    return tuple(
        f"{name} is {now.get(name, none)}, was {then.get(name, none)}"
        for name in names
        if then.get(name) != now.get(name)
    )


def pace(result: Result, nights: Sequence[Result]) -> str:
    """The sentence about pairs that are all slower than they were; empty where they are not, or nothing is known."""
    earlier = [night.extra["usual_s"] for night in nights if night.extra.get("usual_s")]
    usual = result.extra.get("usual_s")
    if not earlier or not usual:
        return ""
    times = statistics.median(usual) / statistics.median(map(statistics.median, earlier))
    return f"pairs take {times:.1f} times as long as in the nights before, all of them" if times > SLOW else ""
