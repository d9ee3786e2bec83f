"""Where a build keeps what is not done yet: a folder beside its output, which one build has at a time.

    lock        held by the build and its workers, so it is free when all of them have ended
    KEY.part    see `partfile`
    KEY.keep    see `lay`
    corpus      what becomes the output
    published   which build gave the output its name, and which file that is

The last is written before the name is given. So a build that was killed after that, and before the folder was deleted,
is known to have ended well when it is run again.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from hpctrain.data.output import check_names_a_file, check_output, in_words
from hpctrain.data.partfile import Damaged
from hpctrain.data.pool import WorkerLost
from hpctrain.data.sources import SourceError
from hpctrain.data.team import Team
from hpctrain.errors import DataError
from hpctrain.files import lock, publish, write_whole

WAIT_S = 3.0
"""For the workers of a build that was killed to end, seconds."""
MENDABLE = (SourceError, Damaged, WorkerLost)
"""Errors after which it is worth going on from what is done."""


@dataclass(frozen=True)
class Workplace:
    """The folder of a build.

    Attributes:
        folder: it.
        finished: this very build had ended well already, but for deleting the folder.
    """

    folder: Path
    finished: bool = False

    @property
    def corpus(self) -> Path:
        """What becomes the output."""
        return self.folder / "corpus"


def folder_of(output: Path) -> Path:
    """Where the build of an output keeps what is not done yet."""
    check_names_a_file(output)
    return output.with_name(f".{output.name}.parts")


@contextmanager
def workplace(output: Path, replace_existing: bool, team: Team, build: str) -> Iterator[Workplace]:
    """A folder in which a corpus is made, which takes the place of `output` when the block ends well.

    The folder is gone then, and after an error. It stays, with what is done, when the build is stopped from outside,
    or by what can be mended (`MENDABLE`). Collective over `team`.

    Args:
        output: the corpus file; its directory is made.
        replace_existing: it may be there.
        team: who builds.
        build: names all that the corpus depends on.

    Raises:
        DataError: the output must stay, is being built by others, or cannot be written.
    """
    folder, keep = folder_of(output), True
    handle, finished = team.first(lambda: _begin(output, folder, replace_existing, build))
    place = Workplace(folder, finished)
    try:
        yield place
        if not finished:
            team.first(lambda: _publish(place, output, build))
        keep = False
    except OSError as error:
        keep = False
        raise in_words(output, error) from error
    except MENDABLE as error:
        if team.first(lambda: any(folder.glob("*.part"))):
            raise type(error)(
                f"{str(error)[:-1]}; what is done stays in {folder}, and the same command goes on from there."
            ) from error
        raise
    except DataError:
        keep = False
        raise
    finally:
        if team.rank == 0:
            try:
                _end(folder, keep)
            finally:
                os.close(handle)


def _begin(output: Path, folder: Path, replace_existing: bool, build: str) -> tuple[int, bool]:
    """Make or take over the folder: a handle that holds the lock on it, and whether all is done."""
    if not folder.exists():
        check_output(output, replace_existing)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = lock(folder / "lock", WAIT_S)
    except OSError as error:
        raise in_words(output, error) from error
    published = _published(folder, output)
    if published == build:
        return handle, True
    if published is not None:  # by another build, which needs its parts no more
        _end(folder, keep=False)
        os.close(handle)
        return _begin(output, folder, replace_existing, build)
    try:
        check_output(output, replace_existing)
        _sweep(folder)
    except BaseException as error:
        _end(folder, keep=True)
        os.close(handle)
        if isinstance(error, OSError):
            raise in_words(output, error) from error
        raise
    return handle, False


def _note(folder: Path) -> Path:
    return folder / "published"


def _published(folder: Path, output: Path) -> str | None:
    """The build that `output` is from, if it is that which was published from this folder."""
    try:
        note = json.loads(_note(folder).read_bytes())
        return str(note["build"]) if note["file"] == _identity(output) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _identity(path: Path) -> list[int]:
    """What a file keeps when it gets another name."""
    status = path.lstat()
    return [status.st_ino, status.st_size, status.st_mtime_ns]


def _publish(place: Workplace, output: Path, build: str) -> None:
    note = {"build": build, "file": _identity(place.corpus)}
    write_whole(_note(place.folder), json.dumps(note), durable=True)
    publish(place.corpus, output)


def _end(folder: Path, keep: bool) -> None:
    """Leave the parts that are done, or nothing."""
    if keep and any(folder.glob("*.part")):
        _sweep(folder)
        return
    for path in folder.glob("*"):
        if path != _note(folder):
            with suppress(OSError):
                path.unlink()
    shutil.rmtree(folder, ignore_errors=True)  # with the note last: until then a run again is told that all is done


def _sweep(folder: Path) -> None:
    """Delete what is half-written: nobody else is at it."""
    for path in [*folder.glob("*.partial"), *folder.glob("*.keep"), folder / "corpus", _note(folder)]:
        path.unlink(missing_ok=True)
