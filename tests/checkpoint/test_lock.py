"""One run at a time in a run folder."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from hpctrain.checkpoint.lock import hold
from hpctrain.errors import LaunchError

HOLDER = """
import os, sys, time
from pathlib import Path
from hpctrain.checkpoint.lock import hold
with hold(Path(sys.argv[1])):
    if "fork" in sys.argv and os.fork() == 0:
        sys.stdout.close()
        time.sleep(60)
    print(os.getpid(), flush=True)
    sys.stdin.read()
"""


def holder(folder: Path, *options: str, **env: str) -> subprocess.Popen[str]:
    """A process that holds the folder until its input ends."""
    command = [sys.executable, "-c", HOLDER, str(folder), *options]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                               env={**os.environ, **env}, start_new_session=True)  # fmt: skip
    assert process.stdout is not None and int(process.stdout.readline()) == process.pid
    return process


def test_second_holder_is_told_who_the_first_is(tmp_path: Path) -> None:
    first = holder(tmp_path / "run", SLURM_JOB_ID="4711")
    try:
        with pytest.raises(LaunchError) as caught, hold(tmp_path / "run"):
            pytest.fail("two at a time")
        text = str(caught.value)
        assert text.startswith(f"Run folder {tmp_path}/run is in use by process {first.pid} on {socket.gethostname()} ")
        assert "(job 4711) since 2" in text and "wait for it or end it, or choose another name=" in text
        with hold(tmp_path / "another"):
            pass
    finally:
        first.communicate("")
    with hold(tmp_path / "run"):
        pass


@pytest.mark.parametrize("options", [(), ("fork",)])
def test_free_once_its_process_is_killed(tmp_path: Path, options: tuple[str, ...]) -> None:
    """Also where a child of it lives on, which has inherited all its open files."""
    first = holder(tmp_path, *options)
    try:
        os.kill(first.pid, signal.SIGKILL)
        first.wait(10)
        assert f'"pid": {first.pid}' in (tmp_path / "lock").read_text(), "it had no time to tidy up"
        with hold(tmp_path):
            assert f'"pid": {os.getpid()}' in (tmp_path / "lock").read_text()
        assert (tmp_path / "lock").read_text() == ""
    finally:
        if options:
            os.killpg(first.pid, signal.SIGKILL)
        first.communicate()


@pytest.mark.parametrize("content", ['{"host": "node7", "pid": 1, "since": "?", "job": null}', "no JSON", "x" * 10_000])
def test_stale_content_does_not_matter(tmp_path: Path, content: str) -> None:
    (tmp_path / "lock").write_text(content)
    with hold(tmp_path):
        assert len((tmp_path / "lock").read_text()) < 200


def test_holder_that_has_not_said_who_it_is(tmp_path: Path) -> None:
    first = holder(tmp_path)
    try:
        (tmp_path / "lock").write_text("")
        with pytest.raises(LaunchError, match="is in use by another process: wait for it"), hold(tmp_path):
            pass
    finally:
        first.communicate("")


def test_free_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), hold(tmp_path):
        raise ZeroDivisionError
    holder(tmp_path).communicate("")


def test_filesystem_without_locks_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(fd: int, command: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "lockf", refuse)
    with hold(tmp_path):
        assert "cannot be locked (Function not implemented): see to it yourself" in caplog.text


def test_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LaunchError, match=r"file/run/lock cannot be opened \(Not a directory\)"), \
            hold(tmp_path / "file" / "run"):  # fmt: skip
        pass
