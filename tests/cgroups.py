"""Control groups with a limit of memory, made for a test: of version 1 where that is mounted, else of version 2."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
V1, V2 = ROOT / "memory", ROOT


def obstacle() -> str:
    """Why no memory control group can be made here; empty if one can."""
    if os.geteuid():
        return "a memory control group can be made by root alone"
    try:
        with group(1 << 40):
            return ""
    except OSError as error:
        return f"no memory control group can be made here: {error}"


class Group:
    """A control group.

    Attributes:
        folder: of it.
        version: 1 or 2.
    """

    def __init__(self, folder: Path, version: int) -> None:
        self.folder, self.version = folder, version

    def join(self) -> None:
        """Put the calling process there; its children will be there too."""
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    def kills(self) -> int:
        """How many of its processes the kernel ended for want of memory."""
        name = "memory.oom_control" if self.version == 1 else "memory.events"
        rows = (self.folder / name).read_text().splitlines()
        return int(dict(line.split() for line in rows)["oom_kill"])


@contextmanager
def group(limit: int) -> Iterator[Group]:
    """A group whose processes get no more than `limit` bytes of memory, and no swap. It must be empty at the end.

    Raises:
        OSError: it cannot be made.
    """
    version = 1 if V1.is_dir() else 2
    folder = (V1 if version == 1 else V2) / f"hpctrain-test-{os.getpid()}"
    if version == 2:
        _may_limit(V2)
    folder.mkdir()
    try:
        if version == 1:
            (folder / "memory.limit_in_bytes").write_text(str(limit))
            (folder / "memory.swappiness").write_text("0")
        else:
            (folder / "memory.max").write_text(str(limit))
            if (folder / "memory.swap.max").exists():
                (folder / "memory.swap.max").write_text("0")
        yield Group(folder, version)
    finally:
        _patiently(folder.rmdir)


def _may_limit(parent: Path) -> None:
    """Version 2 gives children of a group a limit only when the group says so."""
    control = parent / "cgroup.subtree_control"
    if "memory" not in control.read_text().split():
        control.write_text("+memory")


def _patiently(remove: Callable[[], None]) -> None:
    """A process that was waited for may be in its group a moment longer."""
    deadline = time.monotonic() + 10
    while True:
        try:
            return remove()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
