"""What the logs of a job that failed say about why."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

TAIL_BYTES = 32768
SHOWN = 6

LIFE = "Starting with JobEnvironment"
"""What submitit prints as a rank begins; a requeued job goes on in the same file."""
_EARLIER = re.compile(r".*DUE TO (JOB REQUEUE|PREEMPTION|NODE FAILURE)[^\n]*", re.DOTALL)
"""All that an earlier life left in the output of the batch script, up to how Slurm ended it."""
_TASK = re.compile(r": tasks? [\d,-]+: ")
"""What srun says of the first task that ended badly; it ends the others itself."""
_CONSEQUENCE = re.compile(r"rank \d+ (stopped because|lost the connection)|CANCELLED AT|Force Terminated|^Timed out")


def reasons(logs: Path, job: str) -> list[str]:
    """Sentences about errors in the last life of a job, each once, with where it stands; causes before consequences.

    Args:
        logs: folder of the job's output.
        job: its id.
    """
    said: dict[str, tuple[str, str]] = {}
    for path in (logs / f"slurm-{job}.out", *sorted((logs / job).glob("rank-*.log"), key=_rank)):
        for text in _errors(path):
            alike = re.sub(r"\d+", "", text) if _CONSEQUENCE.search(text) else text  # many ranks say that they lost one
            said.setdefault(alike, (text, f"{path.stem}: {text}"))
    own: list[str] = []
    tasks: list[str] = []
    consequences: list[str] = []
    for text, line in said.values():
        (consequences if _CONSEQUENCE.search(text) else tasks if _TASK.search(text) else own).append(line)
    return [*own[: SHOWN - bool(tasks)], *tasks, *consequences][:SHOWN]


def _rank(path: Path) -> int:
    return int(re.sub(r"\D", "", path.stem) or 0)


def _errors(path: Path) -> Iterator[str]:
    text = ""
    with suppress(OSError), path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        text = file.read().decode(errors="replace")
    lines = _EARLIER.sub("", text.rpartition(LIFE)[2]).splitlines()
    for line in lines:
        if line.startswith(("error: ", "srun: error: ", "slurmstepd: error: ")):
            yield line.partition("error: ")[2].strip()
    if lines and re.match(r"\w+(\.\w+)*(Error|Exception)\b", lines[-1]):
        yield lines[-1]  # of a traceback
