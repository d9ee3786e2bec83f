"""Slurm's commands, each with a time limit, each failure one sentence."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence

from hpctrain.errors import LaunchError
from hpctrain.launch.slurm.rules import Slurm, found

TIMEOUT_S = 60.0
"""Of one command. Without a controller they retry for minutes; a busy one answers within its MessageTimeout, 10 s."""

_FILTERS = ("SQUEUE_", "SACCT_", "SCANCEL_")
"""Beginnings of a user's own defaults, which would hide jobs from us."""

_PREFIX = re.compile(r"^(sbatch|scontrol|scancel|squeue|sacct|slurm_\w+)(:? (error|fatal))?: ")
_HEADINGS = ("Batch job submission failed: ", "Unable to allocate resources: ")


class SlurmError(LaunchError):
    """A command of Slurm that failed. `said` is what it printed."""

    def __init__(self, message: str, said: str = "") -> None:
        super().__init__(message)
        self.said = said

    def __reduce__(self) -> tuple[type[SlurmError], tuple[str, str]]:
        return type(self), (str(self), self.said)


def has_slurm() -> bool:
    """Whether jobs can be submitted from here, as far as PATH tells."""
    return shutil.which("sbatch") is not None


def call(command: Sequence[str], env: Mapping[str, str] | None = None, timeout_s: float = TIMEOUT_S) -> str:
    """What a command prints.

    Raises:
        SlurmError: it is not there, fails, or takes longer than `timeout_s`.
    """
    name = command[0]
    try:
        done = subprocess.run(
            list(command),
            env={name: value for name, value in (env or os.environ).items() if not name.startswith(_FILTERS)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
        )
    except FileNotFoundError:
        raise SlurmError(f"there is no {name} on PATH: run this where Slurm's commands are.") from None
    except subprocess.TimeoutExpired:
        also = "; a job that it has queued all the same does nothing" if name == "sbatch" else ""
        raise SlurmError(
            f"{name} has not answered in {timeout_s:g} s, so Slurm's controller is down or overloaded: "
            f"try again later{also}."
        ) from None
    if done.returncode:
        said = done.stderr.strip() or done.stdout.strip()
        raise SlurmError(f"{name} failed with status {done.returncode}: {reason(said)}.", said)
    return done.stdout


def reason(said: str) -> str:
    """The sentence in what a command of Slurm printed: its last word, and before it a detail that adds to it."""
    lines = [_PREFIX.sub("", line.strip()).rstrip(".") for line in said.splitlines() if line.strip()]
    if not lines:
        return "it said nothing"
    detail, last = lines[:-1], lines[-1]
    for heading in _HEADINGS:
        last = last.removeprefix(heading)
    return f"{last} ({detail[-1]})" if detail and detail[-1] != last else last


def installed(timeout_s: float = 10.0) -> Slurm:
    """The Slurm that is here, as its controller describes it; where that does not answer, as far as sbatch tells."""
    try:
        return found(call(["scontrol", "show", "config"], timeout_s=timeout_s))
    except SlurmError as error:
        why = str(error)
    try:
        return Slurm.of(call(["sbatch", "--version"], timeout_s=timeout_s), why)
    except SlurmError:
        return Slurm.of("", why)


def show_topology(timeout_s: float = 30.0) -> str:
    """What Slurm says about its switches.

    Raises:
        SlurmError: it says nothing, or does not answer.
    """
    return call(["scontrol", "show", "topology"], timeout_s=timeout_s)


def topology_text() -> str:
    """The same; "" where it says nothing."""
    try:
        return show_topology(10)
    except SlurmError:
        return ""
