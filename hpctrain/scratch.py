"""Scratch space on a disk: files without a name, read and written past the page cache in blocks, many at a time.

A file has no name from its first byte on, so its space is free again when its process ends, however that ends: there
is nothing to clean. Its space is taken when it is made, where the file system can, so a full disk is known then and
not in the midst of a run. Every transfer is checked: DeepSpeed's asynchronous I/O does not look at what the kernel says
of one, and takes a read that has failed (a disk at its end, memory that is not aligned) for one that brought the data.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

ALIGNMENT = 4096
"""Bytes that offsets, lengths and addresses are multiples of, as O_DIRECT wants them on any disk."""


def align(size: int, to: int = ALIGNMENT) -> int:
    """The next multiple."""
    return -(-size // to) * to


class ScratchFile:
    """A file without a name.

    Args:
        folder: on whose disk it is.
        size: bytes; all are taken at once, and read as zeros until they are written.

    Attributes:
        direct: transfers go past the page cache; some file systems cannot.

    Raises:
        OSError: the folder cannot be written, or the disk has no such space.
    """

    def __init__(self, folder: Path, size: int) -> None:
        self.folder, self.size = folder, 0
        self._fd = _unnamed(folder)
        self.direct = _past_the_cache(self._fd)
        try:
            self.grow(size)
        except OSError:
            os.close(self._fd)
            raise

    def grow(self, size: int) -> int:
        """Add space at the end, and return where that begins.

        Raises:
            OSError: the disk has no such space.
        """
        begin, size = self.size, align(size)
        if size:
            try:
                os.posix_fallocate(self._fd, begin, size)
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise OSError(error.errno, error.strerror, str(self.folder)) from None
                os.ftruncate(self._fd, begin + size)  # it takes no space ahead: a full disk is known by the writes
        self.size += size
        return begin

    def close(self) -> None:
        """Give the space back."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def read_into(self, data: memoryview, offset: int) -> None:
        """Fill memory from an offset on.

        Raises:
            OSError: not all could be read.
        """
        self._whole(os.preadv, data, offset)

    def write_from(self, data: memoryview, offset: int) -> None:
        """Write memory at an offset.

        Raises:
            OSError: not all could be written.
        """
        self._whole(os.pwritev, data, offset)
        if not self.direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._fd, offset, len(data), os.POSIX_FADV_DONTNEED)

    def _whole(self, call: Callable[[int, Sequence[memoryview], int], int], data: memoryview, offset: int) -> None:
        done = 0
        while done < len(data):
            moved = call(self._fd, [data[done:]], offset + done)
            if moved <= 0:
                raise OSError(errno.EIO, f"transfer stopped after {done} of {len(data)} bytes", str(self.folder))
            done += moved


def _unnamed(folder: Path) -> int:
    """A new file of no name, open for reading and writing."""
    flags = os.O_RDWR | os.O_CLOEXEC
    if hasattr(os, "O_TMPFILE"):
        try:
            return os.open(folder, flags | os.O_TMPFILE, 0o600)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
                raise
    path = folder / f".hpctrain-{os.getpid()}-{threading.get_ident()}-{time.monotonic_ns()}"
    fd = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
    os.unlink(path)
    return fd


def _past_the_cache(fd: int) -> bool:
    if not hasattr(os, "O_DIRECT"):
        return False
    import fcntl

    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
    except OSError:
        return False
    return True


class Transfer:
    """Reads or writes under way."""

    def __init__(self, parts: Sequence[Future[None]], waited: Callable[[float], None]) -> None:
        self._parts, self._waited = parts, waited

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return all(part.done() for part in self._parts)

    def wait(self) -> None:
        """Wait until all is moved. May be called again.

        Raises:
            OSError: some could not be moved.
        """
        if not self.done():
            began = time.perf_counter()
            wait(self._parts)
            self._waited(time.perf_counter() - began)
        for part in self._parts:
            part.result()


@dataclass
class Moved:
    """What a disk was asked to move so far, in bytes, and the seconds that were waited for it."""

    read: int = 0
    written: int = 0
    waited: float = 0.0

    def since(self, before: Moved) -> Moved:
        """What was added since a copy was taken."""
        return Moved(self.read - before.read, self.written - before.written, self.waited - before.waited)


class Disk:
    """Moves blocks between memory and scratch files with some threads. One thread asks and waits.

    Args:
        block: bytes that a thread moves at once; a multiple of `ALIGNMENT`.
        threads: blocks that are under way at the same time.
    """

    def __init__(self, block: int, threads: int) -> None:
        assert block % ALIGNMENT == 0, block
        self.block, self.threads, self.moved = block, threads, Moved()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="scratch")

    def read(self, file: ScratchFile, offset: int, data: memoryview) -> Transfer:
        """Begin to fill memory, which must stay until the transfer has been waited for."""
        self.moved.read += len(data)
        return self._begin(file.read_into, offset, data)

    def write(self, file: ScratchFile, offset: int, data: memoryview) -> Transfer:
        """Begin to write memory, which must not change until the transfer has been waited for."""
        self.moved.written += len(data)
        return self._begin(file.write_from, offset, data)

    def close(self) -> None:
        """End the threads, after what they are doing."""
        self._pool.shutdown()

    def _begin(self, call: Callable[[memoryview, int], None], offset: int, data: memoryview) -> Transfer:
        # Not every kernel and disk refuses memory that is not aligned; those that do would fail elsewhere first.
        address = ctypes.addressof(ctypes.c_char.from_buffer(data)) if data else 0
        assert not (address | offset | len(data)) % ALIGNMENT, (address, offset, len(data))
        parts = [self._pool.submit(call, data[at : at + self.block], offset + at) for at in _starts(data, self.block)]
        return Transfer(parts, self._count)

    def _count(self, seconds: float) -> None:
        self.moved.waited += seconds


def _starts(data: memoryview, block: int) -> Iterator[int]:
    return iter(range(0, len(data), block))
