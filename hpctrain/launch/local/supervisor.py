"""The process between `run_local` and its ranks: submitit's controller, which also ends a job that has failed.

submitit's own waits until every task has ended, so ranks that block in a collective whose peer died keep the
job alive until its time limit; it also has a time limit, of minutes, and outlives whoever started it. This one
gives the other ranks a short grace once a rank has failed, has no time limit, and stops everything when its
standard input closes, which the kernel does for it even when the process at the other end is killed.

It reports on standard output, one JSON object a line: `{"rank", "code", "stopped"}` for each rank that ended.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from submitit.local.local import Controller

GRACE_S = 2.0
"""From the first failure to SIGTERM for the others, and from there to SIGKILL."""

TICK_S = 0.03


class Supervisor(Controller):
    """Starts the tasks that the environment describes, and sees them to their end."""

    def run(self, max_retry: int = 0) -> None:
        """Run the job once.

        Args:
            max_retry: as in submitit; a restart is never made here.
        """
        lifeline = os.dup(sys.stdin.fileno())
        with open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), sys.stdin.fileno())  # which the ranks inherit
        try:
            self.start_tasks()
            for rank, code, stopped in self._ends(lifeline):
                with suppress(BrokenPipeError):
                    print(json.dumps({"rank": rank, "code": code, "stopped": stopped}), flush=True)
        finally:
            self.kill_tasks()

    def _ends(self, lifeline: int) -> Iterator[tuple[int, int, bool]]:
        """Rank, exit status, and whether it was told to stop, of each task as it ends."""
        running = dict(enumerate(self.tasks))
        watched = [lifeline]
        signals = [signal.SIGTERM, signal.SIGKILL]
        deadline, stopping = float("inf"), False
        while running:
            for rank, task in list(running.items()):
                code = task.poll()
                if code is not None:
                    del running[rank]
                    yield rank, code, stopping
                    if code:
                        deadline = min(deadline, time.monotonic() + GRACE_S)
            if select.select(watched, [], [], TICK_S)[0] and not os.read(lifeline, 1024):
                watched, deadline = [], 0.0
            if time.monotonic() > deadline:
                stopping = True
                for task in running.values():
                    task.send_signal(signals[0])
                signals = signals[-1:]
                deadline = time.monotonic() + GRACE_S


if __name__ == "__main__":
    Supervisor(Path(sys.argv[1])).run()
