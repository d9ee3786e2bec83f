"""The body of a rank that Slurm started: what the pickle of a submission names."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from typing import Any

from hpctrain.launch.rank import run_rank
from hpctrain.launch.sbatch import WARNING_SIGNAL

WARNING = signal.Signals[f"SIG{WARNING_SIGNAL}"]
"""What Slurm sends before a time limit, and at preemption where the site wants it."""


def slurm_task(function: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Call `function(*args)` as one rank.

    What is pickled at submission is this, a function's name and plain settings, so it decides nothing that a rank
    has to find out when it starts, such as the checkpoint to continue from.
    """
    # submitit ignores SIGTERM, and requeues at a warning from rank 0, by a guess at what it means.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGCONT, signal.SIG_DFL)
    signal.signal(WARNING, signal.SIG_IGN)
    return run_rank(function, args)
