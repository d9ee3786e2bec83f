"""Being asked to stop, by a signal or a time limit: a flag, on which the ranks act together at a step boundary."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from hpctrain.launch.life.limit import TimeLimit

SIGNALS = (signal.SIGUSR2, signal.SIGTERM)
"""What Slurm sends before a time limit or at a preemption (`--signal=USR2@lead`, then TERM). USR1 is NCCL's."""

STOPPED_VARIABLE = "HPCTRAIN_STOPPED_FILE"
"""Names a file of this life of the job, which the first rank leaves when the run was asked to stop and has saved."""

LOOK_S = 2.0
"""Between looks for a later life: it costs a read of a shared file system."""


class StopRequest:
    """Remembers that a signal came. A second one, or one during a save, changes nothing.

    Args:
        limit: of the job's time, on the rank that looks after it.
        replaced: whether a later life of the job waits for this one to go, on the same rank.

    Attributes:
        received: number of the first signal; None while none came.
        outlived: a later life waits.
    """

    def __init__(self, limit: TimeLimit | None = None, replaced: Callable[[], bool] = lambda: False) -> None:
        self.limit, self._replaced = limit, replaced
        self.received: int | None = None
        self.outlived = self._out_of_time = False
        self._looked = time.monotonic()

    def __bool__(self) -> bool:
        return self.received is not None or self._out_of_time or self.outlived

    def at_boundary(self) -> bool:
        """Whether this rank wants to stop, at the end of a step."""
        if self.limit is not None and not self:
            self._out_of_time = self.limit.near()
        if not self and time.monotonic() - self._looked > LOOK_S:
            self.outlived, self._looked = self._replaced(), time.monotonic()
        return bool(self)

    def saved(self, seconds: float) -> str:
        """Take note of how long a save took; a sentence where Slurm's warning would come too late for another."""
        return self.limit.saved(seconds) if self.limit else ""

    def begin_step(self) -> None:
        """A step begins, the time of which counts."""
        if self.limit is not None:
            self.limit.begin_step()

    @property
    def reason(self) -> str:
        """The signal's name, or the time limit; if neither is known here, another rank has been asked."""
        if self.outlived:
            return "a later life of this job, which Slurm has started elsewhere"
        if self._out_of_time:
            return "the time limit"
        return "a signal to another rank" if self.received is None else signal.Signals(self.received).name

    @contextmanager
    def listening(self, signals: Sequence[signal.Signals] = SIGNALS) -> Iterator[StopRequest]:
        """While inside, the signals set the flag, one that was held back until now too; afterwards they do what they
        did before. Main thread only."""

        def note(number: int, frame: FrameType | None) -> None:
            if self.received is None:
                self.received = number

        before = {number: signal.signal(number, note) for number in signals}
        mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
        try:
            yield self
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            for number, handler in before.items():
                signal.signal(number, handler)


def hold_back(signals: Sequence[signal.Signals]) -> None:
    """Keep signals that come before anybody listens, instead of ending by them."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
