"""A warm parent that forks ranks: a world of gloo processes in milliseconds instead of seconds of imports.

The zygote imports what ranks need, computes nothing and starts no threads; each request forks `world`
children of it, which form a process group, run one function and leave. Nothing a rank does can leak into
the next request.
"""

from __future__ import annotations

import datetime
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
from pathlib import Path
from typing import Any

import cloudpickle

from hpctrain.errors import LaunchError

GRACE_S = 5.0
"""How long the other ranks may go on after one has failed."""


class RankFailure(LaunchError):
    """A rank raised or died. `ranks` are the ranks that failed first; the text holds their tracebacks."""

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class Zygote:
    """Forks worlds of ranks on request.

    Args:
        imports: modules to import once, so that ranks find them loaded.
    """

    def __init__(self, imports: Sequence[str] = ("torch", "torch.distributed")) -> None:
        ours, theirs = socket.socketpair()
        self._owner = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            ours.close()
            status = 1
            try:
                _serve(connection.Connection(theirs.detach()), imports)
                status = 0
            finally:
                os._exit(status)
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
            RankFailure: a rank raised, died or did not end in time.
        """
        self._link.send((cloudpickle.dumps((function, args)), world, timeout_s))
        outcomes, late = self._link.recv()
        failed = [r for r, (ok, _) in enumerate(outcomes) if not ok]
        if not failed:
            return [cloudpickle.loads(value) for _, value in outcomes]
        first = [r for r in failed if outcomes[r][1] is not None] or failed
        texts = [f"rank {r}: {outcomes[r][1] or ('did not end in time' if late else 'died')}" for r in first]
        raise RankFailure("\n".join(texts), first)

    def close(self) -> None:
        """End the zygote."""
        if os.getpid() == self._owner and self._pid:
            self._link.close()
            os.waitpid(self._pid, 0)
            self._pid = 0


def _serve(link: connection.Connection, imports: Sequence[str]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in imports:
        importlib.import_module(name)
    while True:
        try:
            payload, world, timeout_s = link.recv()
        except EOFError:
            return
        folder = Path(tempfile.mkdtemp(prefix="hpctrain-ranks-"))
        try:
            link.send(_world(payload, world, timeout_s, folder))
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _world(payload: bytes, world: int, timeout_s: float, folder: Path) -> tuple[list[tuple[bool, Any]], bool]:
    children: dict[int, int] = {}
    for rank in range(max(world, 1)):
        pid = os.fork()
        if pid == 0:
            _rank(payload, rank, world, timeout_s, folder)
        children[pid] = rank
    deadline, late = time.monotonic() + timeout_s, False
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            children.pop(pid, None)
            if status != 0:
                deadline = min(deadline, time.monotonic() + GRACE_S)
            continue
        if time.monotonic() > deadline:
            late = late or not any(folder.glob("*.error"))
            for pid in children:
                os.kill(pid, signal.SIGKILL)
            deadline = float("inf")
        time.sleep(0.001)
    outcomes: list[tuple[bool, Any]] = []
    for rank in range(max(world, 1)):
        done, error = folder / f"{rank}.result", folder / f"{rank}.error"
        if done.exists():
            outcomes.append((True, done.read_bytes()))
        else:
            outcomes.append((False, error.read_text() if error.exists() else None))
    return outcomes, late


def _rank(payload: bytes, rank: int, world: int, timeout_s: float, folder: Path) -> None:
    """Body of a forked rank. Never returns."""
    status = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(max(world, 1)))
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        if world:
            store = dist.FileStore(str(folder / "store"), world)  # type: ignore[attr-defined]
            timeout = datetime.timedelta(seconds=timeout_s)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
            dist.barrier()  # a rank that ends at once must not break the others' connecting
        function, args = cloudpickle.loads(payload)
        value = cloudpickle.dumps(function(*args))
        part = folder / f"{rank}.part"
        part.write_bytes(value)
        part.rename(folder / f"{rank}.result")
        status = 0
    except BaseException:
        (folder / f"{rank}.error").write_text(traceback.format_exc())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
