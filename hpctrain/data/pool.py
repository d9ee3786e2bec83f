"""Processes of one machine that work on what they are given. They end with the process that started them, however it
ends."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any

from hpctrain.errors import DataError

TELL = 1 << 20
"""Bytes of progress that are worth a message."""

Task = Callable[[Any, Callable[[int], None]], Any]
"""Called with an item and something that takes progress."""


class Pool:
    """Workers, each of which does one item after the other.

    They are forked where that is safe, and so begin at once, with all that `task` holds. Where this process has other
    threads, whose locks a fork would leave locked, or MPI, they are started anew and make the task themselves.

    Args:
        task: what is done with an item.
        prepare: a function of a module that makes the task, for workers that are started anew.
        args: for it.
        workers: processes; up to 1 it is done in this one.
    """

    def __init__(self, task: Task, prepare: Callable[..., Task], args: tuple[Any, ...], workers: int) -> None:
        self._task = task
        self._links: dict[Connection, Any] = {}
        if workers <= 1:
            return
        forked = can_fork()
        context: Any = multiprocessing.get_context("fork" if forked else "spawn")
        for _ in range(workers):
            ours, theirs = context.Pipe()
            how = (theirs, _given, (task,), [ours, *self._links]) if forked else (theirs, prepare, args, [])
            process = context.Process(target=_work, args=how, daemon=True)
            process.start()
            theirs.close()
            self._links[ours] = process

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for link, process in self._links.items():
            link.close()
            process.terminate()
            process.join()

    def spread(self, items: Sequence[Any], progress: Callable[[int], None]) -> Iterator[tuple[int, Any]]:
        """Have each item worked on, by whoever is free.

        Args:
            items: what the task is called with; with workers, they are pickled.
            progress: takes what tasks tell.

        Yields:
            (number of the item, what its task returned), in the order in which they are done.

        Raises:
            whatever a task raises, after which the pool is of no more use; WorkerLost: a worker was killed.
        """
        if not self._links:
            for number, item in enumerate(items):
                yield number, self._task(item, progress)
            return
        waiting = list(enumerate(items))[::-1]
        busy = set()
        for link in list(self._links)[: len(items)]:
            _say(link, waiting.pop())
            busy.add(link)
        while busy:
            for ready in wait(list(busy)):
                assert isinstance(ready, Connection)
                kind, *said = _heard(ready)
                if kind == "progress":
                    progress(said[0])
                elif kind == "failed":
                    raise said[0]
                else:
                    if waiting:
                        _say(ready, waiting.pop())
                    else:
                        busy.remove(ready)
                    yield said[0], said[1]


def can_fork() -> bool:
    """Whether a forked process may go on working: nobody else holds a lock in this one, and MPI is not in it."""
    return sys.platform == "linux" and threading.active_count() == 1 and "mpi4py.MPI" not in sys.modules


class WorkerLost(DataError):
    """A worker is gone."""

    def __init__(
        self, said: str = "A worker of the build was killed (out of memory?); give it fewer --workers, or more memory."
    ) -> None:
        super().__init__(said)


def _say(link: Connection, item: Any) -> None:
    try:
        link.send(item)
    except (BrokenPipeError, ConnectionResetError):
        raise WorkerLost from None


def _heard(link: Connection) -> Any:
    try:
        return link.recv()
    except (EOFError, ConnectionResetError):
        raise WorkerLost from None


def _given(task: Task) -> Task:
    return task


def _work(link: Connection, prepare: Callable[..., Task], args: tuple[Any, ...], others: Sequence[Connection]) -> None:
    """Body of a worker.

    Args:
        link: to the parent.
        prepare, args: make the task.
        others: ends of links that a forked worker got too; while it has them, its siblings do not see them closed.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core each
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for other in others:
        other.close()
    inbox: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(link, inbox), daemon=True).start()
    try:
        task, told = prepare(*args), _Told(link)
        while True:
            number, item = inbox.get()
            result = task(item, told)
            told.flush()
            link.send(("done", number, result))
    except BaseException as error:
        try:
            link.send(("failed", error))
        except Exception:  # it cannot be pickled
            with suppress(Exception):
                link.send(("failed", RuntimeError(f"{type(error).__name__}: {error}")))


class _Told:
    """Progress, told now and then."""

    def __init__(self, link: Connection) -> None:
        self._link, self._bytes = link, 0

    def __call__(self, done: int) -> None:
        self._bytes += done
        if self._bytes >= TELL:
            self.flush()

    def flush(self) -> None:
        """Tell what has not been told."""
        self._link.send(("progress", self._bytes))
        self._bytes = 0


def _listen(link: Connection, inbox: queue.SimpleQueue[tuple[int, Any]]) -> None:
    """Take items; when the other end is gone, so is this process."""
    while True:
        try:
            inbox.put(link.recv())
        except (EOFError, OSError):
            os._exit(1)
