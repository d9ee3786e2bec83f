"""What earlier submissions and lives have left in a run folder, and nothing reads any more."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from hpctrain.launch.place.jobplan import PLAN
from hpctrain.launch.slurm.jobs import states

KEPT = 3
"""Submissions before the latest that stay: somebody may want to see what a job was."""

MEETING_S = 86400.0
"""After that, ranks that have not met will not."""

_JOB = re.compile(r"\d+(_\d+)?")


def clear(home: Path, latest: str) -> None:
    """Remove script, settings and code of submissions whose jobs have all ended, and files by which ranks have met.

    Args:
        home: working directory of the jobs: a run folder, or that of a sweep.
        latest: name of the submission that was made just now.

    Raises:
        SlurmError: Slurm does not answer.
    """
    for note in (*home.glob("rendezvous/*.json"), *home.glob("*/rendezvous/*.json")):
        if time.time() - note.stat().st_mtime > MEETING_S:
            note.unlink(missing_ok=True)
    old = {folder: _jobs(folder) for folder in _submissions(home, latest)}
    ids = [job for jobs in old.values() for job in jobs]
    known = states(ids) if ids else {}
    for folder, jobs in old.items():
        if all(known[job].ended for job in jobs):
            shutil.rmtree(home / "code" / folder.name, ignore_errors=True)
            shutil.rmtree(folder, ignore_errors=True)


def _submissions(home: Path, latest: str) -> Iterator[Path]:
    """Folders of old submissions, names of which begin with their time; of this user, whose jobs Slurm tells of, and
    complete: they hold a folder for each job and what orders their ranks, and nothing else."""
    for folder in sorted((home / "jobs").iterdir())[: -1 - KEPT]:
        names = _jobs(folder)
        if folder.name != latest and names and all(map(_JOB.fullmatch, names)) and folder.stat().st_uid == os.getuid():
            yield folder


def _jobs(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name != PLAN]
