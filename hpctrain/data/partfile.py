"""The file of a part: what was encoded, in the order of the corpus, and at its end what it is.

    tokens      of all its documents
    mask        uint8 a token: 1 where it is learnt; only where there are prompts
    facts       int64 lengths, uint32 checksums, and 16-byte hashes of the texts, if asked for, of its documents
    JSON        `Part`
    16 bytes    length and CRC-32 of the JSON, and a mark

It gets its name when it is whole and on the disk. A file that is not, or is of another length than its end says, is not
there; damage within is found by CRC-32 where it is read.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from hpctrain.data import format
from hpctrain.errors import DataError
from hpctrain.files import sync

END = struct.Struct("<II8s")
MARK = b"hpcpart2"
HASH = 16
"""Bytes of the hash of a text: among 1e10 documents two have the same by chance with probability 1e-19."""


class Damaged(DataError):
    """A part that is not what was written."""


@dataclass
class Part:
    """A part that is done.

    Attributes:
        tokens: in it.
        documents: in it.
        empty: records without text, left out.
        bad: documents that were left out because they are bad.
        crc: CRC-32 of its stretches by name.
        sizes: bytes of them, in their order.
        shares: tokens by the path that their source was found under.
    """

    tokens: int = 0
    documents: int = 0
    empty: int = 0
    bad: int = 0
    crc: dict[str, int] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    shares: dict[str, int] = field(default_factory=dict)

    def begin(self, name: str) -> int:
        """Where a stretch begins in the file, bytes."""
        before = list(self.sizes)
        return sum(self.sizes[other] for other in before[: before.index(name)])


def path_of(folder: Path, key: str) -> Path:
    """Where a part is."""
    return folder / f"{key}.part"


class Writer:
    """Writes the file of a part, one stretch after the other.

    Args:
        folder: of the parts.
        key: names the part.
    """

    def __init__(self, folder: Path, key: str) -> None:
        self._path = path_of(folder, key)
        self._partial = self._path.with_name(f"{key}.{os.getpid()}.partial")
        self._file: BinaryIO = self._partial.open("wb")
        self._sizes: dict[str, int] = {}
        self._sums: dict[str, int] = {}
        self._crc = self._size = 0

    def write(self, data: Any) -> None:
        """Bytes of the stretch that is being written."""
        self._file.write(data)
        self._size += len(data)
        self._crc = zlib.crc32(data, self._crc)

    def mark(self) -> tuple[int, int]:
        """Where the stretch stands; only before any other was ended."""
        return self._size, self._crc

    def back_to(self, mark: tuple[int, int]) -> None:
        """Take back what was written since."""
        self._size, self._crc = mark
        self._file.seek(self._size)
        self._file.truncate()

    def end(self, name: str) -> None:
        """A stretch is whole."""
        self._sizes[name], self._sums[name] = self._size, self._crc
        self._size = self._crc = 0

    def close(self, part: Part) -> None:
        """Write what it is, and give it its name."""
        part.sizes, part.crc = self._sizes, self._sums
        record = json.dumps(asdict(part)).encode()
        self._file.write(record + END.pack(len(record), zlib.crc32(record), MARK))
        self._file.close()
        sync(self._partial)  # names need not last: a part that is not there is made again
        self._partial.replace(self._path)

    def drop(self) -> None:
        """Delete what has no name yet."""
        with suppress(OSError):  # what is in its buffer does not fit
            self._file.close()
        self._partial.unlink(missing_ok=True)


def done(folder: Path, key: str) -> Part | None:
    """What is known of a part, if all of it is there."""
    try:
        with path_of(folder, key).open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(size - END.size)
            length, crc, mark = END.unpack(file.read(END.size))
            file.seek(size - END.size - length)
            record = file.read(length)
        if mark != MARK or zlib.crc32(record) != crc:
            return None
        part = Part(**json.loads(record))
    except (OSError, ValueError, TypeError, struct.error):
        return None
    return part if size == sum(part.sizes.values()) + length + END.size else None


@dataclass(frozen=True)
class Facts:
    """Of a part's documents."""

    lengths: NDArray[np.int64]
    checksums: NDArray[np.uint32]
    hashes: NDArray[np.uint64]
    """[documents, 2], or none."""


def facts(folder: Path, key: str, part: Part) -> Facts:
    """Read what is kept of a part's documents.

    Raises:
        Damaged: it is not what was written.
    """
    data = b"".join(read(folder, key, part, "facts"))
    n = part.documents
    lengths = np.frombuffer(data, format.OFFSET, n)
    sums = np.frombuffer(data, format.CHECKSUM, n, 8 * n)
    hashes = np.frombuffer(data, "<u8", -1 if len(data) > 12 * n else 0, 12 * n) if n else np.empty(0, "<u8")
    return Facts(lengths, sums, hashes.reshape(-1, 2))


def read(folder: Path, key: str, part: Part, name: str, block: int = 1 << 20) -> Iterator[bytes]:
    """A stretch of a part, in blocks of so many bytes.

    Raises:
        Damaged: it is not what was written; known at the end.
    """
    left, crc = part.sizes[name], 0
    try:
        with path_of(folder, key).open("rb") as file:
            file.seek(part.begin(name))
            while left and (data := file.read(min(block, left))):
                left -= len(data)
                crc = zlib.crc32(data, crc)
                yield data
    except FileNotFoundError:
        crc = -1
    if left or crc != part.crc[name]:
        raise Damaged(
            f"Part {path_of(folder, key)} of the build is damaged, and was so again when it was made anew: the disk or "
            f"its server fails; build elsewhere."
        )
