"""A rank's process group: how it comes up, what its peers see when it fails, and torchrun end to end."""

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

from hpctrain.errors import ConfigError, LaunchError
from hpctrain.launch.life.identity import ALONE, Identity
from hpctrain.launch.life.process import exit_now
from hpctrain.launch.local.zygote import RankFailure
from hpctrain.launch.meet.rendezvous import rendezvous_file
from hpctrain.launch.meet.watchdog import PeerLost
from hpctrain.launch.place import device
from hpctrain.launch.rank import bootstrap
from hpctrain.launch.rank.body import run_rank
from hpctrain.launch.rank.bootstrap import process_group


def identity(world):
    """This rank, with the test's own group out of the way."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    return Identity(rank, world, rank, world, "srun", "slurm-1-0-0")


def total():
    t = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(t)
    return t.item()


def bring_up(folder):
    me = identity(2)
    with process_group(me, folder, "cpu", 30.0, threads=3) as world:
        value = total()
        if me.rank == 1:
            time.sleep(0.3)  # rank 0 leaves first, and keeps the store until this one has gone
            world.store.add("late", 1)
        facts = (value, world.device.type, world.threads, torch.get_num_threads(), os.environ["GLOO_SOCKET_IFNAME"])
    return facts, sorted(world.seconds), min(world.seconds.values()) >= 0, dist.is_initialized()


def test_group_comes_up_and_goes_down(ranks, tmp_path):
    facts = ((3.0, "cpu", 3, 3, "lo"), ["import", "init", "rendezvous"], True, False)
    assert ranks(2, bring_up, tmp_path) == [facts] * 2
    assert not list((tmp_path / "rendezvous").iterdir())


def leave_at_once(folder):
    """Rank 0 takes longer to join than the other one to do its work."""
    me, join, joined = identity(2), dist.init_process_group, folder / "joined"

    def slowly(*args, **options):
        join(*args, **options)
        if me.rank == 0:
            time.sleep(1)
            joined.touch()

    dist.init_process_group = slowly
    with process_group(me, folder, "cpu", 30.0):
        pass
    return joined.exists()


def test_nobody_takes_the_group_down_before_all_have_joined(ranks, tmp_path):
    assert ranks(2, leave_at_once, tmp_path) == [True, True]


def interface_is_left_alone(folder):
    me = identity(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo,"
    with process_group(me, folder, "cpu", 5.0):
        return os.environ["GLOO_SOCKET_IFNAME"]


def test_chosen_interface_is_kept(ranks, tmp_path):
    assert ranks(1, interface_is_left_alone, tmp_path) == ["lo,"]


def alone(folder):
    with process_group(ALONE, folder, "cpu", 5.0) as world:
        return total(), world.threads == len(os.sched_getaffinity(0))


def test_world_of_one_needs_no_network(ranks, tmp_path):
    assert ranks(0, alone, tmp_path) == [(1.0, True)]
    assert not list(tmp_path.iterdir())


def timeout_of_groups(folder):
    with process_group(identity(2), folder, "cpu", 2.0):
        start = time.monotonic()
        if dist.get_rank() == 0:
            with pytest.raises(PeerLost):  # as the body of a rank would see it
                try:
                    dist.barrier()
                except RuntimeError as error:
                    assert bootstrap._is_lost_peer(error)
                    raise PeerLost("") from error
        else:
            time.sleep(3.0)
        return time.monotonic() - start


def test_groups_have_the_timeout(ranks, tmp_path):
    try:
        waited = ranks(2, timeout_of_groups, tmp_path)[0]
    except RankFailure as failure:  # the broken group may also fail to come down
        pytest.fail(str(failure))
    assert 1.5 < waited < 3.5


def body(folder, how):
    me = identity(3)
    with process_group(me, folder, "cpu", 60.0):
        total()
        if me.rank == 1:
            # In flight, and never joined by the others: an ordinary exit would wait for it.
            pending = dist.all_reduce(torch.zeros(8), async_op=True)
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ConfigError("a.b", 1, "is not allowed") if how == "refused" else ValueError(f"on purpose {pending}")
        dist.recv(torch.zeros(1), 1)


def failing_rank(folder, how):
    start = time.monotonic()
    run_rank(body, (folder, how), lambda error: note(folder, dist.get_rank(), error, time.monotonic() - start))


def note(folder, rank, error, seconds):
    (folder / f"said-{rank}").write_text(f"{type(error).__name__}|{seconds:.1f}|{error}")


@pytest.mark.parametrize(
    "how, status, says",
    [
        ("raised", "exited with status 1", "stopped because rank 1 failed first: ValueError: on purpose"),
        ("refused", "exited with status 2", "stopped because rank 1 failed first: ConfigError: a.b=1"),
        ("killed", "was killed by SIGKILL", "lost the connection to another rank"),
    ],
)
def test_peers_of_a_failed_rank_see_it_within_seconds(ranks, tmp_path, how, status, says):
    start = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        ranks(3, failing_rank, tmp_path, how)
    assert time.monotonic() - start < 15
    assert caught.value.ranks[0] == 1
    assert f"rank 1: {status}" in str(caught.value)
    for rank in (0, 2):
        kind, seconds, text = (tmp_path / f"said-{rank}").read_text().split("|", 2)
        assert (kind, float(seconds) < 8.0) == ("PeerLost", True)
        assert text.startswith(f"rank {rank} {says}")


def test_absent_gpu_is_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with (
        pytest.raises(LaunchError, match=r"cluster.device=cuda, but torch sees no GPU"),
        process_group(ALONE, tmp_path, "cuda"),
    ):
        pass


def test_device_is_chosen_by_local_rank(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert device.choose("auto", Identity(5, 8, 1, 4, "srun", "k")) == torch.device("cuda", 1) == chosen[0]
    with pytest.raises(LaunchError, match=r"number 4 on .*, which has 4 visible GPUs"):
        device.choose("auto", Identity(4, 8, 4, 8, "srun", "k"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # the launcher shows each rank its own
    assert device.choose("cuda", Identity(4, 8, 4, 8, "srun", "k")) == torch.device("cuda", 0)


def status_of(how):
    def work():
        raise {"exit": SystemExit(7), "text": SystemExit("why"), "none": SystemExit(), "key": KeyboardInterrupt()}[how]

    pid = os.fork()
    if pid == 0:
        run_rank(work)
        exit_now(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("how, status", [("exit", 7), ("text", 1), ("none", 0), ("key", 130)])
def test_status_of_a_rank(ranks, how, status):
    assert ranks(0, status_of, how) == [status]


SCRIPT = """
import os, sys
from pathlib import Path
import torch, torch.distributed as dist
from hpctrain.launch.rank.bootstrap import process_group
from hpctrain.launch.life.identity import detect
me = detect(os.environ)
with process_group(me, Path(sys.argv[1]), "cpu", 60.0) as world:
    t = torch.tensor([me.rank + 1.0]); dist.all_reduce(t)
    Path(sys.argv[1], f"{me.rank}.out").write_text(f"{me.source} {me.world} {me.master and me.master[2]} {t.item()}")
