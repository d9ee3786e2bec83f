"""Files that readers see whole or not at all, and that last; locks."""

from __future__ import annotations

import errno
import fcntl
import io
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)
"""What file systems without locks answer to who asks for one."""
NETWORK = {"nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "fuse.sshfs", "9p", "pvfs2", "wekafs"}
"""File systems whose files other hosts may hold open."""
MEMORY = {"tmpfs", "ramfs"}
"""File systems whose files are in memory."""
ASK_AGAIN_S = 0.02
"""Seconds between two looks at a lock that another has."""


def write_whole(path: Path, content: str | bytes, durable: bool = False) -> None:
    """Put a file in the place of an older one at once, so that a reader, or a kill, meets the one or the other.

    Args:
        path: of it.
        content: of it.
        durable: it is there after a crash of the machine too; without, that may leave an empty file.

    Raises:
        OSError: it cannot be written; what was there stays, and nothing else is left.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_bytes(content.encode() if isinstance(content, str) else content)
        if durable:
            publish(part, path)
        else:
            part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def write_picture(path: Path, figure: Any, dpi: float = 120) -> None:
    """Draw a figure of matplotlib, in the format that the name ends in, into a file that is there whole or not at all.

    Raises:
        OSError: it cannot be written; names it.
    """
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=dpi, format=path.suffix[1:].lower() or "png")
    try:
        write_whole(path, drawn.getvalue())
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """An empty file to be written at length; it takes the place of `path`, and lasts, when the block ends well.

    Otherwise it is gone, and what was there stays. One process at a time has it; what a killed one left is no matter.

    Raises:
        BlockingIOError: another process is writing it.
        OSError: it cannot be written.
    """
    part = path.with_name(f".{path.name}.part")
    handle = lock(part)
    try:
        os.ftruncate(handle, 0)
        yield part
        publish(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    finally:
        os.close(handle)


def publish(part: Path, path: Path) -> None:
    """Give a file that was written its name, on the disk, in place of the file that had it."""
    sync(part)
    part.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk, where the file system offers that."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL or not path.is_dir():  # some network file systems: names last at once
            raise
    finally:
        os.close(handle)


def lock(path: Path, wait_s: float = 0.0) -> int:
    """Make a file if it is not there, and be the only process that has it locked, until the handle is closed.

    Forked processes have it too, so that it is free when all of them have ended, however they end. Where the file
    system has no locks, nobody is kept out. The file may be deleted by who has it.

    Args:
        path: of the file.
        wait_s: how long to wait for another process, seconds.

    Returns:
        the handle.

    Raises:
        BlockingIOError: another process has it.
        OSError: the file cannot be made.
    """
    deadline = time.monotonic() + wait_s
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            _wait_for(handle, deadline)
            if path.exists() and os.path.samestat(os.fstat(handle), path.stat()):
                return handle
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)  # who had it was just done, and deleted it


def _wait_for(handle: int, deadline: float) -> None:
    while True:
        try:
            return fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in NO_LOCKS:
                return None
            if error.errno not in (errno.EAGAIN, errno.EACCES) or time.monotonic() >= deadline:
                raise
        time.sleep(ASK_AGAIN_S)


@contextmanager
def in_turn(path: Path, wait_s: float = 10.0) -> Iterator[None]:
    """Of the processes that change a file by what it holds, one at a time is inside, on whichever node.

    Whoever has waited for `wait_s`, or is on a file system without locks, goes on without.

    Raises:
        OSError: the folder cannot be written.
    """
    handle: int | None = None
    with suppress(BlockingIOError):
        handle = lock(path.with_name(f".{path.name}.lock"), wait_s)
    try:
        yield
    finally:
        if handle is not None:
            os.close(handle)


def file_system(folder: Path) -> str:
    """Type of the file system a folder is on; empty if unknown."""
    import psutil

    mounts: dict[str, str] = {p.mountpoint: p.fstype for p in psutil.disk_partitions(all=True)}
    for parent in (folder.resolve(), *folder.resolve().parents):
        if str(parent) in mounts:
            return mounts[str(parent)]
    return ""
