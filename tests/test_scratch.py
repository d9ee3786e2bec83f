"""Scratch files: what is written is read, whatever fails is told, and nothing is left behind."""

from __future__ import annotations

import errno
import mmap
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hpctrain.scratch import ALIGNMENT, Disk, ScratchFile


def memory(size: int, seed: int = 0) -> tuple[memoryview, bytes]:
    """Page-aligned memory with content, and that content."""
    content = random.Random(seed).randbytes(size)
    held = mmap.mmap(-1, size)
    held[:] = content
    return memoryview(held), content


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("block", [ALIGNMENT, 3 * ALIGNMENT])
def test_blocks_come_back_where_they_were_put(tmp_path: Path, block: int, threads: int) -> None:
    disk, file = Disk(block, threads), ScratchFile(tmp_path, 40 * ALIGNMENT)
    places = [(0, 7), (7, 1), (8, 16), (30, 10)]
    written = {}
    for seed, (at, count) in enumerate(places):
        data, written[at] = memory(count * ALIGNMENT, seed)
        disk.write(file, at * ALIGNMENT, data).wait()
    transfers = []
    for at, count in reversed(places):
        data = memory(count * ALIGNMENT, 99)[0]
        transfers.append((at, data, disk.read(file, at * ALIGNMENT, data)))
    for at, data, transfer in transfers:
        transfer.wait()
        assert bytes(data) == written[at], at
    rest = memory(6 * ALIGNMENT, 5)[0]
    disk.read(file, 24 * ALIGNMENT, rest).wait()
    assert not any(rest), "what was never written is zeros"
    moved = sum(count for _, count in places) * ALIGNMENT
    assert (disk.moved.written, disk.moved.read) == (moved, moved + 6 * ALIGNMENT)
    disk.close()
    file.close()


def test_it_goes_past_the_page_cache_here(tmp_path: Path) -> None:
    assert ScratchFile(tmp_path, ALIGNMENT).direct


def test_memory_that_is_not_aligned_is_an_error_and_not_silence(tmp_path: Path) -> None:
    """Where the kernel refuses such a read, DeepSpeed's `wait` counts it as done."""
    disk, file = Disk(ALIGNMENT, 1), ScratchFile(tmp_path, 2 * ALIGNMENT)
    data = memory(2 * ALIGNMENT)[0][1 : 1 + ALIGNMENT]
    with pytest.raises(AssertionError):
        disk.read(file, 0, data).wait()


def test_a_read_past_the_end_is_an_error(tmp_path: Path) -> None:
    disk, file = Disk(ALIGNMENT, 2), ScratchFile(tmp_path, 2 * ALIGNMENT)
    with pytest.raises(OSError, match="stopped after 0 of"):
        disk.read(file, ALIGNMENT, memory(2 * ALIGNMENT)[0]).wait()


def test_a_full_disk_is_known_when_the_file_is_made(tmp_path: Path) -> None:
    with pytest.raises(OSError) as error:
        ScratchFile(tmp_path, 1 << 60)
    assert error.value.errno in (errno.ENOSPC, errno.EFBIG) and error.value.filename == str(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_write_that_fails_is_told_when_it_is_waited_for(tmp_path: Path) -> None:
    disk, file = Disk(ALIGNMENT, 1), ScratchFile(tmp_path, ALIGNMENT)
    os.close(file._fd)  # a device that has gone
    transfer = disk.write(file, 0, memory(ALIGNMENT)[0])
    with pytest.raises(OSError, match="Bad file descriptor"):
        transfer.wait()


def test_files_grow(tmp_path: Path) -> None:
    file = ScratchFile(tmp_path, 0)
    assert [file.grow(1), file.grow(ALIGNMENT), file.grow(ALIGNMENT + 1)] == [0, ALIGNMENT, 2 * ALIGNMENT]
    assert file.size == 4 * ALIGNMENT and os.fstat(file._fd).st_blocks * 512 >= file.size


CHILD = """
import sys, time
from pathlib import Path
from hpctrain.scratch import ScratchFile
file = ScratchFile(Path(sys.argv[1]), 64 << 20)
print("ready", flush=True)
time.sleep(60)
"""


def test_a_killed_process_leaves_nothing(tmp_path: Path) -> None:
    """Space is taken while it lives, under no name; SIGKILL gives it back."""
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdout.readline() == "ready\n"
    held = [os.readlink(path) for path in Path(f"/proc/{child.pid}/fd").iterdir()]
    mine = [link for link in held if str(tmp_path) in link]
    assert len(mine) == 1 and mine[0].endswith("(deleted)") and not list(tmp_path.iterdir())
    blocks = {os.stat(p).st_blocks for p in Path(f"/proc/{child.pid}/fd").iterdir() if str(tmp_path) in os.readlink(p)}
    assert blocks and min(blocks) * 512 >= 64 << 20
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert not list(tmp_path.iterdir())
