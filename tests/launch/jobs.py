"""What ranks do in the tests of `run_local`. Nothing here imports torch: such ranks start in a fraction of a second."""

import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

from hpctrain.errors import ConfigError
from hpctrain.launch.life.identity import detect
from hpctrain.launch.life.stop import StopRequest
from hpctrain.launch.meet.rendezvous import _mpi_broadcast


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
    names += ("SLURMD_NODENAME",)
    found = {name: os.environ.get(name) for name in names}
    found |= {"rank": me.rank, "world": me.world, "local_rank": me.local_rank, "local_world": me.local_world}
    found |= {"life": int(os.environ.get("SLURM_RESTART_COUNT", 0)), "code": hpctrain.__file__, "cwd": os.getcwd()}
    found["host"] = os.uname().nodename
    handled = (signal.SIGTERM, signal.SIGCONT, signal.SIGUSR2)
    found["handlers"] = [getattr(handler, "name", handler.__module__) for handler in map(signal.getsignal, handled)]
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


def obey(folder, lives=1):
    """Waits to be asked to stop, in the first `lives` lives of its job, and leaves a file for each thing it does.

    Returns what a training that stopped would.
    """
    life = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
    me = Path(folder) / f"{detect(os.environ).rank}.{life}"
    me.parent.mkdir(parents=True, exist_ok=True)
    me.with_name(f"{me.name}.began").touch()
    if life >= lives:
        return SimpleNamespace(stopped=False)
    with StopRequest().listening() as stop:
        threading.Thread(target=time.sleep, args=(5,), daemon=True).start()  # any signal may find it, as in a training
        me.with_name(f"{me.name}.listens").touch()
        deadline = time.monotonic() + 120
        while not stop and time.monotonic() < deadline:
            time.sleep(0.02)
    me.with_name(f"{me.name}.{stop.reason}").touch()
    os.kill(os.getpid(), signal.SIGUSR2)  # once more, when it has saved
    time.sleep(0.1)
    return SimpleNamespace(stopped=bool(stop))


def save_when_told(settings, folder):
    """A training whose ranks say when they are in the midst of a save, and go on when a file `go` is there."""
    from hpctrain.checkpoint import files
    from hpctrain.train.run import rank_main

    fsync, folder, rank = files.fsync, Path(folder), detect(os.environ).rank

    def wait(descriptor):
        (folder / f"{rank}.saves").touch()
        while not (folder / "go").exists():
            time.sleep(0.02)
        fsync(descriptor)

    files.fsync = wait
    return rank_main(settings, False)


def through_mpi(folder):
    """What a rank hears of rank 0 through MPI, in a file of its own."""
    me = detect(os.environ)
    heard = _mpi_broadcast(me, f"note of rank {me.rank}", time.monotonic() + 60)
    Path(folder, str(me.rank)).write_text(f"{me.source} {me.mpi} {heard}")


def line_up(file):
    """Adds its job to a file; the first one in it then fails."""
    first = not Path(file).exists()
    with open(file, "a") as out:
        out.write(os.environ["SLURM_JOB_ID"] + "\n")
    if first:
        raise SystemExit(3)


def train_warned(settings):
    """Trains, and has been warned when it begins to."""
    from hpctrain.train.run import rank_main

    os.kill(os.getpid(), signal.SIGUSR2)
    return rank_main(settings, False)


def take_place(folder, spoil=False):
    """Joins the process group as a training does, and leaves what it is bound to; rank 1 may spoil it first."""
    from hpctrain.launch.place import machine
    from hpctrain.launch.rank import bootstrap

    me, choose = detect(os.environ), bootstrap.choose

    def choose_and_spoil(*args):
        if spoil and me.rank == 1:
            os.environ["GLOO_SOCKET_IFNAME"] = "rail0"
            machine.set_affinity(machine.allowed_cpus()[:1])
        return choose(*args)

    bootstrap.choose = choose_and_spoil
    with bootstrap.process_group(me, Path(folder).parent, "cpu", 60.0) as world:
        out = Path(folder, f"{me.rank}.{os.environ['GLOO_SOCKET_IFNAME']}")
        out.parent.mkdir(exist_ok=True)
        out.write_text(world.proof)
