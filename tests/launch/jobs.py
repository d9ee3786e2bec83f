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


def report(folder):
    """What a rank of a Slurm job finds, in a file of its own."""
    import json

    import hpctrain

    me = detect(os.environ)
    names = ("CUDA_VISIBLE_DEVICES", "SLURM_CPUS_PER_TASK", "SLURM_JOB_ID", "SLURM_NODEID", "PMIX_RANK", "PMI_RANK")
    found = {name: os.environ.get(name) for name in names}
    found |= {"rank": me.rank, "world": me.world, "local_rank": me.local_rank, "local_world": me.local_world}
    found |= {"life": int(os.environ.get("SLURM_RESTART_COUNT", 0)), "code": hpctrain.__file__, "cwd": os.getcwd()}
    handled = (signal.SIGTERM, signal.SIGCONT, signal.SIGUSR2)
    found["handlers"] = [getattr(signal.getsignal(number), "name", "ours") for number in handled]
    Path(folder).mkdir(parents=True, exist_ok=True)
    part = Path(folder) / f".{me.rank}.part"
    part.write_text(json.dumps(found))
    part.replace(Path(folder) / f"{me.rank}.json")


def sleep(folder, seconds=60):
    report(folder)
    time.sleep(seconds)


def sleep_once(folder):
    """Sleeps in the first life of its job only."""
    sleep(folder, 0 if os.environ.get("SLURM_RESTART_COUNT") else 60)


def line_up(file):
    """Adds its job to a file; the first one in it then fails."""
    first = not Path(file).exists()
    with open(file, "a") as out:
        out.write(os.environ["SLURM_JOB_ID"] + "\n")
    if first:
        raise SystemExit(3)
