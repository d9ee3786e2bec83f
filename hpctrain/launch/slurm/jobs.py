"""Jobs of runs: what was submitted, how it stands, how it ends."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from hpctrain.errors import LaunchError
from hpctrain.files import write_whole
from hpctrain.launch.slurm import client
from hpctrain.launch.slurm.client import SlurmError, call
from hpctrain.launch.slurm.state import SACCT_FORMAT, SQUEUE_FORMAT, JobState, from_sacct, from_squeue

JOB_FILE = "job.json"

POLL_S = 2.0
MISSES = 3
"""Looks at which Slurm must not know a job before it counts as forgotten: a controller that restarts knows none."""

PATIENCE_S = 900.0
"""How long a client that waits bears with a Slurm that does not answer."""


@dataclass(frozen=True)
class Job:
    """A run's latest submission, as `job.json` in its folder has it.

    Attributes:
        ids: in the order in which they run; of a chain more than one.
        submitted: ISO 8601, UTC.
        logs: folder of the output; that of the ranks of job J is J in it.
        code: snapshot that it runs; None where it runs what is installed.
        profile: name of the site profile.
        options: of the submission, less what was not given.
    """

    ids: tuple[str, ...]
    submitted: str
    logs: Path
    code: Path | None = None
    profile: str = ""
    options: dict[str, Any] = field(default_factory=dict)

    def write(self, run: Path) -> None:
        """Put it into a run folder."""
        plain = asdict(self) | {"logs": str(self.logs), "code": str(self.code) if self.code else None}
        write_whole(run / JOB_FILE, json.dumps(plain, indent=2) + "\n")

    @staticmethod
    def read(run: Path) -> Job | None:
        """The job of a run; None where there is none.

        Raises:
            LaunchError: the file is not one that `write` made.
        """
        path = run / JOB_FILE
        try:
            found = json.loads(path.read_text())
            code = Path(found["code"]) if found["code"] else None
            plain = {key: found[key] for key in ("submitted", "profile", "options")}
            return Job(ids=tuple(found["ids"]), logs=Path(found["logs"]), code=code, **plain)
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError):
            raise LaunchError(f"{path} is damaged: remove it; the jobs themselves do not need it.") from None


def runs(folder: Path) -> Iterator[tuple[Path, Job]]:
    """Runs in a folder that have a job, those of sweeps included, in order of submission."""
    paths = [path.parent for pattern in (f"*/{JOB_FILE}", f"*/*/{JOB_FILE}") for path in folder.glob(pattern)]
    sweeps = {run.parent for run in paths}
    found = [(run, job) for run in paths if run not in sweeps and (job := Job.read(run))]
    yield from sorted(found, key=lambda pair: (pair[1].submitted, pair[0]))


def is_sweep(run: Path) -> bool:
    """Whether a folder holds the runs of a job array."""
    return any(run.glob(f"*/{JOB_FILE}"))


def locate(what: str, folder: Path) -> tuple[Path, Job]:
    """The run and job that a word on the command line means: a run folder, a name in `folder`, or a job's id.

    A sweep counts as one run, whose jobs are those of its elements.

    Raises:
        LaunchError: there is no such run, or it was not submitted.
    """
    for run in (Path(what), folder / what):
        if run.is_dir() and (job := Job.read(run)):
            return run, job
    for run, job in reversed(list(runs(folder))):
        if what in job.ids:
            return run, job
    raise LaunchError(
        f"no run and no job {what!r} is known in {folder}: hpctrain jobs lists those that are; "
        "name another folder with --folder, or give the path of a run."
    )


def states(ids: Sequence[str]) -> dict[str, JobState]:
    """How jobs stand: what the queue knows, and of those that it has forgotten, what accounting knows.

    Raises:
        SlurmError: Slurm does not answer.
    """
    queue = queued()
    found = {job: queue[job] for job in ids if job in queue}
    missing = [job for job in ids if job not in found]
    if missing:
        found |= accounts(missing)
    return found


def queued() -> dict[str, JobState]:
    """All jobs of this user that the queue knows; for some minutes also those that have ended.

    Raises:
        SlurmError: Slurm does not answer.
    """
    format_ = f"--format={SQUEUE_FORMAT}"
    return from_squeue(call(["squeue", "--noheader", "--array", "--states=all", "--me", format_]))


def accounts(ids: Sequence[str]) -> dict[str, JobState]:
    """What sacct knows: nothing where accounting is off, and perhaps later where it does not answer."""
    command = ["sacct", "--allocations", "--parsable2", "--noheader", f"--format={SACCT_FORMAT}"]
    known: dict[str, JobState] = {}
    unknown = ("FORGOTTEN", "Slurm keeps no record of how it ended")
    try:
        known = from_sacct(call([*command, f"--jobs={','.join(whole(ids))}"]))
    except SlurmError as error:
        if "storage is disabled" not in error.said:
            unknown = ("UNKNOWN", "accounting does not answer")
    found = {}
    for job in ids:
        # Of an array that was cancelled before it began, there is one record for all of it.
        state = known.get(job) or known.get(job.split("_")[0])
        found[job] = replace(state, id=job) if state else JobState(job, *unknown)
    return found


def first_states(ids: Sequence[str], looks: int = 5, pause_s: float = 0.4) -> dict[str, JobState]:
    """How jobs stand that were queued just now: Slurm needs a moment to say why one waits."""
    for look in range(looks):
        found = states(ids)
        if all(state.reason or state.state != "PENDING" for state in found.values()) or look == looks - 1:
            break
        time.sleep(pause_s)
    return found


def wait(ids: Sequence[str], poll_s: float = POLL_S) -> list[JobState]:
    """Wait until jobs have ended. Returns how.

    Raises:
        SlurmError: Slurm has not answered for `PATIENCE_S`.
    """
    watch = Watch(ids, poll_s)
    while not watch.ended():
        time.sleep(poll_s)
    return watch.states


class Watch:
    """Looks at jobs now and then, and bears for a while with a Slurm that does not answer."""

    def __init__(self, ids: Sequence[str], poll_s: float = POLL_S) -> None:
        self.states: list[JobState] = []
        self._ids, self._poll_s = ids, poll_s
        self._next, self._misses = 0.0, 0
        self._answered = time.monotonic()

    def ended(self) -> bool:
        """Whether all have ended; asks Slurm at most every `poll_s` seconds.

        Raises:
            SlurmError: it has not answered for `PATIENCE_S`.
        """
        if time.monotonic() >= self._next:
            self._look()
            self._next = time.monotonic() + self._poll_s
        return bool(self.states) and all(s.ended for s in self.states) and self._misses in (0, MISSES)

    def _look(self) -> None:
        try:
            found = states(self._ids)
            if all(state.state != "UNKNOWN" for state in found.values()):
                self._answered = time.monotonic()
            elif time.monotonic() - self._answered > PATIENCE_S:
                raise SlurmError(f"Slurm has not said for {PATIENCE_S:g} s how job {self._ids[0]} stands.")
        except SlurmError:
            if time.monotonic() - self._answered > PATIENCE_S:
                raise
            return
        self.states = [found[job] for job in self._ids]
        forgotten = any(state.state == "FORGOTTEN" for state in self.states)
        self._misses = min(self._misses + 1, MISSES) if forgotten else 0


def cancel(ids: Sequence[str]) -> None:
    """End jobs; those that have ended are left as they are.

    Raises:
        SlurmError: Slurm refuses, or knows none of them any more.
    """
    call(["scancel", *ids])


def whole(ids: Sequence[str]) -> list[str]:
    """Arrays in place of their elements. Of elements that were cancelled one by one while they waited, Slurm 22.05
    keeps no record; of a whole array it does."""
    return list(dict.fromkeys(job.split("_")[0] for job in ids))


def requeue(job: str) -> None:
    """Have a job start anew, with the id that it has.

    Raises:
        SlurmError: Slurm refuses; a job that waits in the queue cannot be put into it.
    """
    call(["scontrol", "requeue", job])


def refuse_second(*runs: Path) -> None:
    """Two jobs must not write into one run folder. What the queue does not list does not run.

    Raises:
        LaunchError: one of the runs has a job that waits or runs.
    """
    jobs = [(run, job) for run in runs if (job := Job.read(run)) is not None]
    if not jobs or not client.has_slurm():
        return
    queue = queued()
    for run, job in jobs:
        for state in (queue[job_id] for job_id in job.ids if job_id in queue):
            if not state.ended:
                raise LaunchError(
                    f"{run} has {state} already: end it with hpctrain cancel {run}, choose another name=..., "
                    "or use --chain for jobs that follow each other."
                )
