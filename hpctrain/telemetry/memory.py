"""Memory: the most this rank has used so far, and what is still to be had.

A job may be allowed much less than the machine has, and a limit may sit on any of the control groups it is
in: Slurm puts it on the job's or the step's, two levels above the process.
"""

from __future__ import annotations

import ctypes
import resource
import sys
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import psutil

from hpctrain.layout.units import GIB

if TYPE_CHECKING:
    import torch

PROC_CGROUP = Path("/proc/self/cgroup")
CGROUP_ROOT = Path("/sys/fs/cgroup")
UNLIMITED = 1 << 62
"""Version 1 has no word for "no limit": it shows the largest whole number of pages."""


@dataclass(frozen=True)
class Memory:
    """An amount of memory.

    Attributes:
        bytes: how much.
        kind: of what: `cuda` or `rss` where used, `cuda`, `machine` or `cgroup` (the limit that binds) where
            available.
    """

    bytes: int
    kind: str

    @property
    def gib(self) -> float:
        return self.bytes / GIB


def peak_memory(device: torch.device) -> Memory:
    """The most that was ever in use: tensors on the device if that is a GPU, else the process' resident set."""
    if device.type == "cuda":
        import torch

        return Memory(torch.cuda.max_memory_allocated(device), "cuda")
    unit = 1 if sys.platform == "darwin" else 1024
    return Memory(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, "rss")


def available_memory(device: torch.device) -> Memory:
    """What could still be allocated: on the device if that is a GPU, else by this process on the machine."""
    if device.type == "cuda":
        import torch

        return Memory(torch.cuda.mem_get_info(device)[0], "cuda")
    return host_memory()


def host_memory() -> Memory:
    """What could still be allocated by this process in memory of the machine."""
    machine = Memory(int(psutil.virtual_memory().available), "machine")
    limit = cgroup_available()
    return machine if limit is None else min(machine, Memory(limit, "cgroup"), key=lambda m: m.bytes)


def cgroup_available(proc: Path = PROC_CGROUP, root: Path = CGROUP_ROOT) -> int | None:
    """Bytes left under the tightest memory limit of the control groups of this process; None without a limit.

    Page cache that is not in active use does not count as used: it gives way.

    Args:
        proc: the process' list of control groups, versions 1 and 2.
        root: where they are mounted.
    """
    try:
        entries = [row.split(":", 2) for row in proc.read_text(errors="surrogateescape").splitlines()]
    except OSError:
        return None
    left: list[int] = []
    for _, controllers, path in (e for e in entries if len(e) == 3):
        if "memory" in controllers.split(","):
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            left += _left(root / "memory", path, *files)
        elif not controllers:
            left += _left(root, path, "memory.max", "memory.current", "inactive_file")
    return min(left, default=None)


def _left(mount: Path, path: str, limit: str, usage: str, cache: str) -> list[int]:
    """Bytes left under each limit from a group up to the mount. Groups that are not visible here are passed over:
    inside a container the mount is the container's own group."""
    out: list[int] = []
    inside = PurePosixPath(path.lstrip("/"))
    for group in (inside, *inside.parents):
        folder = mount / group
        try:
            most, used = int((folder / limit).read_text()), int((folder / usage).read_text())
        except (OSError, ValueError):  # no such group, or its limit is "max"
            continue
        if 0 <= most < UNLIMITED:
            out.append(max(most - used + _stat(folder / "memory.stat", cache), 0))
    return out


def _stat(path: Path, name: str) -> int:
    """A number of a group's statistics; 0 where they do not say it."""
    try:
        rows = [row.split() for row in path.read_text().splitlines()]
        return next((int(row[1]) for row in rows if row[0] == name), 0)
    except (OSError, ValueError, IndexError):
        return 0


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Of mallopt(3)."""

LARGE = 1 << 20
"""Bytes from which on an allocation is a mapping of its own, unless told otherwise."""


def return_freed_memory(bound: int = LARGE) -> None:
    """Have the C library give memory back to the system when it is freed, and what has `bound` bytes or more at once.

    glibc raises the bound above which it does so to what was freed last, up to 32 MiB, and keeps what is below: a rank
    that drew initial values layer by layer, and let each go, held as much as the whole model. A bound that is set
    stays. Other C libraries do without.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for parameter in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD):
            mallopt(parameter, bound)
