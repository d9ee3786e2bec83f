"""Processes as `/proc` shows them. A pid alone is no proof of identity; with its start time it is."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

GONE_TIMEOUT_S = 10.0


class Process(NamedTuple):
    """One process, and the clock ticks after boot at which it began."""

    pid: int
    started: int

    def alive(self) -> bool:
        """Whether it still runs; a zombie does not."""
        try:
            state, started = _state(Path(f"/proc/{self.pid}/stat").read_text())
        except (OSError, ValueError):
            return False
        return started == self.started and state not in "ZX"

    def children(self) -> list[Process]:
        try:
            text = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text()
        except OSError:
            return []
        return [process for pid in text.split() if (process := of(int(pid)))]


def parse(stat: str) -> Process:
    """The process that a line of `/proc/PID/stat` is about.

    Raises:
        ValueError: it is no such line.
    """
    return Process(int(stat.split()[0]), _state(stat)[1])


def of(pid: int) -> Process | None:
    """The process that has this pid now."""
    try:
        return parse(Path(f"/proc/{pid}/stat").read_text())
    except (OSError, ValueError):
        return None


def sharing_pids_with(init: Process) -> dict[str, list[Process]]:
    """Every process in the pid namespace of `init`, by the name of its program (15 characters at most)."""
    found: dict[str, list[Process]] = {}
    with suppress(OSError):
        space = os.readlink(f"/proc/{init.pid}/ns/pid")
        for entry in os.scandir("/proc"):
            with suppress(OSError):
                if not entry.name.isdigit() or os.readlink(f"/proc/{entry.name}/ns/pid") != space:
                    continue
                process = of(int(entry.name))
                if process and process.alive():
                    found.setdefault(Path(f"/proc/{entry.name}/comm").read_text().strip(), []).append(process)
    return found


def kill(processes: Iterable[Process], timeout_s: float = GONE_TIMEOUT_S) -> bool:
    """SIGKILL each and wait; a process that has taken over a pid is left alone.

    Returns:
        Whether all are gone.
    """
    waiting = [process for process in processes if process.alive()]
    for process in waiting:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    deadline = time.monotonic() + timeout_s
    while waiting and time.monotonic() < deadline:
        for process in waiting:
            with suppress(ChildProcessError):
                os.waitpid(process.pid, os.WNOHANG)  # it may be a child of this very process
        waiting = [process for process in waiting if process.alive()]
        time.sleep(0.01)
    return not waiting


def _state(stat: str) -> tuple[str, int]:
    """State and start time. The name before them is in brackets and may hold anything."""
    fields = stat.rpartition(")")[2].split()
    if len(fields) < 20:
        raise ValueError(stat)
    return fields[0], int(fields[19])
