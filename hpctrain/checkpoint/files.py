"""Every system call with which a checkpoint changes the disk.

Nothing else in this package writes, renames or deletes, so a test that ends the process at the n-th call of
this module, for every n, has ended it at every point where the disk can be left half done.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def make_folder(path: Path) -> None:
    """Make one folder; its parent exists."""
    os.mkdir(path)


def create(path: Path) -> int:
    """Make a new file and open it for writing; an existing one is an error.

    Returns:
        The file descriptor.
    """
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)


def write(fd: int, data: memoryview) -> None:
    """Write all bytes. The kernel may take fewer than offered, at most 2 GiB, in one call."""
    done = 0
    while done < len(data):
        done += os.write(fd, data[done:])


def fsync(fd: int) -> None:
    """Wait until the file is on the disk."""
    os.fsync(fd)


def close(fd: int) -> None:
    """Close, with the errors that network filesystems report only here."""
    os.close(fd)


def fsync_folder(path: Path) -> None:
    """Wait until the names in a folder are on the disk, where the filesystem offers that."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network filesystems refuse it: their names are durable at once
            raise
    finally:
        os.close(fd)


def rename(old: Path, new: Path) -> None:
    """Give a folder a name that nothing has."""
    os.rename(old, new)


def replace(old: Path, new: Path) -> None:
    """Give a file a name, in place of the file that had it."""
    os.replace(old, new)


def remove(path: Path) -> None:
    """Delete a file."""
    os.unlink(path)


def remove_folder(path: Path) -> None:
    """Delete an empty folder."""
    os.rmdir(path)


def start_write_back(fd: int, offset: int, size: int) -> int:
    """Ask the kernel to begin writing dirty pages out now, so that the disk works while we go on.

    Otherwise it waits for seconds, or for gigabytes, and all of the writing is left to `fsync`. Changes no
    content. On Linux the advice "not needed" queues dirty pages for writing and does not wait for them.

    Args:
        fd: of the file.
        offset: where to begin, bytes.
        size: up to where all is written.

    Returns:
        Bytes queued: whole pages only, because to write on in a page may mean to wait until it is on the disk.
    """
    size -= (offset + size) % mmap.PAGESIZE
    if size > 0 and hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, offset, size, os.POSIX_FADV_DONTNEED)
    return max(size, 0)


@contextmanager
def durable(path: Path) -> Iterator[int]:
    """A new file, open for writing; on the disk when the block is left."""
    fd = create(path)
    try:
        yield fd
        fsync(fd)
    except BaseException:
        os.close(fd)
        raise
    close(fd)


def write_file(path: Path, data: bytes) -> None:
    """Make a new file with this content, on the disk."""
    with durable(path) as fd:
        write(fd, memoryview(data))


def remove_tree(path: Path) -> None:
    """Delete a folder and what is in it."""
    for child in sorted(path.iterdir()):
        if child.is_dir() and not child.is_symlink():
            remove_tree(child)
        else:
            remove(child)
    remove_folder(path)
