"""The process dies at every single point where a save changes the disk: the last commit always loads."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from hpctrain.checkpoint import collective, files
from hpctrain.checkpoint.collective import find, save
from hpctrain.checkpoint.verify import verify
from hpctrain.launch.local.zygote import RankFailure
from hpctrain.parallel.comm import Axis
from hpctrain.telemetry.meter import Meter
from tests.checkpoint.state import FakeState, alone, world_axis

POINTS = (
    "make_folder",
    "create",
    "write",
    "fsync",
    "close",
    "fsync_folder",
    "rename",
    "replace",
    "remove",
    "remove_folder",
)


def arm(at: int, half: bool, sync: bool = True) -> list[str]:
    """Kill this process before its `at`-th change of the disk; if that is a write, after half of it, if asked.

    Returns:
        The changes so far; it grows. Without `sync` they are counted, but not waited for: what a killed process
        has written, the kernel keeps.
    """
    done: list[str] = []

    def guard(name: str) -> None:
        real = getattr(files, name)

        def call(*args: Any) -> Any:
            if len(done) == at:
                if name == "write" and half:
                    real(args[0], args[1][: len(args[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            done.append(name)
            return real(*args) if sync or not name.startswith("fsync") else None

        setattr(files, name, call)

    for name in POINTS:
        guard(name)
    return done


def put(run: Path, step: int, axis: Axis) -> None:
    save(run, step, FakeState(axis.index, axis.size, step, tiles=1), {"step": step}, axis, keep=1)


def check(run: Path) -> int:
    """The newest checkpoint is whole and its values are those of its step."""
    found = find(run, alone())
    assert found is not None and not found.refused and found.extra == {"step": found.step}
    assert verify(found.path).valid
    FakeState(0, 1, found.step, tiles=2).load(found.reader)
    return found.step


def over(link: Connection, index: int) -> None:
    """Let two processes talk through a pipe: starting a process group a hundred times would take a minute."""

    def gather(value: object, axis: Axis) -> list[object]:
        link.send(value)
        other = link.recv()
        return [value, other] if index == 0 else [other, value]

    def broadcast(value: object, axis: Axis) -> object:
        return gather(value, axis)[0]

    collective.gather_objects, collective.broadcast_object = gather, broadcast


def saved_by(world: int, run: Path, victim: int, at: int, half: bool) -> bool:
    """Save step 200 in `world` new processes, of which one is killed. Whether all of them ended well."""
    links, children = multiprocessing.Pipe(), []
    for index in range(world):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                links[1 - index].close()
                if world == 2:
                    over(links[index], index)
                arm(at if index == victim else -1, half, sync=False)
                put(run, 200, Axis("world", tuple(range(world)), index, None, Meter()))
                status = 0
            finally:
                os._exit(status)
        children.append(pid)
    for link in links:
        link.close()
    ended = [os.waitpid(pid, 0)[1] for pid in children]
    return not any(ended)


def sweep(folder: Path, world: int, victim: int, half: bool) -> list[int]:
    """Kill at point 0, 1, 2, ... until the save outlives it; the step found after each."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # tracebacks of the survivors
    put(folder / "base", 100, alone())
    outcomes = []
    for at in itertools.count():
        run = folder / str(at)
        shutil.copytree(folder / "base", run)
        if saved_by(world, run, victim, at, half):
            assert check(run) == 200
            return outcomes
        outcomes.append(check(run))
        arm(-1, False, sync=False)
        put(run, 300, alone())
        assert check(run) == 300
        assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["latest", "step-00000300"]
        shutil.rmtree(run)
    raise AssertionError


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("world, victim", [(1, 0), (2, 0), (2, 1)])
def test_killed_at_every_point(
    tmp_path: Path, ranks: Callable[..., list[Any]], world: int, victim: int, half: bool
) -> None:
    outcomes = ranks(0, sweep, tmp_path, world, victim, half)[0]
    assert outcomes == sorted(outcomes), "once the new one is committed it stays"
    if victim == 0:
        assert len(outcomes) > 30 and outcomes.count(200) >= 8
    else:
        assert len(outcomes) > 10 and outcomes.count(100) == len(outcomes)


@pytest.mark.parametrize("victim, change", [(0, "write"), (1, "write"), (1, "fsync_folder"), (0, "rename")])
def test_the_other_rank_is_not_left_waiting(
    tmp_path: Path, ranks: Callable[..., list[Any]], victim: int, change: str
) -> None:
    """The same with a real process group: the survivor ends as well, long before any time limit."""

    def body(at: int) -> list[str]:
        axis = world_axis()
        done = arm(at if axis.index == victim else -1, half=True)
        put(tmp_path / str(at), 200, axis)
        return done

    put(tmp_path / "-1", 100, alone())
    at = ranks(2, body, -1)[victim].index(change)
    put(tmp_path / str(at), 100, alone())
    with pytest.raises(RankFailure) as caught:
        ranks(2, body, at)
    assert "did not end in time" not in str(caught.value)
    assert check(tmp_path / str(at)) == 100
