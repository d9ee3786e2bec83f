"""Being asked to stop: a signal becomes a flag, and the ranks act on it together at a step boundary."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGUSR2, signal.SIGTERM)
"""What Slurm sends before a time limit or at a preemption (`--signal=USR2@lead`, then TERM). USR1 is NCCL's."""


class StopRequest:
    """Remembers that a signal came. A second one, or one during a save, changes nothing.

    Attributes:
        received: number of the first signal; None while none came.
    """

    def __init__(self) -> None:
        self.received: int | None = None

    def __bool__(self) -> bool:
        return self.received is not None

    @property
    def reason(self) -> str:
        """The signal's name; that of a peer's if none came here."""
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
