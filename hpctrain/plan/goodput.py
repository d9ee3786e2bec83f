"""How much of a job's time trains, when devices fail: intervals between checkpoints, and calendar time."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hpctrain.plan.hardware import Hardware

NOTHING = 0.01
"""Share of a job's time below which nobody would run it."""


@dataclass(frozen=True)
class Goodput:
    """What failures leave of a run.

    Attributes:
        mtbf: seconds between failures of the whole job.
        interval: seconds of training between checkpoints that loses least.
        share: of the job's time that trains steps which are kept.
        restart: seconds from a failure until it trains again.
    """

    mtbf: float
    interval: float
    share: float
    restart: float

    @property
    def hopeless(self) -> str:
        """Why next to nothing gets done, in words; empty where something does."""
        if self.share >= NOTHING:
            return ""
        return "failures come faster than it " + ("restarts" if self.mtbf < self.restart else "writes a checkpoint")


def interval(checkpoint: float, mtbf: float) -> float:
    """Seconds between checkpoints that lose least: Young, 1974, sqrt(2 C M), with the terms of Daly, 2006 (Future
    Generation Computer Systems 22, equation 37), M itself where a checkpoint takes 2 M or more."""
    if checkpoint >= 2 * mtbf:
        return mtbf
    ratio = checkpoint / (2 * mtbf)
    return math.sqrt(2 * checkpoint * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - checkpoint


def goodput(hardware: Hardware, devices: int, checkpoint: float, every: float | None = None) -> Goodput:
    """That of a job.

    Failures come at random, one of all devices ends the job, and work since the last checkpoint is lost. With R the
    time to restart, M the mean time between failures, T the interval and C the checkpoint, a stretch of T + C takes
    M exp(R/M) (exp((T + C)/M) - 1) on average (Daly, 2006, equation 20), of which T trains.

    Args:
        checkpoint: seconds in which a checkpoint stops training.
        every: seconds between checkpoints; None is the best.
    """
    mtbf = hardware.failures.device_mtbf_hours.value * 3600 / devices
    restart = hardware.failures.restart_seconds.value
    chosen = every if every is not None else interval(checkpoint, mtbf)
    stretch = (chosen + checkpoint) / mtbf
    share = chosen / mtbf * math.exp(-restart / mtbf - stretch) / -math.expm1(-stretch)  # with no exponent above 0
    return Goodput(mtbf, chosen, share, restart)


def checkpoint_seconds(hardware: Hardware, parameters: int, devices: int) -> float:
    """Seconds to write float32 weights and two moments to the drives of all hosts, the slowest way there is."""
    hosts = max(1.0, devices / hardware.host.devices)
    return 12.0 * parameters / (hosts * hardware.host.nvme_write.value)
