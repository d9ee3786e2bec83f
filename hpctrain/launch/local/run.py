"""Ranks on this machine, through submitit's local executor."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from submitit.local.local import LocalExecutor, LocalJob

from hpctrain.errors import LaunchError
from hpctrain.launch.life.identity import threads_per_rank, without_identity
from hpctrain.launch.life.process import how_it_ended
from hpctrain.launch.local.supervisor import GRACE_S
from hpctrain.launch.place.machine import allowed_cpus
from hpctrain.launch.rank.body import Outcome, local_rank, outcome_file

TAIL_LINES, TAIL_BYTES = 20, 8192


def run_local(
    function: Callable[..., Any],
    args: Sequence[Any],
    world: int,
    folder: Path,
    threads: int = 0,
    when_asked: Callable[[list[Any]], None] = lambda values: None,
) -> list[Any]:
    """Call `function(*args)` on `world` ranks of this machine and wait for them.

    Each rank finds its identity with `identity.detect(os.environ)` and sees all GPUs that this process sees.
    Whatever ends this call, the ranks have ended too, also when this process is killed.

    Args:
        function: importable by name in a new process.
        args: picklable.
        world: number of ranks.
        folder: run folder; what rank R prints goes to `logs/*/rank-R.log` in it.
        threads: `cluster.threads`.
        when_asked: told, when Ctrl-C or SIGTERM ends this call, what each rank has returned; None for one that has not.

    Returns:
        What each rank returned, in rank order.

    Raises:
        HpctrainError: the very error that a rank ended with.
        LaunchError: a rank failed in another way or died; names it, how it ended, and the end of its log.
    """
    logs = folder / "logs" / f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:6]}"
    env = without_identity(os.environ)
    env["OMP_NUM_THREADS"] = str(threads_per_rank(threads, len(allowed_cpus()), world))
    try:
        # A folder of its own for each launch: submitit names files by process id, which come round again.
        logs.mkdir(parents=True)
        executor = _Executor(logs, env, world)
    except OSError as error:
        raise LaunchError(f"{logs} cannot be made ({error.strerror}): the run folder must be writable.") from None
    ends: list[_End] = []
    with _exit_on_sigterm():
        try:
            executor.submit(local_rank, function, tuple(args), str(logs))
            for rank in range(world):
                (logs / f"rank-{rank}.log").symlink_to(f"{executor.process.pid}_{rank}_log.out")
            for end in _follow(executor.process):
                ends.append(end)
        except (KeyboardInterrupt, SystemExit):
            _stop(executor.started)
            when_asked([outcome.value if outcome else None for outcome in _outcomes(logs, world).values()])
            raise
        finally:
            _stop(executor.started)
            for pickled in logs.glob("*.pkl*"):
                pickled.unlink()
    return _results(ends, world, logs, executor.process)


@dataclass(frozen=True)
class _End:
    """How one rank ended; `stopped` when it had been told to."""

    rank: int
    code: int
    stopped: bool


class _Executor(LocalExecutor):
    """submitit's local executor with our supervisor in the place of its controller."""

    def __init__(self, folder: Path, env: Mapping[str, str], world: int) -> None:
        super().__init__(folder)
        self.env, self.world = env, world
        self.started: subprocess.Popen[bytes] | None = None
        self.update_parameters(tasks_per_node=world)

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self.started is not None
        return self.started

    def _submit_command(self, command: str) -> LocalJob[Any]:
        env = {
            **self.env,
            "SUBMITIT_EXECUTOR": "local",
            "SUBMITIT_LOCAL_NTASKS": str(self.world),
            "SUBMITIT_LOCAL_COMMAND": command,
            "SUBMITIT_LOCAL_NODEID": "0",
            "SUBMITIT_LOCAL_JOB_NUM_NODES": "1",
            "SUBMITIT_LOCAL_WITH_SHELL": "",
            "SUBMITIT_STDERR_TO_STDOUT": "1",
            # Read by submitit, without effect: the supervisor has no time limit.
            "SUBMITIT_LOCAL_TIMEOUT_S": "0",
            "SUBMITIT_LOCAL_SIGNAL_DELAY_S": "0",
        }
        # In a session of its own: Ctrl-C reaches this process alone, which then stops the ranks in good order.
        self.started = subprocess.Popen(
            [sys.executable, "-m", "hpctrain.launch.local.supervisor", str(self.folder)],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        return LocalJob(self.folder, str(self.started.pid), range(self.world), self.started)


def _follow(supervisor: subprocess.Popen[bytes]) -> Iterator[_End]:
    """The ends of ranks as they come, until the supervisor is done."""
    assert supervisor.stdout is not None
    return (_End(**json.loads(line)) for line in supervisor.stdout)


def _stop(supervisor: subprocess.Popen[bytes] | None) -> None:
    """Close the supervisor's lifeline and wait; ranks that do not go are killed with it."""
    if supervisor is None:
        return
    try:
        if supervisor.stdin is not None:
            supervisor.stdin.close()
        supervisor.wait(timeout=4 * GRACE_S)
    except BaseException as error:
        supervisor.kill()  # the kernel kills its ranks
        supervisor.wait()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
    finally:
        if supervisor.stdout is not None:
            supervisor.stdout.close()


def _results(ends: Sequence[_End], world: int, logs: Path, supervisor: subprocess.Popen[bytes]) -> list[Any]:
    outcomes = _outcomes(logs, world)
    failed = [end for end in ends if end.code]
    if failed:
        _blame(failed, outcomes, logs)
    if len(ends) < world:
        raise LaunchError(f"the supervisor of the ranks {how_it_ended(supervisor.returncode)}, and the ranks with it.")
    values = []
    for rank in range(world):
        outcome = outcomes[rank]
        if outcome is None:
            raise LaunchError(f"rank {rank} ended before its work was done; the end of {_log(logs, rank)}")
        values.append(outcome.value)
    return values


def _outcomes(logs: Path, world: int) -> dict[int, Outcome | None]:
    """What each rank has left; taken away."""
    outcomes = {rank: Outcome.read(outcome_file(logs, rank)) for rank in range(world)}
    for rank in range(world):
        outcome_file(logs, rank).unlink(missing_ok=True)
    return outcomes


def _blame(failed: Sequence[_End], outcomes: Mapping[int, Outcome | None], logs: Path) -> NoReturn:
    """Raise the error of the rank that failed first, not of one that failed because of it."""

    def is_consequence(end: _End) -> bool:
        outcome = outcomes[end.rank]
        return end.stopped or (outcome is not None and outcome.consequence)

    first = min(failed, key=is_consequence)  # of equals the first, and they are in order of time
    outcome = outcomes[first.rank]
    if outcome is not None and outcome.error is not None:
        raise outcome.error
    how = f"failed with {outcome.text}" if outcome is not None and outcome.text else how_it_ended(first.code)
    raise LaunchError(f"rank {first.rank} {how}; the end of {_log(logs, first.rank)}")


def _log(logs: Path, rank: int) -> str:
    """A rank's log: its path and last lines."""
    path = logs / f"rank-{rank}.log"
    with suppress(OSError), path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()[-TAIL_LINES:]
        return f"{path}:\n" + "\n".join(f"  {line}" for line in lines)
    return f"{path} (which cannot be read)"


@contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """SIGTERM unwinds the stack, so that the ranks are stopped. Only the main thread can arrange for it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
