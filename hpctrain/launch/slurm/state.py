"""What Slurm says about jobs, read from the formats that it keeps stable. Pure.

Only `squeue --format` and `sacct --parsable2` are read: their JSON changes with every release.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

SQUEUE_FORMAT = "%i|%T|%r|%N"
SACCT_FORMAT = "JobID,State,ExitCode,NodeList"

_ENDED = {
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "FORGOTTEN", "LAUNCH_FAILED", "NODE_FAIL"),
    *("OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT"),
}
_STUCK = {
    *("AccountNotAllowed", "BadConstraints", "DependencyNeverSatisfied", "InvalidAccount", "InvalidQOS"),
    *(
        "PartitionConfig",
        "PartitionDown",
        "PartitionInactive",
        "PartitionNodeLimit",
        "PartitionTimeLimit",
        "QOSNotAllowed",
    ),
    *("JobHeldAdmin", "JobHeldUser"),
}


@dataclass(frozen=True)
class JobState:
    """A job, or one element of an array.

    Attributes:
        id: `123`, or `123_4`.
        state: Slurm's long word, such as RUNNING; FORGOTTEN where Slurm knows no such job any more.
        reason: why it waits or ended so, where Slurm says.
        nodes: as a hostlist; empty where it has none.
    """

    id: str
    state: str
    reason: str = ""
    nodes: str = ""

    @property
    def ended(self) -> bool:
        """Whether it will not run again by itself."""
        return self.state in _ENDED

    @property
    def good(self) -> bool:
        """Whether it did its work."""
        return self.state == "COMPLETED"

    @property
    def stuck(self) -> bool:
        """Whether it waits for what will not come by itself."""
        return self.state == "PENDING" and self.reason in _STUCK

    def __str__(self) -> str:
        about = ", ".join(filter(None, (self.reason, f"on {self.nodes}" if self.nodes else "")))
        return f"job {self.id} {self.state}" + (f" ({about})" if about else "")


def from_squeue(text: str) -> dict[str, JobState]:
    """Jobs by id from `squeue --noheader --array --states=all` in `SQUEUE_FORMAT`."""
    found = {}
    for ids, state, reason, nodes in _rows(text, 4):
        reason = "" if reason in ("None", "(null)") else reason
        for job in _expand(ids):
            found[job] = JobState(job, _word(state), reason, nodes.replace("(null)", ""))
    return found


def from_sacct(text: str) -> dict[str, JobState]:
    """Jobs by id from `sacct --allocations --parsable2 --noheader` in `SACCT_FORMAT`."""
    found = {}
    for ids, state, code, nodes in _rows(text, 4):
        reason = _exit(code)
        if by := re.match(r"CANCELLED (by \w+)", state):
            reason = by[1]
        for job in _expand(ids):
            nodes = "" if nodes in ("None assigned", "(null)") else nodes
            found[job] = JobState(job, _word(state), reason, nodes)
    return found


def _rows(text: str, fields: int) -> Iterator[list[str]]:
    for line in text.splitlines():
        row = [field.strip() for field in line.split("|")]
        if len(row) == fields and row[0] and not re.search(r"\.\w", row[0]):  # `7.batch` is a step
            yield row


def _word(state: str) -> str:
    """`CANCELLED by 0` and `CANCELLED+` are CANCELLED."""
    found = re.match(r"[A-Z_]+", state)
    return found.group() if found else "UNKNOWN"


def _exit(code: str) -> str:
    """Words for `status:signal`."""
    status, _, number = code.partition(":")
    if number not in ("", "0"):
        return f"signal {number}"
    return "" if status in ("", "0") else f"exit status {status}"


def _expand(ids: str) -> Iterator[str]:
    """Elements of `123_[0-2,5%4]`; the id itself where there are none. Long lists end in `...`."""
    found = re.fullmatch(r"(\d+)_\[([^\]%]*)(?:%\d+)?\]?", ids)
    if found is None:
        yield ids
        return
    for part in found[2].split(","):
        span = re.fullmatch(r"(\d+)(?:-(\d+)(?::(\d+))?)?", part)
        if span:
            first, last, step = int(span[1]), int(span[2] or span[1]), int(span[3] or 1)
            yield from (f"{found[1]}_{index}" for index in range(first, last + 1, step))
