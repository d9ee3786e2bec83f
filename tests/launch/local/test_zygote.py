"""Ranks forked by the warm parent, and what is left when something dies."""

import contextlib
import gc
import os
import signal
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from hpctrain.launch.local.zygote import RankFailure, Zygote


def gone(pid, within_s=60.0):
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.02)
    return False


def add(x):
    t = torch.tensor([float(dist.get_rank() + x)])
    dist.all_reduce(t)
    return t.item()


def test_ranks_form_a_group(ranks):
    assert ranks(3, add, 1) == [6.0] * 3


def policy():
    return os.sched_getscheduler(0)


def test_ranks_do_not_interrupt_each_other(ranks):
    assert ranks(2, policy) == [os.SCHED_BATCH] * 2


def collect():
    return gc.get_freeze_count(), len(gc.get_objects())


def test_ranks_do_not_collect_what_was_imported(ranks):
    ((frozen, left),) = ranks(1, collect)
    assert frozen > 10_000 and left < frozen / 10


def fail(rank):
    if dist.get_rank() == rank:
        raise ValueError("on purpose")
    dist.barrier()


def test_failed_rank_is_named(ranks):
    with pytest.raises(RankFailure, match=r"on purpose") as caught:
        ranks(2, fail, 1)
    assert caught.value.ranks[0] == 1


def sleep():
    time.sleep(60)


def test_late_rank_is_killed(ranks):
    start = time.monotonic()
    with pytest.raises(RankFailure, match=r"rank 0: did not end in time"):
        ranks(1, sleep, timeout_s=0.5)
    assert time.monotonic() - start < 20


def die(rank):
    if dist.get_rank() == rank:
        print("pending output", end="")
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_dead_rank_is_named_before_those_that_lost_it(ranks):
    with pytest.raises(RankFailure, match=r"^rank 1: was killed by SIGKILL") as caught:
        ranks(2, die, 1)
    assert caught.value.ranks[0] == 1


def die_beside_a_sleeper():
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def test_rank_stopped_after_a_death_is_not_blamed(ranks):
    with pytest.raises(RankFailure) as caught:
        ranks(2, die_beside_a_sleeper)
    assert caught.value.ranks == (0,)
    assert "in time" not in str(caught.value)


def unprintable():
    raise ValueError("\udcff")


def unpicklable():
    return (x for x in ())


def leave():
    os._exit(0)


@pytest.mark.parametrize(
    "function, text",
    [(unprintable, "ValueError"), (unpicklable, "cannot pickle"), (leave, "rank 0: exited with status 0")],
)
def test_every_way_to_leave_is_reported(ranks, function, text):
    with pytest.raises(RankFailure, match=text):
        ranks(0, function)


def start_a_sleeper():
    pid = os.fork()
    if pid == 0:
        time.sleep(60)
        os._exit(0)
    return pid


def test_processes_that_a_rank_leaves_are_killed(ranks):
    (pid,) = ranks(0, start_a_sleeper)
    assert gone(pid)


def write_pid_and_sleep(folder):
    Path(folder, "rank").write_text(str(os.getpid()))
    time.sleep(60)


def owner_of_a_sleeping_world(folder):
    zygote = Zygote(imports=())
    Path(folder, "zygote").write_text(str(zygote._pid))
    try:
        zygote.run(write_pid_and_sleep, 0, folder)
    except RankFailure as error:
        Path(folder, "failure").write_text(str(error))


def killed(folder, who, number):
    """Kill the owner of a world or its zygote while the world runs. Returns who is left."""
    owner = os.fork()
    if owner == 0:
        owner_of_a_sleeping_world(folder)
        os._exit(0)
    pids = {"owner": owner}
    for name in ("zygote", "rank"):
        path, deadline = Path(folder, name), time.monotonic() + 20
        while not (path.exists() and path.read_text()):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        pids[name] = int(path.read_text())
    os.kill(pids[who], number)
    return [name for name, pid in pids.items() if not gone(pid)]


@pytest.mark.parametrize(
    "who, number", [("owner", signal.SIGKILL), ("zygote", signal.SIGTERM), ("zygote", signal.SIGKILL)]
)
def test_nobody_outlives_the_others(ranks, tmp_path, who, number):
    assert ranks(0, killed, tmp_path, who, number) == [[]]
    if who == "zygote":
        assert "is gone" in (tmp_path / "failure").read_text()


class Interrupt(Exception):
    pass


def interrupted():
    """`run` is interrupted, as by Ctrl-C; the next one gets its own answer, not that of the first."""

    def interrupt(number, frame):
        raise Interrupt

    zygote = Zygote(imports=())
    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    with contextlib.suppress(Interrupt):
        zygote.run(time.sleep, 0, 0.6)
    time.sleep(0.6)
    answers = [zygote.run(abs, 0, -7), zygote.run(abs, 0, -8)]
    zygote.close()
    return answers


def test_interrupted_run_does_not_shift_the_answers(ranks):
    assert ranks(0, interrupted) == [[[7], [8]]]


def test_no_rank_identity_without_a_world(ranks):
    assert ranks(0, os.environ.get, "RANK") == [os.environ.get("RANK")]


def leave_at_once():
    """Groups are made and left without a collective: nobody must find the other gone while connecting."""
    dist.new_group([0, 1])
    dist.new_group([2, 3])


def test_a_rank_that_is_done_waits_for_those_still_connecting(ranks):
    for _ in range(10):
        ranks(4, leave_at_once)
