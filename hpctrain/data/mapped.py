"""Files in memory, and what becomes of a reader when one is cut under it.

Reading a place of a mapped file that is not there any more raises SIGBUS, which ends a process without a word. So who
reads asks for the length first. What is cut between that and the reading still ends the process.
"""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hpctrain.errors import DataError


class Mapped:
    """A file in memory, read-only. Safe to fork.

    Args:
        path: of it.
        name: what it is called in sentences.

    Attributes:
        data: [bytes] uint8; a plain array, because slices of `np.memmap` are slow to make.

    Raises:
        OSError, ValueError: it cannot be opened or mapped.
    """

    def __init__(self, path: Path, name: str) -> None:
        with path.open("rb") as file:
            self._memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.data: NDArray[np.uint8] = np.frombuffer(self._memory, np.uint8)
        self._name = name

    def check(self) -> None:
        """Refuse a file that is shorter than it was when it was opened. Takes less than a microsecond.

        Raises:
            DataError: it is.
        """
        size = self._memory.size()
        if size < len(self.data):
            raise DataError(
                f"{self._name} was cut while it was in use: it had {len(self.data):,} bytes and has {size:,}; "
                f"put the whole file back, and never write over one that is being read."
            )
