"""The body of a rank that Slurm started: what the pickle of a submission names."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

from hpctrain.launch.client import SlurmError, call
from hpctrain.launch.identity import slurm_job
from hpctrain.launch.rank import run_rank
from hpctrain.launch.sbatch import WARNING_SIGNAL
from hpctrain.launch.stop import hold_back

WARNING = signal.Signals[f"SIG{WARNING_SIGNAL}"]
"""What Slurm sends before a time limit, and at preemption where the site wants it."""

PATIENCE_S = 600.0
"""How long a rank that has saved tries to put its job back: the controller may just be starting anew."""

_BEING_ENDED = ("COMPLETING", "CANCELLED", "PENDING", "REQUEUED")


def slurm_task(function: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Call `function(*args)` as one rank.

    If what it returns has `stopped` set, it was asked to stop and has saved: the job is requeued, unless `outlived`
    says that it runs anew already.

    What is pickled at submission is this, a function's name and plain settings, so it decides nothing that a rank
    has to find out when it starts, such as the checkpoint to continue from.
    """
    hold_back([WARNING])  # until the function listens
    # submitit ignores SIGTERM, and requeues at a warning from rank 0, by a guess at what it means.
    for number in (signal.SIGTERM, signal.SIGCONT):
        signal.signal(number, signal.SIG_DFL)
    # One more warning must not end a rank that has saved. Threads that began while it listened do not block it.
    signal.signal(WARNING, _heed_not)
    value = run_rank(function, args)
    if (
        getattr(value, "stopped", False)
        and not getattr(value, "outlived", False)
        and os.environ.get("SLURM_PROCID") == "0"
    ):
        requeue_self(os.environ)
    return value


def _heed_not(number: int, frame: FrameType | None) -> None:
    """Not SIG_IGN, which would throw away what waits to be heard."""


def requeue_self(env: Mapping[str, str]) -> bool:
    """Put this job back into the queue; Slurm ends it for that. Everything that is to last is on the disk by now.

    A job that leaves by itself when it is asked to counts as completed, so it has to do this. But one that Slurm is
    ending already is left to it: somebody cancelled it, and it must not come back, or requeued it. Only a time limit
    that passed while it saved is no such end.

    Returns:
        Whether it was requeued.

    Raises:
        SlurmError: it is not a job that may be requeued.
    """
    deadline, pause = time.monotonic() + PATIENCE_S, 1.0
    while True:
        try:
            return _requeue(slurm_job(env))
        except SlurmError as error:
            if time.monotonic() + pause > deadline:
                raise
            print(f"{error} Trying again in {pause:.0f} s.", file=sys.stderr, flush=True)
        time.sleep(pause)
        pause = min(2 * pause, 60.0)


def _requeue(job: str) -> bool:
    said = call(["squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T|%r"]).strip()
    state, _, reason = said.partition("|")
    if state in _BEING_ENDED and reason != "TimeLimit":
        return False
    call(["scontrol", "requeue", job])
    return True
