"""Files that are replaced whole."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import resource
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from hpctrain.errors import os_sentence
from hpctrain.files import in_turn, lock, sync, whole, write_picture, write_whole


def test_a_file_is_replaced_at_once(tmp_path: Path) -> None:
    write_whole(tmp_path / "a", "one")
    write_whole(tmp_path / "a", b"two")
    assert (tmp_path / "a").read_bytes() == b"two" and os.listdir(tmp_path) == ["a"]


def test_what_cannot_be_put_there_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(OSError):
        write_whole(tmp_path / "a", "one")
    assert os.listdir(tmp_path) == ["a"]


def test_what_lasts_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names, real = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: names.append(os.readlink(f"/proc/self/fd/{fd}")) or real(fd))
    write_whole(tmp_path / "a", "one")
    assert not names
    write_whole(tmp_path / "a", "two", durable=True)
    with whole(tmp_path / "b") as part:
        part.write_text("three")
        assert len(names) == 2 and not (tmp_path / "b").exists()
    first = str(tmp_path / f".a.{os.getpid()}.part")
    assert names == [first, str(tmp_path), str(tmp_path / ".b.part"), str(tmp_path)]
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


@pytest.mark.parametrize("error", [ValueError, OSError, KeyboardInterrupt])
def test_what_is_not_whole_is_gone(tmp_path: Path, error: type[BaseException]) -> None:
    (tmp_path / "a").write_text("before")
    with pytest.raises(error), whole(tmp_path / "a") as part:
        part.write_text("half")
        raise error
    assert os.listdir(tmp_path) == ["a"] and (tmp_path / "a").read_text() == "before"


def test_one_writes_at_a_time_and_a_killed_one_is_forgotten(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        with whole(tmp_path / "a") as part:
            part.write_text("half, and longer than all")
            os.write(writing, b".")
            time.sleep(60)
        os._exit(1)
    os.read(reading, 1)
    with pytest.raises(BlockingIOError), whole(tmp_path / "a"):
        pass
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert os.listdir(tmp_path) == [".a.part"]
    with whole(tmp_path / "a") as part, part.open("r+") as file:
        file.write("all")
    assert os.listdir(tmp_path) == ["a"] and (tmp_path / "a").read_text() == "all"


def test_a_lock_is_held_by_what_was_forked_too(tmp_path: Path) -> None:
    """So whoever gets it is alone, when a process was killed and its children have not noticed yet."""
    handle = lock(tmp_path / "lock")
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        os.read(reading, 1)
        os._exit(0)
    os.close(handle)
    began = time.monotonic()
    with pytest.raises(BlockingIOError):
        lock(tmp_path / "lock", wait_s=0.1)
    assert 0.1 <= time.monotonic() - began < 5
    os.write(writing, b".")
    os.close(lock(tmp_path / "lock", wait_s=10))
    os.waitpid(pid, 0)


def test_a_lock_that_was_deleted_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By who had it, just while another was waiting."""
    tries, real = [], fcntl.flock

    def flock(handle: int, how: int) -> None:
        real(handle, how)
        tries.append(handle)
        if len(tries) == 1:
            (tmp_path / "lock").unlink()

    monkeypatch.setattr(fcntl, "flock", flock)
    handle = lock(tmp_path / "lock")
    assert len(tries) == 2 and os.path.samestat(os.fstat(handle), (tmp_path / "lock").stat())


def test_names_of_folders_that_cannot_be_synced_last_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, "fsync", refuse)
    sync(tmp_path)
    (tmp_path / "a").touch()
    with pytest.raises(OSError, match="Invalid argument"):
        sync(tmp_path / "a")


def test_processes_take_turns(tmp_path: Path) -> None:
    """Each of four reads a number and writes the next one, twenty times: none is lost."""
    path = tmp_path / "count"
    path.write_text("0")
    context = multiprocessing.get_context("fork")
    adding = [context.Process(target=_add, args=(path,)) for _ in range(4)]
    for process in adding:
        process.start()
    for process in adding:
        process.join()
    assert path.read_text() == "80"


def _add(path: Path) -> None:
    for _ in range(20):
        with in_turn(path):
            write_whole(path, str(int(path.read_text()) + 1))


def test_whoever_has_waited_long_enough_goes_on(tmp_path: Path) -> None:
    """A holder that does not end must not hold up a job for ever."""
    path = tmp_path / "a"
    context = multiprocessing.get_context("fork")
    inside, over = context.Event(), context.Event()
    holder = context.Process(target=_hold, args=(path, inside, over))
    holder.start()
    assert inside.wait(10)
    began = time.monotonic()
    with in_turn(path, wait_s=0.2):
        waited = time.monotonic() - began
    over.set()
    holder.join()
    assert 0.15 < waited < 5


def _hold(path: Path, inside: Any, over: Any) -> None:
    with in_turn(path):
        inside.set()
        over.wait(10)


@pytest.mark.parametrize("name", ["p.png", "p.SVG", "p.pdf", "p"])
def test_a_picture_is_there_whole_or_not_at_all(tmp_path: Path, name: str) -> None:
    figure = Figure()
    figure.add_subplot().plot([1, 2])
    path = tmp_path / name
    write_picture(path, figure)
    before = path.read_bytes()
    assert before.startswith({".svg": b"<?xml", ".pdf": b"%PDF"}.get(path.suffix.lower(), b"\x89PNG"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
        with pytest.raises(OSError, match=name) as caught:
            write_picture(path, figure)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert (os_sentence(caught.value) or "").startswith(f"{path}: File too large; raise the limit")
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == [name]
