"""Small facts about processes: how one ended, that it ends with its parent, that it ends at once and says why."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

from hpctrain.errors import HpctrainError, os_sentence

_PR_SET_PDEATHSIG = 1

_CLOCK = """
import os, select, signal, sys
if not select.select([0], [], [], float(sys.argv[1]))[0]:
    print("error:", sys.argv[3], file=sys.stderr, flush=True)
    os.kill(int(sys.argv[2]), signal.SIGKILL)
"""
"""Program of `at_most`: seconds, process, sentence. Its input ends with the block that it watches."""

Report = Callable[[BaseException], None]

_reports: list[Report] = []
"""Whom `fail_now` tells: like atexit, this belongs to the process."""


def how_it_ended(code: int) -> str:
    """An exit status as `subprocess` gives it, in words."""
    if code >= 0:
        return f"exited with status {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when process `parent`, its parent, is gone."""
    with suppress(OSError, AttributeError):  # not Linux
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def let_others_finish() -> None:
    """Have this process and its children not interrupt each other when they wake up: `SCHED_BATCH`, where it is known.

    For ranks that share CPUs. What a rank sends over gloo wakes another one, which would take its CPU away from it
    while it holds the lock of the connection; its own thread for that connection then spins for as long.
    """
    with suppress(AttributeError, OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


@contextmanager
def at_most(seconds: float, sentence: str) -> Iterator[None]:
    """Kill this process, with a sentence on stderr, where the block takes longer.

    For a library that may wait for ever with the interpreter's lock held, so that neither a thread nor a handler of a
    signal gets its turn: another process looks at the clock. It ends with the block, and with this process.
    """
    command = [sys.executable, "-I", "-S", "-c", _CLOCK, str(max(seconds, 0.0)), str(os.getpid()), sentence]
    with subprocess.Popen(command, stdin=subprocess.PIPE):
        yield


def exit_now(status: int) -> NoReturn:
    """Leave without tearing anything down.

    A rank that failed must go this way. With a collective in flight that its peers will never join, gloo waits
    for it in its destructor and in abort, so an ordinary exit lasts as long as the timeout of the group, and
    the peers, whose connections stay open, hang as long.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(status)


@contextmanager
def reporting(report: Report) -> Iterator[None]:
    """While inside, `fail_now` tells `report` about the error before the process ends."""
    _reports.append(report)
    try:
        yield
    finally:
        _reports.remove(report)


def fail_now(error: BaseException) -> NoReturn:
    """Say on stderr why this process fails, tell whoever wants to know, and leave at once. From any thread."""
    status = 1
    if isinstance(error, SystemExit):
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    elif isinstance(error, KeyboardInterrupt):
        status = 128 + signal.SIGINT
    elif isinstance(error, HpctrainError):
        status = error.exit_code
        print(f"error: {error}", file=sys.stderr)
    elif isinstance(error, OSError) and (sentence := os_sentence(error)) is not None:
        print(f"error: {sentence}", file=sys.stderr)
    else:
        traceback.print_exception(error)
    for report in _reports:
        with suppress(Exception):
            report(error)
    exit_now(status)
