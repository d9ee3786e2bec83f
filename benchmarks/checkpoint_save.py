"""How fast a checkpoint is saved, beside the limit and beside PyTorch's own.

    python -m benchmarks.checkpoint_save --folder /scratch/$USER --mib 512 --ranks 2 --rounds 9

Every rank holds its share of one state, `tensors` equal float32 tensors cut along dim 0. In every round all
contenders save it once, in turn, so that a busy disk is busy for all of them:

    raw    write() of each tensor into one file a rank, then fsync()
    ours   hpctrain.checkpoint.collective.save: checksums, index, manifest and commit included
    dcp    torch.distributed.checkpoint.save of DTensors, with its default sync_files=True

The order turns from round to round. A round's time is that of the slowest rank, from a barrier. Reported are
medians over rounds, and medians of the rounds' ratios to `raw`, as JSON, with the load of the machine before and
after: on a busy one they say little. The first round is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hpctrain.launch.local.zygote import Zygote

CONTENDERS = ("raw", "ours", "dcp")
TENSORS, WIDTH = 16, 1024


def main() -> None:
    """Run the rounds and print JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to measure")
    parser.add_argument("--mib", type=int, default=512, help="size of the state over all ranks, MiB")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9, help="that count")
    parser.add_argument("--quick", action="store_true", help="2 rounds of 64 MiB")
    options = parser.parse_args()
    mib, rounds = (64, 2) if options.quick else (options.mib, options.rounds)
    zygote = Zygote(
        imports=("torch.distributed.checkpoint", "torch.distributed.tensor", "hpctrain.checkpoint.collective")
    )
    try:
        print(json.dumps(measure(zygote, options.folder, mib, options.ranks, rounds), indent=1))
    finally:
        zygote.close()


def measure(zygote: Zygote, disk: Path, mib: int, ranks: int, rounds: int) -> dict[str, Any]:
    """Medians, ratios to `raw`, and rows for a table.

    Args:
        zygote: forks the ranks.
        disk: folder on the disk to measure.
        mib: size of the state over all ranks, MiB; at least one a rank.
        ranks: that save it.
        rounds: that count.
    """
    folder, before = Path(tempfile.mkdtemp(prefix="hpctrain-bench-", dir=disk)), os.getloadavg()[0]
    try:
        times = zygote.run(rank_times, ranks, folder, mib, rounds, timeout_s=1800.0)[0]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return report(times, mib, ranks) | {"load": [before, os.getloadavg()[0]]}


def rank_times(folder: Path, mib: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each round by contender, on one rank; the same on all."""
    import torch
    import torch.distributed as dist

    rank, world = dist.get_rank(), dist.get_world_size()
    rows = (mib << 20) // (4 * WIDTH * TENSORS * world)
    generator = torch.Generator().manual_seed(rank)
    shards = [torch.randn(rows, WIDTH, generator=generator) for _ in range(TENSORS)]
    contenders = {"raw": raw(shards, rank), "ours": ours(shards, rank, world), "dcp": dcp(shards, world)}
    times: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for at in range(rounds + 1):
        for name in CONTENDERS[at % 3 :] + CONTENDERS[: at % 3]:
            target = folder / name
            if rank == 0:
                shutil.rmtree(target, ignore_errors=True)
                target.mkdir()
                os.sync()
            dist.barrier()
            began = time.perf_counter()
            contenders[name](target)
            seconds = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            if at:
                times[name].append(float(seconds))
    return times


def raw(shards: list, rank: int) -> Callable[[Path], None]:
    """The limit: the bytes, and nothing else."""

    def run(target: Path) -> None:
        fd = os.open(target / str(rank), os.O_WRONLY | os.O_CREAT)
        for shard in shards:
            view = memoryview(shard.numpy()).cast("B")
            done = 0
            while done < len(view):
                done += os.write(fd, view[done:])
        os.fsync(fd)
        os.close(fd)

    return run


def ours(shards: list, rank: int, world: int) -> Callable[[Path], None]:
    """A source that holds the shards."""
    import torch.distributed as dist

    from hpctrain.checkpoint.collective import save
    from hpctrain.parallel.comm import Axis
    from hpctrain.sharding.state import WEIGHT, Piece
    from hpctrain.telemetry.meter import Meter

    axis = Axis("world", tuple(range(world)), rank, dist.group.WORLD if world > 1 else None, Meter())

    class Source:
        def pieces(self) -> list[Piece]:
            rows, width = shards[0].shape
            whole, start = (rows * world, width), (rows * rank, 0)
            return [
                Piece(f"t{i}", WEIGHT, whole, start, (rows, width), t.dtype, lambda t=t: t)  # type: ignore[misc]
                for i, t in enumerate(shards)
            ]

        def scalars(self) -> dict[str, float]:
            return {}

        def load(self, reader: object) -> None: ...

    return lambda target: save(target, 1, Source(), {}, axis) and None


def dcp(shards: list, world: int) -> Callable[[Path], None]:
    """The same shards as DTensors."""
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (world,))
    state = {f"t{i}": DTensor.from_local(t, mesh, [Shard(0)]) for i, t in enumerate(shards)}
    return lambda target: checkpoint.save(state, checkpoint_id=target) and None


def report(times: dict[str, list[float]], mib: int, ranks: int) -> dict[str, Any]:
    """Of the seconds of each round by contender."""
    seconds = {name: statistics.median(times[name]) for name in CONTENDERS}
    ratio = {n: statistics.median(raw / own for raw, own in zip(times["raw"], times[n])) for n in CONTENDERS}
    rate = {name: (mib << 20) / 1e6 / s for name, s in seconds.items()}
    what = f"checkpoint save, {mib} MiB over {ranks} ranks"
    limit = f"raw write and fsync: {rate['raw']:,.0f} MB/s"
    return {
        "mib": mib,
        "ranks": ranks,
        "seconds": seconds,
        "ratio_to_raw": ratio,
        "rounds": times,
        "rows": [
            [what, f"{rate['ours']:,.0f} MB/s", limit, f"{ratio['ours']:.2f}"],
            [f"{what}, torch.distributed.checkpoint", f"{rate['dcp']:,.0f} MB/s", limit, f"{ratio['dcp']:.2f}"],
        ],
    }


if __name__ == "__main__":
    main()
