"""What NCCL ranks measure, as programs, so that their variables are there before NCCL is.

RANK=0 WORLD_SIZE=1 ... python -m tests.gpu.comms SPECS     prints the results as JSON, on rank 0
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from hpctrain.comms.result import Result
from hpctrain.comms.spec import Spec

LIMIT_S = 100


def measure(world: int, specs: Sequence[Spec], **environ: str) -> list[Result]:
    """What so many ranks of this machine measure, one after the other, each on a GPU of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    children = []
    for rank in range(world):
        place = dict(RANK=rank, WORLD_SIZE=world, LOCAL_RANK=rank, LOCAL_WORLD_SIZE=world, MASTER_PORT=port)
        env = {**os.environ, **environ, **{k: str(v) for k, v in place.items()}, "MASTER_ADDR": "127.0.0.1"}
        command = [sys.executable, "-m", "tests.gpu.comms", json.dumps([spec.plain() for spec in specs])]
        children.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    try:
        done = [child.communicate(timeout=LIMIT_S) for child in children]
    finally:
        for child in children:
            child.kill()
    assert [child.returncode for child in children] == [0] * world, "\n".join(said[-3000:] for _, said in done)
    return [Result.of(plain) for plain in json.loads(done[0][0].splitlines()[-1])]


def main() -> None:
    """As one rank."""
    from hpctrain.comms.rank import measured
    from hpctrain.comms.torchbackend import torch_party
    from hpctrain.launch.life.identity import detect

    identity = detect(os.environ)
    assert identity is not None
    with tempfile.TemporaryDirectory() as folder, torch_party(identity, Path(folder), "nccl", 60.0, 1) as party:
        results = [measured(Spec.of(plain), party).plain() for plain in json.loads(sys.argv[1])]
        if identity.rank == 0:
            print(json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
