"""One run at a time in a run folder.

Whoever saves removes what earlier attempts have left, and takes all of it for leftovers; so nobody else may be
writing there.
"""

from __future__ import annotations

import datetime
import errno
import fcntl
import json
import logging
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hpctrain.errors import LaunchError

log = logging.getLogger(__name__)

FILE = "lock"

_FLOCK = "hhqqi0q"
"""`struct flock` of Linux on 64 bits: type, whence, start, length, process; fcntl(2)."""

_HELD = (errno.EAGAIN, errno.EACCES)
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)


class RunFolderInUse(LaunchError):
    """Another process holds the lock."""


@contextmanager
def hold(folder: Path) -> Iterator[None]:
    """Keep others out of a run folder until the block is left or this process ends, however it ends.

    It is a POSIX lock on `RUN/lock`, which the kernel, or the file server, frees with the process: nothing can be
    left behind that a later run would have to distrust. Unlike one of `flock`, it is not handed on to forked
    children, which may live longer. What is written in the file is for the sentence that others get.

    Only one process of a run calls this, and it must not open that file otherwise: closing it would free the lock.
    Where the filesystem has no locks (Lustre mounted without `flock`) that is a warning.

    Args:
        folder: of the run; made if need be.

    Raises:
        RunFolderInUse: another process holds it.
        LaunchError: the folder cannot be written.
    """
    path = folder / FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise LaunchError(f"{path} cannot be opened ({error.strerror}); choose a run folder you can write.") from error
    try:
        if _lock(fd, path):
            _write(fd, json.dumps(_about_us()))
        try:
            yield
        finally:
            _write(fd, "")
    finally:
        os.close(fd)


def refuse_held(folder: Path) -> None:
    """Look whether another process holds a run folder, without holding it, making it or changing it.

    Not to be called by the process that holds it: closing the file would free the lock.

    Raises:
        RunFolderInUse: another process does.
    """
    try:
        fd = os.open(folder / FILE, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return  # no lock, or one that `hold` has something to say about
    try:
        asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, *_ = struct.unpack(_FLOCK, fcntl.fcntl(fd, fcntl.F_GETLK, asked))
        if kind != fcntl.F_UNLCK:
            raise _in_use(fd, folder)
    except OSError:
        return  # a filesystem without locks
    finally:
        os.close(fd)


def _in_use(fd: int, folder: Path) -> RunFolderInUse:
    return RunFolderInUse(
        f"Run folder {folder} is in use by {_holder(fd)}: wait for it or end it, or choose another name=... ."
    )


def _lock(fd: int, path: Path) -> bool:
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD:
            raise _in_use(fd, path.parent) from None
        if error.errno not in _NO_LOCKS:
            raise LaunchError(f"{path} cannot be locked ({error.strerror}).") from error
        log.warning("%s cannot be locked (%s): see to it yourself that one run at a time is in %s", path,
                    error.strerror, path.parent)  # fmt: skip
        return False
    return True


def _about_us() -> dict[str, object]:
    since = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return {"host": socket.gethostname(), "pid": os.getpid(), "since": since, "job": os.environ.get("SLURM_JOB_ID")}


def _holder(fd: int) -> str:
    try:
        about = json.loads(os.pread(fd, 4096, 0))
        job = f" (job {about['job']})" if about["job"] else ""
        return f"process {about['pid']} on {about['host']}{job} since {about['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"  # which has not said yet who it is


def _write(fd: int, text: str) -> None:
    os.ftruncate(fd, 0)
    os.pwrite(fd, text.encode(), 0)
