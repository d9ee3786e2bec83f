"""Puts a running job back into the queue so that it does not come back on certain nodes.

Slurm 22.05 refuses `scontrol update JobId=… ExcNodeList=…` for a job that runs ("Job is no longer pending
execution"), and takes it as soon as the job is requeued, while its batch script still runs (tried). A requeue sends
SIGTERM to all of the job at once and SIGKILL after KillWait (30 s unless the site says otherwise), so SIGTERM is
ignored until both commands are done. The job cannot start anew before its batch script has ended, so the list is
there in time.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterable

from hpctrain.cluster.hostlist import expand, fold
from hpctrain.launch.slurm import client

TRIES, PAUSE_S = 5, 2.0
"""Of each command: a controller may be busy. Together they stay below KillWait."""
ANSWER_S = 10.0


def requeue_without(job: str, hosts: Iterable[str]) -> None:
    """Requeue the job of this batch script, with hosts excluded besides those that are already.

    If Slurm takes the first and not the second, the job is held: it would come back to the same nodes again and again.

    Raises:
        SlurmError: Slurm refuses one of the two.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # commands inherit it
    names = {*excluded_of(job), *hosts}
    _persist(["scontrol", "requeue", job])
    try:
        _persist(["scontrol", "update", f"JobId={job}", f"ExcNodeList={fold(names, sort=True)}"])
    except client.SlurmError as error:
        _persist(["scontrol", "hold", job])
        raise client.SlurmError(
            f"{str(error).rstrip('.')}: job {job} is in the queue and held, as it would come back to the same nodes.",
            error.said,
        ) from None


def excluded_of(job: str) -> list[str]:
    """Nodes that a job is not to run on.

    Raises:
        SlurmError: Slurm does not answer.
    """
    return excluded(client.call(["scontrol", "show", "job", job], timeout_s=ANSWER_S))


def excluded(text: str) -> list[str]:
    """Nodes that a job is not to run on, from `scontrol show job`."""
    found = re.search(r"\bExcNodeList=(\S+)", text)
    return expand(found[1]) if found and found[1] != "(null)" else []


def _persist(command: list[str]) -> None:
    for left in reversed(range(TRIES)):
        try:
            client.call(command, timeout_s=ANSWER_S)
            return
        except client.SlurmError:
            if not left:
                raise
            time.sleep(PAUSE_S)
