"""Ranks on a lab with rails that measure one thing after the other: torch is imported once a node, ranks are forked.

python -m tests.comms.fleet FOLDER GPUS     as the one task of each node
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpctrain.comms.result import RESULT_FILE, Result
from hpctrain.comms.spec import Spec
from hpctrain.lab import Cluster, railbind
from hpctrain.launch.life.process import die_with_parent, exit_now

ROOT = Path(__file__).parents[2]
LIMIT_S = 240
ALONG = {"GLOO_SOCKET_IFNAME": "rail{local_rank}"}
"""Every rank listens on its rail. gloo connects from wherever the kernel likes, so pairs across rails share one."""
BOUND = {**ALONG, "RAILBIND": "{address:rail{local_rank}}"}
"""Connections leave by the rank's own rail, as NICs do: what goes to another rail crosses the spine."""


class Fleet:
    """Takes measurements of a lab's ranks."""

    def __init__(self, lab: Cluster, folder: Path, child: subprocess.Popen[str]) -> None:
        self.lab, self.folder, self.child, self.number = lab, folder, child, 0

    def measure(self, spec: Spec, environ: dict[str, str] = ALONG) -> Result:
        """What all ranks measure together, gloo along their rails."""
        self.number += 1
        home = self.folder / f"{self.number:03d}"
        home.mkdir()
        plain = replace(spec, environ=environ, backend="gloo").plain()
        order = {"spec": plain, "master": self.lab.spec.address("n0"), "port": 20000 + self.number}
        part = self.folder / "part"
        part.write_text(json.dumps(order))
        part.rename(self.folder / f"{self.number:03d}.json")
        deadline = time.monotonic() + LIMIT_S
        while len(list(self.folder.glob(f"{self.number:03d}.done-*"))) < self.lab.spec.nodes:
            assert self.child.poll() is None and time.monotonic() < deadline, "the ranks have ended, or take too long"
            time.sleep(0.05)
        return Result.of(json.loads((home / RESULT_FILE).read_text()))


@contextmanager
def fleet(lab: Cluster, folder: Path) -> Iterator[Fleet]:
    """All GPUs of a lab with rails."""
    spec = lab.spec
    preload = () if railbind.obstacle(spec) else (f"{k}={v}" for k, v in railbind.environment(spec).items())
    placed = (f"--nodes={spec.nodes}", "--ntasks-per-node=1", f"--gres=gpu:{spec.gpus}", "-K1")
    command = ["srun", *placed, "env", *preload, "OMP_NUM_THREADS=1", sys.executable, "-m", "tests.comms.fleet"]
    env = {**lab.environment(), "PYTHONPATH": str(ROOT)}
    child = subprocess.Popen([*command, str(folder), str(spec.gpus)], cwd=ROOT, env=env, text=True)
    try:
        yield Fleet(lab, folder, child)
    finally:
        (folder / "end").touch()
        try:
            child.wait(30)
        except subprocess.TimeoutExpired:
            child.terminate()
            child.wait(30)


def on_node(folder: Path, gpus: int) -> None:
    """Fork ranks for each order, until there is the file `end`."""
    import torch
    import torch.distributed

    from hpctrain.comms import kinds, rank

    assert kinds.KINDS and rank.rank_main
    torch.set_num_threads(1)
    node, nodes, me = int(os.environ["SLURM_NODEID"]), int(os.environ["SLURM_NNODES"]), os.getpid()
    number = 1
    while not (folder / "end").exists():
        order = folder / f"{number:03d}.json"
        if not order.exists():
            time.sleep(0.05)
            continue
        plain, pids = json.loads(order.read_text()), []
        for local in range(gpus):
            pid = os.fork()
            if pid == 0:
                _rank(folder / f"{number:03d}", plain, node * gpus + local, nodes * gpus, local, gpus, me)
            pids.append(pid)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        if any(codes):
            exit_now(1)
        (folder / f"{number:03d}.done-{node}").touch()
        number += 1


def _rank(home: Path, order: dict[str, Any], rank: int, world: int, local: int, gpus: int, parent: int) -> None:
    status = 1
    try:
        die_with_parent(parent)
        signal.alarm(LIMIT_S)
        place = dict(RANK=rank, WORLD_SIZE=world, LOCAL_RANK=local, LOCAL_WORLD_SIZE=gpus)
        place |= dict(MASTER_ADDR=order["master"], MASTER_PORT=order["port"])
        os.environ.update({name: str(value) for name, value in place.items()})
        from hpctrain.comms.rank import rank_main

        rank_main(order["spec"], str(home))
        status = 0
    except BaseException as error:
        print(f"rank {rank}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        exit_now(status)


if __name__ == "__main__":
    on_node(Path(sys.argv[1]), int(sys.argv[2]))
