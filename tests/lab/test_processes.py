"""A pid that somebody else has taken over is never killed, and a zombie counts as gone."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator

import pytest

from hpctrain.lab import processes
from hpctrain.lab.processes import Process


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as child:
        yield child
        child.kill()


def test_killed_and_waited_for(sleeper: subprocess.Popen[bytes]) -> None:
    process = processes.of(sleeper.pid)
    assert process and process.alive()
    assert processes.kill([process])
    assert not process.alive()


def test_a_pid_taken_over_is_left_alone(sleeper: subprocess.Popen[bytes]) -> None:
    before = processes.of(sleeper.pid)
    assert before
    stale = Process(before.pid, before.started - 1)
    assert not stale.alive()
    assert processes.kill([stale])
    assert before.alive()


def test_a_zombie_is_not_alive(sleeper: subprocess.Popen[bytes]) -> None:
    process = processes.of(sleeper.pid)
    sleeper.kill()
    deadline = time.monotonic() + 10
    while process and process.alive():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert os.path.exists(f"/proc/{sleeper.pid}/stat")


def test_names_with_brackets_and_blanks() -> None:
    fields = " ".join(["S", "1", *["0"] * 17, "4711", "0"])
    assert processes.parse(f"12 (a) b (c)) {fields}") == Process(12, 4711)


@pytest.mark.parametrize("text", ["", "12", "12 (a) S 1", "x (a) S 1"])
def test_torn_records_are_refused(text: str) -> None:
    with pytest.raises((ValueError, IndexError)):
        processes.parse(text)


def test_children(sleeper: subprocess.Popen[bytes]) -> None:
    me = processes.of(os.getpid())
    assert me and processes.of(sleeper.pid) in me.children()
    assert Process(2**22 + 1, 0).children() == []
