"""The job of `benchmarks/rails.py`: ranks that hpctrain has placed, and all-reduces over their dp groups.

Each rank takes the place that the job's rank table has for it, as one of a training does, and says which interface that
has given it. So that torch is imported once on a node, its first rank then forks a process for each of them, with the
variables that this one's place has set. A wrong mapping changes the rail of that place and nothing else.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from hpctrain.files import write_whole
from hpctrain.lab.spec import MANAGEMENT
from hpctrain.launch.life.identity import detect
from hpctrain.launch.life.process import die_with_parent, exit_now
from hpctrain.launch.place.bind import bind

LIMIT_S = 300
"""Ranks that live longer end."""
LOOK_S = 0.005

ALONG, CROWD, ROTATED, BOUND = "as placed", "all on rail 0", "rotated by node", "rotated, source-bound"


class Mapping(NamedTuple):
    """Which rail a rank listens on, by the number of its node and the rail that it was given; None: that one. And
    whether its connections leave from there, too."""

    rail: Callable[[int, int], int] | None = None
    bound: bool = False


MAPPINGS = {
    ALONG: Mapping(),
    CROWD: Mapping(lambda node, rail: 0),
    ROTATED: Mapping(lambda node, rail: rail + node),
    BOUND: Mapping(lambda node, rail: rail + node, bound=True),
}
"""All but the first are wrong on purpose. Rails are counted modulo their number."""


def body(folder: str, size: int) -> None:
    """One rank of the job.

    Args:
        folder: shared, in which ranks and whoever measures talk.
        size: bytes of the tensor that is summed.
    """
    me, home = detect(os.environ), Path(folder)
    assert me is not None
    bound = bind(me)
    if bound is None:
        raise SystemExit("error: this rank has no place: the batch script has made no rank table.")
    job, binding = bound
    assert job.node is not None
    seat = {
        "rank": me.rank,
        "node": int(job.table.node[binding.row]),
        "rail": binding.rail,
        "interface": os.environ["GLOO_SOCKET_IFNAME"],
        "set": dict(binding.set),
        "rails": [nic.name for nic in job.node.rails],
        "groups": [list(group) for group in job.table.layout.groups("dp")],
    }
    write_whole(home / f"seat-{me.rank}", json.dumps(seat))
    if me.local_rank == 0:
        _fork([_seat(home, rank) for rank in range(me.rank, me.rank + me.local_world)], home, me.world, size)
    else:
        _await(home / "end")


def _seat(folder: Path, rank: int) -> dict[str, Any]:
    path = folder / f"seat-{rank}"
    _await(path)
    seat: dict[str, Any] = json.loads(path.read_text())
    return seat


def _await(path: Path) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not path.exists():
        if time.monotonic() > deadline:
            raise SystemExit(f"error: {path} did not appear in {LIMIT_S} s.")
        time.sleep(LOOK_S)


def _fork(seats: list[dict[str, Any]], folder: Path, world: int, size: int) -> None:
    """A process for each rank of a node; ends with the first that fails, and the others of the job with it."""
    import torch
    import torch.distributed

    me, pids = os.getpid(), []
    for seat in seats:
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                die_with_parent(me)
                signal.alarm(LIMIT_S)
                torch.set_num_threads(1)
                os.environ.update(seat["set"])
                _rank(seat, folder, world, size)
                status = 0
            except Exception as error:
                print(f"rank {seat['rank']}: {error}", file=sys.stderr)
            finally:
                exit_now(status)
        pids.append(pid)
    while pids:
        pid, status = os.wait()
        pids.remove(pid)
        if status:
            exit_now(1)


def _rank(seat: dict[str, Any], folder: Path, world: int, size: int) -> None:
    """Groups of every mapping, then turns as they are asked for."""
    import torch
    import torch.distributed as dist

    rank, placed = seat["rank"], os.environ["GLOO_SOCKET_IFNAME"]
    os.environ["GLOO_SOCKET_IFNAME"] = MANAGEMENT
    store = dist.FileStore(str(folder / "store"), world)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    able = [name for name, mapping in MAPPINGS.items() if not mapping.bound or "LD_PRELOAD" in os.environ]
    own = {}
    for name in able:
        _listen(seat, placed, MAPPINGS[name])
        made = [dist.new_group(group) for group in seat["groups"]]
        own[name] = next(group for group, ranks in zip(made, seat["groups"]) if rank in ranks)
    dist.barrier()
    if rank == 0:
        (folder / "ready").touch()
    data, which, turn = torch.empty(size // 4), torch.empty(1, dtype=torch.int64), 0
    members = len(next(ranks for ranks in seat["groups"] if rank in ranks))
    while True:
        if rank == 0:
            which.fill_(_asked(folder, turn, able))
        dist.broadcast(which, 0)
        if which.item() < 0:
            dist.barrier()  # nobody leaves before all know
            return
        data.fill_(1.0)
        dist.barrier()
        begin = time.perf_counter()
        dist.all_reduce(data, group=own[able[int(which)]])
        span = torch.tensor([-begin, time.perf_counter()], dtype=torch.float64)
        assert data[0] == data[-1] == members
        dist.all_reduce(span, op=dist.ReduceOp.MAX)
        if rank == 0:
            write_whole(folder / f"answer-{turn}", repr(float(span.sum())))
        turn += 1


def _asked(folder: Path, turn: int, able: list[str]) -> int:
    """The mapping of the next turn; -1 where there is none."""
    while not (folder / "end").exists():
        if (folder / f"ask-{turn}").exists():
            return able.index((folder / f"ask-{turn}").read_text())
        time.sleep(LOOK_S)
    return -1


def _listen(seat: dict[str, Any], placed: str, mapping: Mapping) -> None:
    """Have the groups that this process makes from now on listen on a rail, and connect from there if bound."""
    rails = seat["rails"]
    interface = placed if mapping.rail is None else rails[mapping.rail(seat["node"], seat["rail"]) % len(rails)]
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    os.environ.pop("RAILBIND", None)
    if mapping.bound:
        os.environ["RAILBIND"] = own_address(interface)


def own_address(interface: str) -> str:
    """Of an interface of this machine, IPv4."""
    found = json.loads(subprocess.run(["ip", "-json", "-4", "addr", "show", interface], capture_output=True).stdout)
    return str(found[0]["addr_info"][0]["local"])
