"""What is piped in, as a file: a build reads it more than once, by several processes, and again after a kill.

The file lies in a folder beside the output, `.NAME.stdin`, which one process has at a time and which is gone when that
ends. What a killed one left is deleted by the next. Its time is a hash of its bytes: the same bytes piped in again are
the same source, so that a build goes on from the parts that are done.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from hpctrain.data.output import in_words
from hpctrain.data.sources import SourceError
from hpctrain.data.team import Team
from hpctrain.errors import DataError
from hpctrain.files import lock

BLOCK = 1 << 20
"""Bytes that are copied at a time."""
WAIT_S = 3.0
"""For the workers of a build that was killed to end, seconds."""


@contextmanager
def spool(output: Path, name: str, stream: BinaryIO | None, team: Team) -> Iterator[Path]:
    """All of a stream in a file, until the block ends. Rank 0 reads its stream; the others of `team` wait.

    Args:
        output: what is made of it; its directory is made.
        name: of the file.
        stream: what is read; None if it is closed.
        team: who reads the file.

    Raises:
        SourceError: the stream cannot be read.
        DataError: another process has the folder, or it cannot be written. In sentences of the block the file is `-`.
    """
    folder = output.with_name(f".{output.name}.stdin")
    handle = team.first(lambda: _begin(folder, output))
    try:
        team.first(lambda: _copy(stream, folder / name, output))
        yield folder / name
    except DataError as error:  # people know what they piped in by another name
        raise type(error)(str(error).replace(str(folder / name), "-")) from error
    finally:
        if team.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(handle)


def _begin(folder: Path, output: Path) -> int:
    """An empty folder, and a handle that holds the lock on it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = lock(folder / "lock", WAIT_S)
        for path in folder.iterdir():
            if path.name != "lock":
                path.unlink()
    except OSError as error:
        raise in_words(output, error) from error
    return handle


def _copy(stream: BinaryIO | None, path: Path, output: Path) -> None:
    if stream is None:
        raise SourceError("Source - cannot be read: nothing is piped in, stdin is closed; pipe text in, or name files.")
    digest = hashlib.blake2b(digest_size=8)
    try:
        with path.open("wb") as file:
            while data := _read(stream):
                digest.update(data)
                file.write(data)
        number = int.from_bytes(digest.digest(), "little")
        rest, seconds = divmod(number, 1 << 30)  # that many any file system can keep
        time = seconds * 10**9 + rest % 10**9
        os.utime(path, ns=(time, time))
    except OSError as error:
        raise in_words(output, error) from error


def _read(stream: BinaryIO) -> bytes:
    try:
        return stream.read(BLOCK)
    except OSError as error:
        raise SourceError(
            f"Source - cannot be read: {error.strerror or error}; pipe text in, or name files."
        ) from error
