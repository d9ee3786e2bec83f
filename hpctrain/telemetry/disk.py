"""What the disk of a folder does: measured once for each, and kept there.

Blocks are read and written as offloading does it: past the page cache, some at a time (`hpctrain/scratch.py`).
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from hpctrain.errors import ConfigError
from hpctrain.files import write_whole
from hpctrain.layout.offload import DiskRates
from hpctrain.layout.units import MIB
from hpctrain.scratch import Disk, ScratchFile, Transfer

KEPT = ".hpctrain-disk.json"
"""The file in a folder that says what its disk does."""

CHOICES = tuple((block, threads) for block in (MIB, 4 * MIB) for threads in (2, 4, 8))
"""Sizes of blocks, and how many at a time, that are tried."""

PIECE = 64 * MIB
"""Bytes of memory that are written."""

ENOUGH = 0.95
"""Of the best rate: of the choices that reach it the one with least under way is taken."""


def disk_rates(folder: Path) -> DiskRates:
    """What was measured, or what is measured now. The processes of a machine measure one after the other.

    Raises:
        ConfigError: the folder cannot be written.
    """
    try:
        with _alone(folder):
            return kept_rates(folder) or keep_rates(folder, measure_disk(folder))
    except OSError as error:
        reason = f"no file can be made there ({error.strerror})"
        raise ConfigError("sharding.offload.path", str(folder), reason, "name a folder on a disk") from None


def kept_rates(folder: Path) -> DiskRates | None:
    """What was measured before; None where nothing was, or the folder is on another disk now."""
    try:
        found = json.loads((folder / KEPT).read_text())
        return DiskRates(**found["rates"]) if found["device"] == folder.stat().st_dev else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def keep_rates(folder: Path, rates: DiskRates) -> DiskRates:
    """Keep what was measured, and return it."""
    write_whole(folder / KEPT, json.dumps({"device": folder.stat().st_dev, "rates": asdict(rates)}, indent=1) + "\n")
    return rates


def measure_disk(folder: Path, size: int = 64 * MIB) -> DiskRates:
    """Rates of the choice of blocks and threads that asks least of the disk among the fast ones.

    Args:
        folder: on the disk.
        size: bytes that are written and read in each choice.

    Raises:
        OSError: the folder cannot be written, or has no such space.
    """
    found = [_rates(folder, size, block, threads) for block, threads in CHOICES]
    best = max(map(_both, found))
    fast = [rates for rates in found if _both(rates) >= ENOUGH * best]
    return min(fast, key=lambda rates: rates.block * rates.threads)


def _both(rates: DiskRates) -> float:
    """Rate of reading and writing the same bytes."""
    return 2 / (1 / rates.read + 1 / rates.write)


def _rates(folder: Path, size: int, block: int, threads: int) -> DiskRates:
    found = transfers(folder, size, block, threads, 1)
    return DiskRates(size / found.read[0], size / found.write[0], block, threads)


class Transfers(NamedTuple):
    """Seconds of all bytes of a file, of every round; and whether they went past the page cache."""

    write: list[float]
    read: list[float]
    direct: bool


def transfers(folder: Path, size: int, block: int, threads: int, rounds: int) -> Transfers:
    """Write a file without a name and read it back, `threads` blocks at a time, after once that does not count.

    What is written is random, `PIECE` bytes over and over.

    Args:
        size: bytes; a multiple of what `Disk` wants.

    Raises:
        OSError: the folder cannot be written, or has no such space.
    """
    file, disk = ScratchFile(folder, size), Disk(block, threads)
    try:
        memory = mmap.mmap(-1, min(size, PIECE))  # begins at a page
        memory[:] = os.urandom(len(memory))  # a disk that compresses must not gain by it
        data = memoryview(memory)

        def seconds(move: Callable[[ScratchFile, int, memoryview], Transfer]) -> float:
            began = time.perf_counter()
            moved = [move(file, at, data[: min(len(data), size - at)]) for at in range(0, size, len(data))]
            for transfer in moved:
                transfer.wait()
            return time.perf_counter() - began

        seconds(disk.write)  # makes the blocks
        found = [(seconds(disk.write), seconds(disk.read)) for _ in range(rounds)]
        return Transfers([w for w, _ in found], [r for _, r in found], file.direct)
    finally:
        disk.close()
        file.close()


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """No other process measures this folder's disk meanwhile."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
