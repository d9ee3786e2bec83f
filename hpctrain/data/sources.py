"""Which files a corpus is made of, and in which order."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hpctrain.errors import DataError

DocumentOrder = Literal["hash", "path"]


@dataclass(frozen=True)
class Source:
    """A file that becomes a document.

    Attributes:
        path: where it is.
        name: the path below the directory it was found in, which does not depend on where that directory is.
        size: bytes.
    """

    path: Path
    name: str
    size: int


@dataclass(frozen=True)
class Listing:
    """The files of a corpus in the order of its documents.

    Attributes:
        sources: not one of them is empty.
        empty: files left out because they have no bytes.
        sha256: of all names and sizes in order: equal listings are equal files, short of edits that keep sizes.
    """

    sources: tuple[Source, ...]
    empty: int
    sha256: str

    @property
    def bytes(self) -> int:
        """Bytes of all files."""
        return sum(s.size for s in self.sources)


def list_sources(
    paths: Sequence[Path],
    suffixes: Sequence[str] = (),
    order: DocumentOrder = "hash",
    excluded: Sequence[str] = (),
    output: Path | None = None,
) -> Listing:
    """Find the files below some paths.

    Args:
        paths: files, which are always taken, and directories, which are searched whole. Symbolic links to
            directories are not followed; hidden files and directories are left out.
        suffixes: endings of the names to take in directories, for example `.py`; none takes all.
        order: `hash` orders documents by a hash of their names, so that any stretch of the corpus is a fair
            sample of it; `path` keeps the order of `paths` and of names in them.
        excluded: names of directories that are left out.
        output: the corpus to be written, which is never a source of itself.

    Raises:
        DataError: a path is not there, cannot be read, or there is no text.
    """
    found = [s for path in paths for s in _found(path, suffixes, excluded)]
    if output is not None and output.exists():
        found = [s for s in found if not s.path.samefile(output)]
    taken = [s for s in found if s.size]
    if order == "hash":
        taken.sort(key=lambda s: hashlib.sha256(os.fsencode(s.name)).digest())
    if not taken:
        which = f" ending in {' or '.join(suffixes)}" if suffixes else ""
        raise DataError(
            f"No text to build from: {', '.join(map(str, paths))} have no files{which} that are not empty; "
            f"name other sources or suffixes."
        )
    digest = hashlib.sha256()
    for source in taken:
        digest.update(os.fsencode(source.name) + b"\0" + str(source.size).encode() + b"\n")
    return Listing(tuple(taken), len(found) - len(taken), digest.hexdigest())


def _found(path: Path, suffixes: Sequence[str], excluded: Sequence[str]) -> Iterator[Source]:
    """The regular files of one path, names ascending in each directory."""
    try:
        mode = path.stat()
    except OSError as error:
        raise _unreadable(error, path) from error
    if stat.S_ISREG(mode.st_mode):
        yield Source(path, path.name, mode.st_size)
        return
    if not stat.S_ISDIR(mode.st_mode):
        raise DataError(f"Source {path} is neither a file nor a directory; name one of these.")
    for folder, folders, files in os.walk(path, onerror=_raise):
        folders[:] = sorted(f for f in folders if not f.startswith(".") and f not in excluded)
        for name in sorted(f for f in files if not f.startswith(".") and f.endswith(tuple(suffixes) or "")):
            file = Path(folder, name)
            try:
                status = file.stat()
            except FileNotFoundError:
                continue  # a dangling link
            except OSError as error:
                raise _unreadable(error, file) from error
            if stat.S_ISREG(status.st_mode):
                yield Source(file, file.relative_to(path).as_posix(), status.st_size)


def _raise(error: OSError) -> None:
    raise _unreadable(error, Path(error.filename)) from error


def _unreadable(error: OSError, path: Path) -> DataError:
    return DataError(f"Source {path} cannot be read: {error.strerror}; check the path and its rights, or leave it out.")
