"""What a disk costs a step: ours beside what computing and moving would take, and beside DeepSpeed's own offloading.

A Llama on one CPU rank under ZeRO 3, in float32, with its state on a disk, and the same without offloading, which is
what computing takes. The disk takes part as a contender of its own: in its turn it moves as much as it is measured with
by `hpctrain bench nvme`, by the same code. All take turns (`benchmarks/rounds.py`), and what is reported are medians
over rounds of ratios within a round. Bytes are those that the engine asked the disk for, counted.

    python -m benchmarks.offload [--rounds 11] [--folder /tmp] [KEY=VALUE ...]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.layouts import same_work
from benchmarks.ours import ours
from benchmarks.peers import deepspeed_engines
from benchmarks.rounds import Contender, Record, Work, race, warm_up
from hpctrain.config.load import load
from hpctrain.config.schema import RunConfig
from hpctrain.config.validate import validate
from hpctrain.layout.offload import DiskRates
from hpctrain.layout.units import MIB
from hpctrain.telemetry.disk import keep_rates, measure_disk, transfers

IMPORTS = ("torch._dynamo", "deepspeed", "hpctrain.train.loop", "hpctrain.sharding.deepspeed.engine")

SHAPE = (
    "model.layers=8", "model.hidden=512", "model.heads=8", "model.kv_heads=8", "model.ffn=1376", "model.vocab=4096",
    "model.max_seq=256", "data.seq=256", "train.global_batch=4", "train.micro_batch=4", "optimizer.lr=3e-4",
    "parallel.tp=1", "sharding.stage=3",
)  # fmt: skip

DISK, COMPUTES, PEER = "the disk", "without offloading", "DeepSpeed's own, its default settings"
PLACES = {
    "optimizer state": ("sharding.offload.optimizer=nvme", "sharding.offload.params=cpu"),
    "optimizer state and weights": ("sharding.offload.optimizer=nvme", "sharding.offload.params=nvme"),
    "optimizer state, weights, gradients": (
        "sharding.offload.optimizer=nvme", "sharding.offload.params=nvme", "sharding.offload.gradients=nvme",
    ),
}  # fmt: skip
"""What of ours is on the disk. The first is what DeepSpeed's default settings leave there."""


def config_of(overrides: Sequence[str]) -> RunConfig:
    """The shape with overrides, checked."""
    config = load("llama-tiny", [*SHAPE, *overrides])
    validate(config, 1)
    return config


def disk_alone(folder: str, size: int, block: int, threads: int) -> Work:
    """Writes and reads `size` bytes a step, and counts the seconds of each."""
    seconds = {"reading": 0.0, "writing": 0.0}

    def step() -> float:
        found = transfers(Path(folder), size, block, threads, 1)
        seconds["reading"] += found.read[0]
        seconds["writing"] += found.write[0]
        return 0.0

    return Work(step, 0.0, counts=lambda: dict(seconds))


def contenders(overrides: Sequence[str], folder: Path, size: int, rates: DiskRates) -> list[Contender]:
    """All of them."""
    path = f"sharding.offload.path={folder}"
    return [
        Contender(DISK, disk_alone, (str(folder), size, rates.block, rates.threads), world=0),
        Contender(COMPUTES, ours, (config_of(overrides), 1), world=1),
        *(Contender(n, ours, (config_of([*overrides, *p, path]), 1), world=1) for n, p in PLACES.items()),
        Contender(PEER, deepspeed_engines.on_disk, (config_of(overrides), str(folder)), world=1),
    ]


def bounds(records: dict[str, Record], name: str, size: int) -> list[tuple[float, float]]:
    """Of every round, seconds of computing, and of moving what a step of `name` moves at the rates of that round."""
    out = []
    for at, moved in enumerate(records[name].counts):
        disk = records[DISK].counts[at]
        moving = (moved["read"] * disk["reading"] + moved["written"] * disk["writing"]) / size
        out.append((records[COMPUTES].seconds[at], moving))
    return out


