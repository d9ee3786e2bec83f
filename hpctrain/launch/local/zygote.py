"""A warm parent that forks ranks: a world of gloo processes in milliseconds instead of seconds of imports.

The zygote imports what ranks need, computes nothing and starts no threads; each request forks `world`
children of it, which form a process group, run one function and leave. Nothing a rank does can leak into
the next request.
"""

from __future__ import annotations

import datetime
import gc
import importlib
import multiprocessing.connection as connection
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import cloudpickle

from hpctrain.errors import LaunchError
from hpctrain.files import write_whole
from hpctrain.launch.life.process import die_with_parent, exit_now, how_it_ended, let_others_finish

GRACE_S = 3.0
"""How long the other ranks may go on after one has failed."""


class RankFailure(LaunchError):
    """Ranks raised or died. `ranks` are those that failed by themselves, the first one first."""

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


@dataclass(frozen=True)
class _End:
    """How a rank ended: its exit status, what it returned (pickled) or the traceback it left."""

    rank: int
    code: int
    stopped: bool
    value: bytes | None
    error: str | None

    @property
    def ok(self) -> bool:
        return self.code == 0 and self.value is not None

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.error or how_it_ended(self.code)}"


class Zygote:
    """Forks worlds of ranks on request.

    It and its ranks end when the process that made it closes it, ends or is killed, also while a world runs.

    Args:
        imports: modules to import once, so that ranks find them loaded.
    """

    def __init__(self, imports: Sequence[str] = ("torch", "torch.distributed")) -> None:
        ours, theirs = socket.socketpair()
        self._owner = os.getpid()
        self._asked = 0
        sys.stdout.flush()  # children flush what they inherit
        sys.stderr.flush()
        self._pid = os.fork()
        if self._pid == 0:
            status = 1
            try:
                ours.close()
                _serve(connection.Connection(theirs.detach()), imports)
                status = 0
            except Exception:
                traceback.print_exc()
            finally:
                exit_now(status)
        theirs.close()
        self._link = connection.Connection(ours.detach())

    def run(self, function: Callable[..., Any], world: int, *args: Any, timeout_s: float = 120.0) -> list[Any]:
        """Call `function(*args)` on `world` ranks of a new gloo process group.

        Args:
            function: pickled with cloudpickle, by value where its module asks for it.
            world: number of ranks; with 0 one process is forked without a process group.
            timeout_s: after which all ranks are killed.

        Returns:
            What each rank returned, in rank order.

        Raises:
            RankFailure: a rank raised, died or did not end in time; names those that failed by themselves.
        """
        self._asked += 1
        ends, late = self._ask(_Request(self._asked, cloudpickle.dumps((function, args)), world, timeout_s))
        if all(end.ok for end in ends):
            return [cloudpickle.loads(end.value) for end in sorted(ends, key=lambda end: end.rank)]
        failed = [end for end in ends if not end.ok and not end.stopped]
        if late or not failed:
            failed += [end for end in ends if end.stopped]
            texts = [f"rank {e.rank}: did not end in time" if e.stopped else str(e) for e in failed]
        else:
            texts = [str(end) for end in failed]
        raise RankFailure("\n".join(texts), [end.rank for end in failed])

    def _ask(self, request: _Request) -> tuple[list[_End], bool]:
        try:
            self._link.send(request)
            while True:
                number, ends, late = self._link.recv()
                if number == request.number:  # an interrupted `run` leaves an answer that nobody has read
                    return ends, late
        except (EOFError, OSError):
            raise RankFailure("the process that forks ranks is gone.") from None

    def close(self) -> None:
        """End the zygote, and the world that may be running."""
        if os.getpid() == self._owner and self._pid:
            self._link.close()
            with suppress(ChildProcessError):
                os.waitpid(self._pid, 0)
            self._pid = 0


@dataclass(frozen=True)
class _Request:
    number: int
    payload: bytes
    world: int
    timeout_s: float


def _serve(link: connection.Connection, imports: Sequence[str]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # unwinds: ranks are killed, folders removed
    let_others_finish()
    gc.callbacks.clear()  # those of the process that forked this one: what a signal raises in one of them is lost
    gc.disable()  # nothing of what is imported is garbage
    for name in imports:
        importlib.import_module(name)
    # A rank's collections pass over what was imported, hundreds of thousands of objects, and leave its pages shared.
    gc.collect()
    gc.freeze()
    gc.enable()
    while True:
        try:
            request = link.recv()
        except EOFError:
            return
        folder = Path(tempfile.mkdtemp(prefix="hpctrain-ranks-"))
        try:
            link.send((request.number, *_world(request, link, folder)))
        except OSError:
            return  # nobody is left to tell
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _world(request: _Request, link: connection.Connection, folder: Path) -> tuple[list[_End], bool]:
    """Run one world to its end. Returns how its ranks ended, in order of time, and whether they were late."""
    zygote = os.getpid()
    running: dict[int, int] = {}
    ends: list[_End] = []
    deadline, late, stopped = time.monotonic() + request.timeout_s, False, False
    try:
        for rank in range(max(request.world, 1)):
            pid = os.fork()
            if pid == 0:
                _rank(request, rank, folder, link, zygote)
            running[pid] = rank
        while running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid:
                _kill_group(pid)  # what the rank itself has started
                ends.append(_end(running.pop(pid), os.waitstatus_to_exitcode(status), stopped, folder))
                if not ends[-1].ok:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
            elif time.monotonic() > deadline:
                late, stopped, deadline = all(end.ok for end in ends), True, float("inf")
                for pid in running:
                    _kill_group(pid)
            elif link.poll(0.001):  # a new request, or the end of whoever makes them: this one is given up
                break
    finally:
        for pid in running:
            _kill_group(pid)
            os.waitpid(pid, 0)
    return ends, late


def _kill_group(pid: int) -> None:
    for kill in (os.kill, os.killpg):  # the rank may not have made its group yet
        with suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def _end(rank: int, code: int, stopped: bool, folder: Path) -> _End:
    result, error = folder / f"{rank}.result", folder / f"{rank}.error"
    value = result.read_bytes() if result.exists() else None
    return _End(rank, code, stopped, value, error.read_text(errors="replace") if error.exists() else None)


def _rank(request: _Request, rank: int, folder: Path, link: connection.Connection, zygote: int) -> NoReturn:
    """Body of a forked rank. Never returns, whatever fails in it."""
    status = 1
    try:
        try:
            die_with_parent(zygote)
            os.setpgid(0, 0)
            link.close()
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            _join(request, rank, folder)
            function, args = cloudpickle.loads(request.payload)
            write_whole(folder / f"{rank}.result", cloudpickle.dumps(function(*args)))
            status = 0
            _linger(request.world, folder)
        except BaseException:
            (folder / f"{rank}.error").write_text(traceback.format_exc(), errors="replace")
    finally:
        exit_now(status)


def _linger(world: int, folder: Path) -> None:
    """Stay until all ranks are done, or one has failed: a peer may still be connecting to this one."""
    deadline = time.monotonic() + GRACE_S
    while time.monotonic() < deadline:
        ended = [path.suffix for path in folder.iterdir()]
        if ".error" in ended or ended.count(".result") >= world:
            return
        time.sleep(0.002)


def _join(request: _Request, rank: int, folder: Path) -> None:
    """The rank's part in a gloo group over a file."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    world = request.world
    if not world:
        return
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(str(folder / "store"), world)  # type: ignore[attr-defined]
    timeout = datetime.timedelta(seconds=request.timeout_s)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
    dist.barrier()  # a rank that ends at once must not break the others' connecting
