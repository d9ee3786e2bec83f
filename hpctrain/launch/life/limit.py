"""When Slurm will end this job, and whether what is left is enough for one more step and a save."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping

from hpctrain.errors import LaunchError
from hpctrain.launch.life.identity import slurm_job
from hpctrain.launch.slurm.client import call

LEAD_VARIABLE = "HPCTRAIN_SIGNAL_LEAD_S"
"""Set by the batch script: seconds before the time limit at which Slurm was told to warn."""

EARLY_S = 60.0
"""So much before its time Slurm may send a warning (man sbatch, --signal)."""

END_VARIABLE = "HPCTRAIN_END_TIME"
"""Set by the batch script: when the time limit is, seconds since the epoch; another word where there is none. A
container mostly has no way to ask Slurm."""

SPARE_S = 30.0
"""Kept beyond what steps and saves took: for the end of the ranks, of which the first waits for the others
(`FAREWELL_S` of `launch.bootstrap`), and Slurm's clock."""

ANSWER_S = 15.0
"""How long Slurm may take to say how much is left, for which all ranks wait."""

RETRY_S = 120.0
"""Between questions to a controller that does not answer; each may take a minute."""

_LEFT = re.compile(r"(?:(?:(\d+)-)?(\d+):)?(\d+):(\d+)$")


class TimeLimit:
    """Of one life of a job. Asked once a step, it measures the steps itself.

    Args:
        ask: seconds that are left, or None where there is no limit; an administrator may have changed it.
        lead_s: when Slurm warns, seconds before the limit; 0 where that is not known.
        clock: seconds.
    """

    def __init__(
        self, ask: Callable[[], float | None], lead_s: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._ask, self._clock, self.lead_s = ask, clock, lead_s
        self._save_s, self._step_s, self._last = 0.0, 0.0, clock()
        self._steps, self._told = 0, False
        self._end: float | None = None
        self._retry = math.inf
        self._look()

    @staticmethod
    def of_job(env: Mapping[str, str]) -> TimeLimit | None:
        """That of the job whose environment this is; None where it is no job of Slurm's."""
        job = slurm_job(env)
        if not job or "SLURM_PROCID" not in env:
            return None
        return TimeLimit(lambda: seconds_left(job, env.get(END_VARIABLE, "")), float(env.get(LEAD_VARIABLE) or 0))

    @property
    def need_s(self) -> float:
        """What one more step, with an evaluation if there was one, and a save may take: from the longest so far, less
        the first step."""
        return 2 * (self._step_s + self._save_s) + SPARE_S

    def saved(self, seconds: float) -> str:
        """Take note of how long a save took.

        Returns:
            A sentence, once, where Slurm's warning comes too late for another one like it.
        """
        self._save_s = max(self._save_s, seconds)
        if self._end is None or not self.lead_s or self._told or self.need_s <= self.lead_s:
            return ""
        self._told = True
        return (
            f"a step takes up to {self._step_s:.0f} s and a save {self._save_s:.0f} s, and Slurm warns "
            f"{self.lead_s:.0f} s before the time limit, which is too late: the run will stop by itself "
            f"{self.need_s:.0f} s before it; a longer signal_lead_s in the profile has it warned in time"
        )

    def warned_of(self) -> bool:
        """Whether a warning that has come may be that of the time limit, and not a preemption's; also where Slurm has
        not said when that is."""
        if self._end is None:
            return self._retry < math.inf
        return self._end - self._clock() <= self.lead_s + EARLY_S

    def near(self) -> bool:
        """Whether to save and leave now. Called once a step."""
        now = self._clock()
        self._steps += 1
        # The first step compiles, and connects ranks: it stands for others only until one of them was seen.
        others_s = self._step_s if self._steps != 2 else 0.0
        self._step_s, self._last = max(others_s, now - self._last), now
        if now >= self._retry:
            self._look()
        if self._end is None or self._end - now > self.need_s:
            return False
        self._look()
        return self._end is not None and self._end - now <= self.need_s

    def begin_step(self) -> None:
        """A step begins: what came since the last one was a save, which is counted on its own."""
        self._last = self._clock()

    def _look(self) -> None:
        """Ask how much is left. A controller that does not answer changes nothing, and is asked again later."""
        try:
            left = self._ask()
        except LaunchError:
            self._retry = self._clock() + RETRY_S
            return
        self._retry = math.inf
        self._end = None if left is None else self._clock() + left


def seconds_left(job: str, end: str = "") -> float | None:
    """How long Slurm lets a job run on; None without end.

    Args:
        job: its id.
        end: when it was to end as it began, seconds since the epoch; believed where Slurm does not answer.

    Raises:
        LaunchError: Slurm does not answer, and the end is not known.
    """
    try:
        return parse_left(call(["squeue", "--noheader", f"--jobs={job}", "--format=%L"], timeout_s=ANSWER_S))
    except LaunchError:
        if not end.isdecimal():
            raise
        return int(end) - time.time()


def parse_left(text: str) -> float | None:
    """Seconds of `[days-][hours:]minutes:seconds`; None for Slurm's words that mean no limit or no knowledge."""
    found = _LEFT.match(text.strip())
    if found is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
