"""The body of a rank that Slurm started: what the pickle of a submission names."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from submitit.core.job_environment import JobEnvironment

from hpctrain.launch.life.stop import SIGNALS, STOPPED_VARIABLE, hold_back
from hpctrain.launch.rank.body import run_rank


def slurm_task(function: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Call `function(*args)` as one rank.

    If what it returns has `stopped` set, it was asked to stop and has saved: the batch script is told to requeue the
    job, unless `outlived` says that it runs anew already.

    What is pickled at submission is this, a function's name and plain settings, so it decides nothing that a rank
    has to find out when it starts, such as the checkpoint to continue from.
    """
    hold_back(SIGNALS)  # until the function listens
    _clear_torn_result(JobEnvironment().paths.result_pickle)
    # submitit ignores SIGTERM, and requeues at a warning from rank 0, by a guess at what it means.
    signal.signal(signal.SIGCONT, signal.SIG_DFL)
    # One more must not end a rank that has saved. Threads that began while it listened do not block it.
    for number in SIGNALS:
        signal.signal(number, _heed_not)
    value = run_rank(_leave_word, (function, args))
    for number in SIGNALS:  # an interpreter that ends undoes what handlers there are, and would die of the next one
        signal.signal(number, signal.SIG_IGN)
    return value


def _clear_torn_result(result: Path) -> None:
    """submitit writes what this returns, and refuses to where an earlier life was ended while it wrote."""
    result.with_suffix(f"{result.suffix}.save_tmp").unlink(missing_ok=True)


def _heed_not(number: int, frame: FrameType | None) -> None:
    """Not SIG_IGN, which would throw away what waits to be heard."""


def _leave_word(function: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Call `function(*args)`; if it has stopped, leave the file that the batch script looks for. By the first rank.

    A job that leaves by itself when it is asked to counts as completed, so it has to put itself back into the queue.
    The batch script does, where Slurm's commands are. Everything that is to last is on the disk by now.
    """
    value = function(*args)
    stopped = getattr(value, "stopped", False) and not getattr(value, "outlived", False)
    if stopped and os.environ.get("SLURM_PROCID") == "0":
        Path(os.environ[STOPPED_VARIABLE]).touch()
    return value
