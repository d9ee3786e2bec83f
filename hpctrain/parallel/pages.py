"""Memory that a disk reads into and writes from: page-aligned tensors, page-locked where there is a GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hpctrain.scratch import ALIGNMENT, align


def aligned(nbytes: int, pinned: bool) -> Tensor:
    """Bytes that begin at a page, [nbytes] uint8, not yet written to."""
    whole = torch.empty(nbytes + ALIGNMENT, dtype=torch.uint8, pin_memory=pinned)
    return whole[-whole.data_ptr() % ALIGNMENT :][:nbytes]


def view_bytes(values: Tensor) -> memoryview:
    """The memory of a contiguous tensor of the host."""
    return memoryview(values.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


class Buffers:
    """A few pieces of aligned memory that are handed out and come back. What a disk still moves comes back by itself.

    Args:
        count: of them.
        nbytes: of each.
        pinned: page-locked.
    """

    def __init__(self, count: int, nbytes: int, pinned: bool) -> None:
        self.nbytes = align(nbytes)
        self._free = [aligned(self.nbytes, pinned) for _ in range(count)]
        self._moving: list[tuple[Tensor, Callable[[], bool], Callable[[], None]]] = []

    def try_take(self) -> Tensor | None:
        """One that is free; None where none is."""
        if not self._free:
            self._collect()
        return self._free.pop() if self._free else None

    def take(self) -> Tensor:
        """One that is free, when one is. Some must be moving, or it would wait for ever."""
        found = self.try_take()
        if found is None:
            assert self._moving, "all buffers are in use and none comes back"
            self._moving[0][2]()
            found = self.try_take()
            assert found is not None
        return found

    def give(self, buffer: Tensor) -> None:
        """Take one back."""
        self._free.append(buffer)

    def give_after(self, buffer: Tensor, done: Callable[[], bool], wait: Callable[[], None]) -> None:
        """Take one back when a transfer from it has ended."""
        self._moving.append((buffer, done, wait))

    def drain(self) -> None:
        """Wait for all transfers from buffers that were given back.

        Raises:
            OSError: one failed.
        """
        for _, _, wait in self._moving:
            wait()
        self._collect()

    def _collect(self) -> None:
        still = []
        for buffer, done, wait in self._moving:
            if done():
                wait()  # raises if it failed
                self._free.append(buffer)
            else:
                still.append((buffer, done, wait))
        self._moving = still
