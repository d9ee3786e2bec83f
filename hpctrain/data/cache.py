"""Copies of corpora on this node, for file servers that are slow or shared by many."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from hpctrain.data import format
from hpctrain.data.corpus import Corpus
from hpctrain.errors import DataError
from hpctrain.files import lock, publish, write_whole

FOREVER_S = 1e9
"""A rank waits for the one that copies; the run's own time limits are shorter."""


def local_copy(path: Path, folder: Path) -> Path:
    """A copy of a corpus in a folder of this node; made by whoever of its ranks comes first, while the others wait.

    It is named by the hash of its content, so another corpus under the same name gets another copy. A copy is read
    whole and held against that hash before it is used the first time, and again when anything has touched it since.

    Raises:
        DataError: the corpus cannot be read, or the copy cannot be made.
    """
    header, _ = format.read(path)
    size = path.stat().st_size
    copy = folder / f"{header.sha256}-{size}.h5"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = lock(copy.with_suffix(".lock"), FOREVER_S)
        try:
            if not _sound(copy, header.sha256):
                _make(path, copy, header.sha256)
        finally:
            os.close(handle)
    except OSError as error:
        raise DataError(
            f"Corpus {path} cannot be copied to {folder} (data.cache): {error.strerror or error}; make room there for "
            f"{size:,} bytes, name another folder, or set data.cache=null."
        ) from error
    return copy


def _sound(copy: Path, sha256: str) -> bool:
    """Whether a copy is there and holds what it should; read whole, unless it is as it was when it last was."""
    try:
        marks = _marks(copy)
        if _noted(copy) != marks:
            _verify(copy, sha256)
            _note(copy, marks)
    except (FileNotFoundError, DataError):
        return False
    return True


def _make(path: Path, copy: Path, sha256: str) -> None:
    """Copy, read what arrived, and give it its name once it is on the disk."""
    part = copy.with_suffix(".part")
    try:
        format.check_room(copy.parent, path.stat().st_size)
        shutil.copyfile(path, part)
        try:
            _verify(part, sha256)
        except DataError as error:
            raise DataError(
                f"Corpus {path} cannot be copied to {copy.parent} (data.cache), what arrived there is not sound: see "
                f"`hpctrain data check {path}`; if it is, look at the disk, or set data.cache=null."
            ) from error
        publish(part, copy)
    finally:
        part.unlink(missing_ok=True)
    _note(copy, _marks(copy))


def _verify(copy: Path, sha256: str) -> None:
    """Read it whole.

    Raises:
        DataError: it is damaged, or another corpus than the one of that hash.
    """
    corpus = Corpus.open(copy)
    corpus.verify()
    if corpus.header.sha256 != sha256:
        raise DataError(f"Corpus {copy} has hash {corpus.header.sha256}, and not {sha256}.")


def _marks(copy: Path) -> list[int]:
    """What changes when anybody writes to a file or puts another in its place."""
    status = copy.stat()
    return [status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _noted(copy: Path) -> object:
    """The marks it had when it was last read whole."""
    try:
        return json.loads(copy.with_suffix(".checked").read_bytes())
    except (OSError, ValueError):
        return None


def _note(copy: Path, marks: list[int]) -> None:
    write_whole(copy.with_suffix(".checked"), json.dumps(marks), durable=True)
