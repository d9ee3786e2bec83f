"""What is piped in, as a file."""

import io
import os
import resource
import signal

import pytest
from click.testing import CliRunner

from hpctrain.cli import main
from hpctrain.data.sources import SourceError
from hpctrain.data.spool import spool
from hpctrain.data.team import Team
from hpctrain.errors import DataError


def spooled(tmp_path, data, name="stdin"):
    """Path, size and time of the file, and what is in it."""
    with spool(tmp_path / "c.h5", name, io.BytesIO(data), Team()) as file:
        status = file.stat()
        return file, status.st_size, status.st_mtime_ns, file.read_bytes()


def test_it_is_there_while_it_is_used(tmp_path):
    file, size, _, content = spooled(tmp_path, b"abc" * 1_000_000)
    assert (size, content) == (3_000_000, b"abc" * 1_000_000)
    assert not file.exists() and not list(tmp_path.iterdir())


def test_sentences_name_what_was_piped_in_as_the_user_does(tmp_path):
    refused = pytest.raises(SourceError, match=r"^Source -, line 2: is no JSON\.$")
    with refused, spool(tmp_path / "c.h5", "stdin.jsonl", io.BytesIO(b"abc"), Team()) as file:
        raise SourceError(f"Source {file}, line 2: is no JSON.")
    assert not list(tmp_path.iterdir())


def test_the_same_bytes_are_the_same_source(tmp_path):
    """So that parts of a build that was killed are taken."""
    assert spooled(tmp_path, b"one") == spooled(tmp_path, b"one")
    assert spooled(tmp_path, b"one")[2] != spooled(tmp_path, b"two")[2]


def in_child(work):
    """Exit status of a process that does it, negative by a signal; 7: a `DataError`, which it prints."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    try:
        work()
        os._exit(0)
    except DataError as error:
        assert "does not fit" in str(error) and "\n" not in str(error)
        os._exit(7)
    finally:
        os._exit(1)


def test_what_a_killed_one_left_is_deleted_by_the_next(tmp_path):
    def work():
        with spool(tmp_path / "c.h5", "stdin.jsonl", io.BytesIO(b"left"), Team()):
            os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(work) == -signal.SIGKILL
    assert (tmp_path / ".c.h5.stdin" / "stdin.jsonl").read_bytes() == b"left"
    with spool(tmp_path / "c.h5", "stdin", io.BytesIO(b"next"), Team()) as file:
        assert sorted(p.name for p in file.parent.iterdir()) == ["lock", "stdin"]
    assert not list(tmp_path.iterdir())


def test_a_disk_that_fills_up(tmp_path):
    def work():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        spooled(tmp_path, b"a" * 100_000)

    assert in_child(work) == 7
    assert not list(tmp_path.iterdir())


def test_another_that_is_at_it(tmp_path, monkeypatch):
    monkeypatch.setattr("hpctrain.data.spool.WAIT_S", 0.0)
    with spool(tmp_path / "c.h5", "stdin", io.BytesIO(b"mine"), Team()) as file:
        with pytest.raises(DataError, match="is being built by another process"):
            spooled(tmp_path, b"yours")
        assert file.read_bytes() == b"mine"


class Broken(io.BytesIO):
    def read(self, size=-1):
        raise IsADirectoryError(21, "Is a directory")


@pytest.mark.parametrize("stream, match", [(None, "stdin is closed"), (Broken(), "Is a directory")])
def test_nothing_that_can_be_read(tmp_path, stream, match):
    refused = pytest.raises(SourceError, match=f"^Source - cannot be read.*{match}")
    with refused, spool(tmp_path / "c.h5", "stdin", stream, Team()):
        pass
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", [["build"], ["tokenizer", "train"]])
def test_what_must_fail_does_before_anything_is_read(tmp_path, command):
    output = tmp_path / "out"
    for args, match in (([output, "-", "-"], "named twice"), ([output, "-"], "is there already")):
        result = CliRunner().invoke(main, ["data", *command, *map(str, args)], input="text")
        assert result.exit_code == 1 and match in result.output and result.output.count("\n") == 1, result.output
        output.write_bytes(b"there")
    assert [p.name for p in tmp_path.iterdir()] == ["out"] and output.read_bytes() == b"there"
