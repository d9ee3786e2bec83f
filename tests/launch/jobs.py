"""What ranks do in the tests of `run_local`. Nothing here imports torch: such ranks start in a fraction of a second."""

import os
import signal
import sys
import time
from pathlib import Path

from hpctrain.errors import ConfigError
from hpctrain.launch.identity import detect


def who(extra):
    me = detect(os.environ)
    print(f"I am rank {me.rank}", sys.stdin.read(), flush=True)
    return me.rank, me.world, me.source, extra, os.environ["OMP_NUM_THREADS"], os.environ.get("CUDA_VISIBLE_DEVICES")


def refuse(rank):
    if detect(os.environ).rank == rank:
        raise ConfigError("parallel.tp", 3, "must divide heads=4", "use 1, 2 or 4")
    time.sleep(60)


def break_down(rank):
    if detect(os.environ).rank == rank:
        print("about to divide", flush=True)
        return 1 / 0
    time.sleep(60)


def be_killed(rank):
    if detect(os.environ).rank == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def wait_for_ever(folder, deaf=False):
    if deaf:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Path(folder, f"{detect(os.environ).rank}.pid").write_text(str(os.getpid()))
    time.sleep(60)
