"""`hpctrain bench collectives` beside a bare loop of the same calls, in the same processes.

Two ranks hold the same buffers and take turns, round after round: a loop that does nothing but call
`torch.distributed.all_reduce` (or mpi4py's `Allreduce`) and looks at the clock before and after, and the clock of the
suite, which also keeps the time of every iteration. A round's time is that of the slowest rank. Reported are medians
over rounds of the ratio within a round, for sizes from 1 MiB on. MB/s are algbw, 1e6 bytes/s.

    python -m benchmarks.collectives [--quick]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
SIZES = (1 << 20, 4 << 20)
OPERATIONS = ("all_reduce", "all_gather")
BARE, OURS = "bare loop", "hpctrain bench"


def turns(party: Any, bare: Callable[[str, Any], Callable[[], Any]], rounds: int, calls: int) -> list[dict[str, Any]]:
    """Times of both by operation and size, on one rank; the same on all.

    Args:
        party: all ranks.
        bare: makes the bare call of an operation on given buffers.
        rounds: that count.
        calls: of a turn.
    """
    from hpctrain.comms.backend import Task
    from hpctrain.comms.buffers import allocate
    from hpctrain.comms.clock import timed
    from hpctrain.comms.formulas import counts
    from hpctrain.comms.pattern import contents

    group, found = party.groups([tuple(range(party.world))]), []
    for operation in OPERATIONS:
        for size in SIZES:
            count = counts(operation, size, party.world, 4).count
            inside = contents(operation, count, party.world, party.rank)
            in_place = operation == "all_reduce"
            buffers = allocate(operation, inside, party.rank, 0, in_place, "float32", party.memory)
            ours, plain = group.call(Task(operation, buffers, count)), bare(operation, buffers)

            def loop(call: Callable[[], Any] = plain) -> float:
                begin = time.perf_counter()
                for _ in range(calls):
                    call()
                return time.perf_counter() - begin

            contenders = {BARE: loop, OURS: lambda call=ours: sum(timed(call, calls))}
            times: dict[str, list[float]] = {name: [] for name in contenders}
            for turn in range(rounds + 2):
                for name in sorted(contenders, reverse=bool(turn % 2)):
                    party.barrier()
                    seconds = max(party.gather(contenders[name]()))
                    if turn > 1:
                        times[name].append(seconds / calls)
            found.append({"operation": operation, "size": size, "seconds": times})
    return found


def over_gloo(rounds: int, calls: int) -> list[dict[str, Any]]:
    """One forked rank of a gloo group."""
    import torch
    import torch.distributed as dist

    from hpctrain.comms.torchbackend import TorchParty, _gather_single

    def bare(operation: str, buffers: Any) -> Callable[[], Any]:
        if operation == "all_reduce":
            return lambda: dist.all_reduce(buffers.receive)
        return lambda: _gather_single(buffers.receive, buffers.send)

    return turns(TorchParty(None, "gloo", torch.device("cpu"), 120.0), bare, rounds, calls)


def over_mpi(folder: Path, rounds: int, calls: int) -> None:
    """One rank that mpirun started; rank 0 leaves what it found in the folder."""
    from hpctrain.comms.mpibackend import MpiParty, load
    from hpctrain.telemetry.meter import Meter

    mpi = load()
    party = MpiParty(mpi, mpi.COMM_WORLD.Get_rank(), Meter())

    def bare(operation: str, buffers: Any) -> Callable[[], Any]:
        if operation == "all_reduce":
            return lambda: party.comm.Allreduce(mpi.IN_PLACE, buffers.receive, mpi.SUM)
        return lambda: party.comm.Allgather(buffers.send, buffers.receive)

    found = turns(party, bare, rounds, calls)
    if party.rank == 0:
        (folder / "mpi.json").write_text(json.dumps(found))


def start_mpi(rounds: int, calls: int) -> list[dict[str, Any]]:
    """Two ranks under mpirun; nothing where there is none."""
    from hpctrain.comms.local import environment, mpirun
    from hpctrain.errors import LaunchError

    try:
        program = mpirun()
    except LaunchError as error:
        print(error, file=sys.stderr)
        return []
    with tempfile.TemporaryDirectory(prefix="hpctrain-bench-") as folder:
        ours = [sys.executable, "-m", "benchmarks.collectives", "--mpi", folder, str(rounds), str(calls)]
        crowd = ["--oversubscribe", "--bind-to", "none"]
        subprocess.run([program, "-n", "2", *crowd, *ours], cwd=ROOT, env=environment(2), check=True, timeout=900)
        found: list[dict[str, Any]] = json.loads((Path(folder) / "mpi.json").read_text())
        return found


def rows(backend: str, peer: str, found: list[dict[str, Any]]) -> list[list[str]]:
    """Lines of the table."""
    out = []
    for one in found:
        seconds, size = one["seconds"], one["size"]
        ratio = statistics.median(b / a for a, b in zip(seconds[OURS], seconds[BARE]))
        name = f"`bench collectives`, {one['operation']} of {size >> 20} MiB, {backend}, 2 ranks"
        mine, other = (size / statistics.median(seconds[of]) / 1e6 for of in (OURS, BARE))
        out.append([name, f"{mine:,.0f} MB/s", f"bare loop of {peer}: {other:,.0f} MB/s", f"{ratio:.2f}"])
    return out


def main() -> None:
    """Run the rounds and print JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=121, help="that count")
    parser.add_argument("--calls", type=int, default=10, help="of a turn")
    parser.add_argument("--quick", action="store_true", help="5 rounds")
    parser.add_argument("--mpi", nargs=3, metavar=("FOLDER", "ROUNDS", "CALLS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.mpi:
        over_mpi(Path(options.mpi[0]), int(options.mpi[1]), int(options.mpi[2]))
        return
    from hpctrain.launch.local.zygote import Zygote

    rounds = 5 if options.quick else options.rounds
    load = os.getloadavg()[0]
    zygote = Zygote(imports=("torch.distributed", "hpctrain.comms.torchbackend"))
    try:
        gloo = zygote.run(over_gloo, 2, rounds, options.calls, timeout_s=900.0)[0]
    finally:
        zygote.close()
    mpi = start_mpi(rounds, options.calls)
    table = rows("gloo", "torch.distributed", gloo) + rows("MPI", "mpi4py", mpi)
    print(json.dumps({"rows": table, "gloo": gloo, "mpi": mpi, "load": [load, os.getloadavg()[0]]}, indent=1))


if __name__ == "__main__":
    main()