def measure(
    overrides: Sequence[str], rounds: int, folder: Path, size: int = 256 * MIB, rates: DiskRates | None = None
) -> dict[str, Any]:
    """Seconds, bytes, ratios and rows for a table. Forks, as `race` does.

    Args:
        overrides: of the shape.
        rounds: in each of which all have their turn.
        folder: on the disk.
        size: bytes that the disk is measured with in each round; a multiple of its block.
        rates: whose block and threads all use; None measures which suit the disk.

    Raises:
        RuntimeError: one of ours failed, or the folder's disk is read and written through memory.
    """
    with tempfile.TemporaryDirectory(prefix="hpctrain-bench-", dir=folder) as name:
        place = Path(name)
        if not transfers(place, MIB, MIB, 1, 1).direct:
            raise RuntimeError(f"what is read and written in {folder} goes through memory: name a folder on a disk")
        rates = keep_rates(place, rates or measure_disk(place))
        records = race(contenders(overrides, place, size, rates), rounds)
    failed = {name: record.error for name, record in records.items() if record.error is not None}
    if lost := failed.keys() - {PEER}:
        raise RuntimeError("\n".join(f"{name}: {failed[name]}" for name in lost))
    same_work({name: record for name, record in records.items() if name != DISK}, config_of(overrides))
    of_disk = records[DISK].counts
    return {
        "overrides": list(overrides),
        "rounds": rounds,
        "read_bytes_per_second": size / statistics.median(c["reading"] for c in of_disk),
        "write_bytes_per_second": size / statistics.median(c["writing"] for c in of_disk),
        "block": rates.block,
        "threads": rates.threads,
        "contenders": {name: facts(records, name, size) for name in records if name not in failed and name != DISK},
        "cannot_run": failed,
        "rows": rows(records, size),
    }


def facts(records: dict[str, Record], name: str, size: int) -> dict[str, float]:
    """Of one contender, for the record."""
    record = records[name]
    out = {
        "seconds": statistics.median(record.seconds),
        "cpu_seconds": statistics.median(record.cpu),
        "cores_of_others": statistics.median(record.others),
        "bytes_grown": record.grown,
        "loss": record.loss,
    }
    if name in PLACES:
        found = bounds(records, name, size)
        out |= {kind: statistics.median(c[kind] for c in record.counts) for kind in ("read", "written", "waited")}
        out |= {"moving": statistics.median(moving for _, moving in found)}
        out |= {"over_sum": _median(record.seconds, found, sum), "over_greater": _median(record.seconds, found, max)}
    return out


def _median(
    seconds: Sequence[float], found: Sequence[tuple[float, float]], of: Callable[[tuple[float, float]], float]
) -> float:
    return statistics.median(s / of(pair) for s, pair in zip(seconds, found))


def rows(records: dict[str, Record], size: int) -> list[list[str]]:
    """What, measured, beside, ratio: seconds of a step of each of ours beside its bounds, and beside the peer's."""
    out = []
    for name in PLACES:
        record, found = records[name], bounds(records, name, size)
        what, measured = f"Llama, on NVMe: {name}; a step", f"{statistics.median(record.seconds):.2f} s"
        moved = statistics.median(c["read"] + c["written"] for c in record.counts) / 1e9
        for title, of in (("computing + moving", sum), ("the longer of computing and moving", max)):
            bound: Callable[[tuple[float, float]], float] = of
            there = f"{title} {moved:.2f} GB: {statistics.median(map(bound, found)):.2f} s"
            out.append([what, measured, there, f"{_median(record.seconds, found, bound):.2f}"])
        peer = records[PEER]
        if peer.error is not None:
            out.append([what, measured, f"{PEER} cannot run: {peer.error}", "-"])
            continue
        ratio = statistics.median(a / b for a, b in zip(record.seconds, peer.seconds))
        out.append([what, measured, f"{PEER}: {statistics.median(peer.seconds):.2f} s", f"{ratio:.2f}"])
    return out


def main() -> None:
    """Print the result as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings beside those of the shape")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk")
    parser.add_argument("--quick", action="store_true", help="2 rounds")
    args = parser.parse_args()
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ["OMP_NUM_THREADS"] = "1"
    warm_up(IMPORTS)
    print(json.dumps(measure(args.overrides, 2 if args.quick else args.rounds, args.folder), indent=1))


if __name__ == "__main__":
    main()
