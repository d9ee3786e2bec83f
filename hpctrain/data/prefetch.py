"""Reading ahead of the consumer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Generic, TypeVar

T = TypeVar("T")


class Prefetch(Generic[T]):
    """An endless iterator over `read(first)`, `read(first + step)`, ...; threads run ahead of the consumer.

    What comes is in order, and the same for any number of threads. What `read` raises is raised where its item would
    have been, and ends the iterator. `close`, or leaving the `with` block, ends the threads.

    Args:
        read: a pure function of a position, which several threads may call at once.
        first: position of the first item.
        step: from one to the next.
        ahead: items that are read or being read while the consumer has one; with 0 there is no thread.
        workers: threads, at most.
    """

    def __init__(self, read: Callable[[int], T], first: int, step: int, ahead: int, workers: int = 1) -> None:
        self._read, self._next, self._step, self._ahead = read, first, step, ahead
        self._coming: deque[Future[T]] = deque()
        self._closed = False
        self._pool = ThreadPoolExecutor(min(workers, ahead), thread_name_prefix="prefetch") if ahead else None
        self._submit()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._closed:
            raise StopIteration
        try:
            if not self._coming:
                item = self._read(self._next)
                self._next += self._step
                return item
            item = self._coming[0].result()
        except BaseException:
            self.close()
            raise
        self._coming.popleft()
        self._submit()
        return item

    def close(self) -> None:
        """End the threads. What was read ahead is dropped; nothing more is handed out."""
        self._closed = True
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        self._coming.clear()

    def __enter__(self) -> Prefetch[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _submit(self) -> None:
        while self._pool is not None and len(self._coming) < self._ahead:
            self._coming.append(self._pool.submit(self._read, self._next))
            self._next += self._step
