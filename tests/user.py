"""This process as a user of the lab, who waits."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hpctrain.lab import Cluster

ROOT = Path(__file__).parents[1]
OUTER = ("SLURM", "SBATCH", "SRUN", "SQUEUE", "SACCT", "PMI", "CUDA_VISIBLE_DEVICES")


@contextmanager
def user_of(lab: Cluster) -> Iterator[None]:
    """This process as a user of a lab."""
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith(OUTER):
                patch.delenv(name)
        for name, value in lab.environment().items():
            patch.setenv(name, value)
        patch.setenv("PYTHONPATH", str(ROOT))
        yield


def until(true: Callable[[], object], timeout_s: float = 300.0) -> None:
    """Longer than it takes on a machine that does much else."""
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.05)
