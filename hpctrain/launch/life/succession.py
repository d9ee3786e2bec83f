"""Which life of a job has the run folder.

Slurm starts a job anew when a node does not answer. Where only its slurmd died, the ranks there know nothing of it,
and two lives would save into one folder. The lock alone does not help: it may reach no further than a node, or not be
there at all (Lustre mounted with `localflock`, or without `flock`). So the later life says in a file of the folder that
it is there. As long as it waits for the lock, the earlier one saves and leaves; once it has it, the earlier one saves
no more.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from hpctrain.checkpoint.lock import RunFolderInUse
from hpctrain.errors import LaunchError
from hpctrain.files import write_whole
from hpctrain.launch.life.identity import job_of

FILE = "successor"

WAIT_S = 180.0
"""How long a job waits for the run folder at most. An earlier life of it looks at the end of each step, and then saves;
a file server keeps the locks of a node that died for a lease, of NFS 90 s."""


@dataclass(frozen=True)
class Successor:
    """The last life of a job that was requeued, as its file has it.

    Attributes:
        key: of its ranks.
        restarts: how often the job had been requeued.
        holds: it has the lock; otherwise somebody else has, and it waits.
    """

    key: str
    restarts: int
    holds: bool


class OutlivedError(LaunchError):
    """A later life of the job has the run folder."""


@dataclass(frozen=True)
class Tenancy:
    """A run folder as one life of a job has it.

    Attributes:
        folder: of the run.
        key: of this life.
        restarts: how often the job was requeued.
    """

    folder: Path
    key: str
    restarts: int

    @contextmanager
    def held(self, wait_s: float, lock: Callable[[Path], AbstractContextManager[None]]) -> Iterator[None]:
        """Hold the folder, against an earlier life of the job too that still trains.

        Args:
            wait_s: how long whoever has it may take to go.
            lock: keeps others out, as far as it reaches.

        Raises:
            RunFolderInUse: who has it does not go.
            OutlivedError: there is a later life already.
        """
        deadline = time.monotonic() + wait_s
        with ExitStack() as stack:
            while True:
                try:
                    stack.enter_context(lock(self.folder))
                    break
                except RunFolderInUse:
                    if time.monotonic() >= deadline:
                        raise
                    self._say(holds=False)
                    time.sleep(0.5)
            self._say(holds=True)
            yield

    def successor(self) -> Successor | None:
        """A later life of the same job, if there is one."""
        with suppress(OSError, ValueError, TypeError):
            found = Successor(**json.loads((self.folder / FILE).read_text()))
            if job_of(found.key) == job_of(self.key) and found.restarts > self.restarts:
                return found
        return None

    def check(self) -> None:
        """Before anything is written that a later life would take for its own, or its own for left over.

        Raises:
            OutlivedError: a later life has the folder.
        """
        later = self.successor()
        if later is not None and later.holds:
            raise OutlivedError(
                f"{self.folder} belongs to a later life of this job, which Slurm has started elsewhere: "
                "this one ends without saving."
            )

    def _say(self, holds: bool) -> None:
        path = self.folder / FILE
        if not self.restarts:
            if holds:
                path.unlink(missing_ok=True)  # ids of jobs come round again
            return
        self.check()
        if self.successor() is not None:
            return  # it waits, and this life is to make way
        write_whole(path, json.dumps(asdict(Successor(self.key, self.restarts, holds))))
