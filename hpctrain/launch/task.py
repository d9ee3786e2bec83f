"""The body of a rank that Slurm started: what the pickle of a submission names."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from typing import Any

from hpctrain.launch.rank import run_rank


def slurm_task(function: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Call `function(*args)` as one rank.

    What is pickled at submission is this, a function's name and plain settings, so it decides nothing that a rank
    has to find out when it starts, such as the checkpoint to continue from.
    """
    # submitit requeues from a handler on rank 0, by a guess at what the signal means, and ignores SIGTERM.
    for number in (signal.SIGTERM, signal.SIGCONT, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)
    return run_rank(function, args)
