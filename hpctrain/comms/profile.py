"""A file of what was measured on a cluster, for `hpctrain plan`: fits of collectives, rates of devices and disks.

    cluster: dgx-h100               # the hardware file that it belongs to
    matmul: {bf16: 7.1e14}          # FLOP/s that large products reach
    memory_bandwidth: 2.9e12        # bytes/s of a device
    collectives:                    # seconds = least over lines of latency + bytes / rate
      - {operation: all_reduce, backend: nccl, devices: 8, hosts: 1, lines: [{latency: 2e-5, rate: 3.6e11}]}

Bytes are those that leave a device (`layout.traffic.wire`), rates bytes/s. What was measured later goes before what a
file has of the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpctrain.comms.fit import Fit
from hpctrain.config import plain_yaml
from hpctrain.errors import DataError
from hpctrain.files import write_whole

PLANNED = {
    **{name: name for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")},
    "ping_pong": "send",
}
"""Operations that a training sends, by those that are measured."""

KEYS = ("cluster", "matmul", "memory_bandwidth", "collectives")


def collectives(fits: Iterable[Fit]) -> list[dict[str, Any]]:
    """Fits as a profile has them: of the backend's own choice of algorithm, not of those of ours, which no training
    has. Of two groups of equal size and spread the slower one at its largest size. A fit that tells no rate is left
    out: it would price any message at its latency.

    Raises:
        DataError: they are of several backends, of which a training has one.
    """
    found: dict[tuple[Any, ...], Fit] = {}
    for fit in fits:
        if not planned(fit) or not fit.rated:
            continue
        key = (PLANNED[fit.operation], fit.backend, fit.ranks, fit.hosts)
        other = found.get(key)
        largest = fit.points[-1][0]
        if other is None or fit.seconds(largest) > other.seconds(largest):
            found[key] = fit
    made = [
        {
            "operation": operation,
            "backend": backend,
            "devices": ranks,
            "hosts": hosts,
            "lines": [{"latency": _short(line.latency), "rate": _short(line.rate)} for line in fit.lines],
        }
        for (operation, backend, ranks, hosts), fit in found.items()
    ]
    _one_backend(made)
    return made


def planned(fit: Fit) -> bool:
    """Whether a profile has such fits."""
    return fit.operation in PLANNED and not fit.algorithm


def _one_backend(made: Iterable[Mapping[str, Any]]) -> None:
    names = sorted({str(entry["backend"]) for entry in made})
    if len(names) > 1:
        raise DataError(
            f"collectives over {' and '.join(names)} are in no profile together, since a training uses one of these: "
            "name another file with --profile for each."
        )


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def read(path: Path) -> dict[str, Any]:
    """A profile as plain data.

    Raises:
        DataError: it is none.
    """
    try:
        found = plain_yaml.read(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path} is no profile ({error}): name a file that hpctrain bench wrote.") from None
    if not isinstance(found, dict) or "cluster" not in found or set(found) - set(KEYS):
        raise DataError(f"{path} is no profile: it must have {', '.join(KEYS)} and nothing else.")
    return found


def check(path: Path, cluster: str) -> dict[str, Any]:
    """What a profile has to which something is to be added; of one that is not there, its head.

    Raises:
        DataError: the file is none, or of another cluster.
    """
    old: dict[str, Any] = read(path) if path.exists() else {"cluster": cluster}
    if old["cluster"] != cluster:
        raise DataError(
            f"{path} is of cluster {old['cluster']!r}, not of {cluster!r}: name another file, or --cluster."
        )
    return old


def update(
    path: Path,
    cluster: str,
    made: Sequence[Mapping[str, Any]] = (),
    matmul: Mapping[str, float] | None = None,
    memory_bandwidth: float | None = None,
) -> dict[str, Any]:
    """Add what was measured to a profile, which is made if it is not there; what it is then.

    Raises:
        DataError: the file is none, of another cluster, or of another backend.
    """
    old = check(path, cluster)

    def key(entry: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(entry[name] for name in ("operation", "backend", "devices", "hosts"))

    entries = {key(entry): dict(entry) for entry in [*old.get("collectives", []), *made]}
    new: dict[str, Any] = {"cluster": cluster}
    rates = {**old.get("matmul", {}), **{name: _short(rate) for name, rate in (matmul or {}).items()}}
    bandwidth = _short(memory_bandwidth) if memory_bandwidth else old.get("memory_bandwidth")
    if rates:
        new["matmul"] = rates
    if bandwidth:
        new["memory_bandwidth"] = bandwidth
    _one_backend(entries.values())
    new["collectives"] = [entries[name] for name in sorted(entries)]
    write_whole(path, plain_yaml.write(new))
    return new
