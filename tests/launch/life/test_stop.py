"""A signal becomes a flag, whenever it comes."""

from __future__ import annotations

import os
import signal

from hpctrain.launch.life.stop import SIGNALS, StopRequest, hold_back


def listen_twice():
    """In a process of its own: handlers and masks are the process'."""
    seen = []
    hold_back([signal.SIGUSR2])
    os.kill(os.getpid(), signal.SIGUSR2)
    before = [signal.getsignal(number) for number in SIGNALS]
    with StopRequest().listening() as stop:
        seen.append((bool(stop), stop.reason))
        os.kill(os.getpid(), signal.SIGTERM)
        seen.append(stop.reason)
    seen.append([signal.getsignal(number) for number in SIGNALS] == before)
    with StopRequest().listening() as stop:
        seen.append((bool(stop), stop.reason))
        os.kill(os.getpid(), signal.SIGTERM)
        seen.append(stop.reason)
    return seen


def test_signals_set_the_flag_also_one_that_came_too_early(ranks):
    (seen,) = ranks(0, listen_twice)
    assert seen == [(True, "SIGUSR2"), "SIGUSR2", True, (False, "a signal to another rank"), "SIGTERM"]
