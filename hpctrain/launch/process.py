"""Small facts about processes: how one ended, that it ends with its parent, that it ends at once."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from contextlib import suppress
from typing import NoReturn

_PR_SET_PDEATHSIG = 1


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