"""


def test_torchrun_end_to_end(tmp_path):
    (tmp_path / "job.py").write_text(SCRIPT)
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run([*run, str(tmp_path / "job.py"), str(tmp_path)], env=env, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()
    assert [(tmp_path / f"{r}.out").read_text() for r in range(2)] == ["torchrun 2 True 3.0"] * 2
    assert not rendezvous_file(tmp_path, ALONE).parent.exists()


MPI_SCRIPT = """
import hpctrain.launch.meet.rendezvous as rendezvous
from mpi4py import MPI
rendezvous._read = lambda path: None  # what the file says must not be needed
"""


def leave_out(why):
    """A test that this machine cannot run; in CI it has to."""
    (pytest.fail if os.environ.get("CI") else pytest.skip)(why)


def test_mpirun_end_to_end(tmp_path):
    mpirun = shutil.which("mpirun", path=f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}")
    if mpirun is None:
        leave_out("there is no mpirun beside Python or on PATH")
    (tmp_path / "job.py").write_text("import mpi4py; mpi4py.rc.initialize = False" + MPI_SCRIPT + SCRIPT)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    run = [mpirun, "-n", "2", *(["--oversubscribe"] if "Open MPI" in _version(mpirun) else [])]
    done = subprocess.run(
        [*run, sys.executable, str(tmp_path / "job.py"), str(tmp_path)], env=env, capture_output=True, timeout=120
    )
    if b"cannot load MPI library" in done.stderr:
        leave_out("mpi4py finds no MPI library; MPI4PY_LIBMPI names one")
    assert done.returncode == 0, done.stderr.decode()
    assert [(tmp_path / f"{r}.out").read_text() for r in range(2)] == ["mpirun 2 None 3.0"] * 2


def _version(mpirun):
    return subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=30).stdout
