"""Reading ahead of the consumer."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Generic, TypeVar

T = TypeVar("T")


class Prefetch(Generic[T]):
    """An iterator that runs another one in a background thread, up to `ahead` items in front of the consumer.

    What the source raises is raised where its item would have been. `close`, or leaving the `with` block,
    ends the thread. With `ahead` 0 there is no thread.
    """

    def __init__(self, source: Iterator[T], ahead: int) -> None:
        self._source = source
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()
        self._items: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue(max(ahead, 1))
        if ahead:
            self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)
            self._thread.start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._closed.is_set():
            raise StopIteration
        if self._thread is None:
            return next(self._source)
        item, error = self._items.get()
        if error is not None:
            self.close()
            raise error
        return item  # type: ignore[return-value]

    def close(self) -> None:
        """End the thread. What was read ahead is dropped; nothing more is handed out."""
        self._closed.set()
        if self._thread is None or self._thread is threading.current_thread():
            return
        while self._thread.is_alive():
            try:  # room for an item that the thread may be waiting to put down
                self._items.get(timeout=0.01)
            except queue.Empty:
                continue
        self._thread.join()

    def __enter__(self) -> Prefetch[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        error: BaseException = StopIteration()
        try:
            for item in self._source:
                self._items.put((item, None))
                if self._closed.is_set():
                    return
        except BaseException as caught:
            error = caught
        self._items.put((None, error))
