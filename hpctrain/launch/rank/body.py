"""The body of a process that is nothing but a rank."""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle

from hpctrain.errors import HpctrainError
from hpctrain.files import write_whole
from hpctrain.launch.life.process import Report, die_with_parent, fail_now, reporting
from hpctrain.launch.meet.watchdog import PeerLost


@dataclass(frozen=True)
class Outcome:
    """What a rank left for whoever started it.

    Attributes:
        value: what its function returned.
        error: the exception it ended with, where that is the user's to mend.
        text: the exception in words; empty on success.
        consequence: the rank only stopped because another one was gone.
    """

    value: Any = None
    error: HpctrainError | None = None
    text: str = ""
    consequence: bool = False

    def write(self, path: Path) -> None:
        write_whole(path, cloudpickle.dumps(self))

    @staticmethod
    def read(path: Path) -> Outcome | None:
        """None where the rank left nothing: it was killed, or never began."""
        if not path.exists():
            return None
        outcome: Outcome = pickle.loads(path.read_bytes())
        return outcome


def run_rank(function: Callable[..., Any], args: Sequence[Any] = (), report: Report | None = None) -> Any:
    """Call `function(*args)`; when it fails, say why on stderr and end the process at once.

    For ranks started by us and for those started by torchrun, srun or mpirun alike. See
    `launch.life.process.exit_now` for why a failed rank must not leave in the ordinary way.

    Args:
        function: the whole work of this rank.
        args: its arguments.
        report: told about the error before the process ends.

    Returns:
        What the function returned.
    """
    with ExitStack() as stack:
        if report is not None:
            stack.enter_context(reporting(report))
        try:
            return function(*args)
        except BaseException as error:
            if isinstance(error, SystemExit) and not error.code:
                return None
            fail_now(error)


def local_rank(function: Callable[..., Any], args: Sequence[Any], folder: str) -> None:
    """Body of a rank that `run_local` started; leaves an `Outcome` in `folder`."""
    die_with_parent(int(os.environ["SUBMITIT_LOCAL_JOB_ID"]))
    # submitit ignores the first and requeues on the last; our ranks end when they are told to.
    for number in (signal.SIGTERM, signal.SIGCONT, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)
    path = outcome_file(Path(folder), int(os.environ["SUBMITIT_LOCAL_GLOBALID"]))

    def report(error: BaseException) -> None:
        text = f"{type(error).__name__}: {error}"
        try:
            mine = error if isinstance(error, HpctrainError) and str(_copy(error)) == str(error) else None
        except Exception:  # an exception may do anything in its __init__ and __reduce__
            mine = None
        Outcome(error=mine, text=text, consequence=isinstance(error, PeerLost)).write(path)

    Outcome(value=run_rank(function, args, report)).write(path)


def outcome_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.outcome"


def _copy(error: BaseException) -> BaseException:
    copy: BaseException = pickle.loads(pickle.dumps(error))
    return copy
