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
Kind = Literal["text", "jsonl", "parquet"]

KINDS: tuple[tuple[Kind, tuple[str, ...]], ...] = (("jsonl", (".jsonl", ".ndjson")), ("parquet", (".parquet",)))
"""What a name says about what is in a file; all others are text, a document each."""
COMPRESSED = (".gz", ".zst")
TEXTS = (".txt", ".md", ".text")
"""Text files of these names are decompressed where their names say that they are compressed."""


class SourceError(DataError):
    """A source that cannot be read, or has something in it that it must not have."""


@dataclass(frozen=True)
class Source:
    """A file of text, which becomes a document, or of records, each of which does.

    Attributes:
        path: where it is.
        name: the path below the directory it was found in, which does not depend on where that directory is.
        size: bytes, compressed ones where it is compressed.
        kind: what is in it.
        compression: ending of the name that says how it is compressed; empty where it is not.
        changed: when it was last written, nanoseconds.
        root: which of the paths it was found under.
    """

    path: Path
    name: str
    size: int
    kind: Kind = "text"
    compression: str = ""
    changed: int = 0
    root: int = 0


@dataclass(frozen=True)
class Listing:
    """The files of a corpus in the order of its documents.

    Attributes:
        sources: not one of them is empty.
        empty: files left out because they have no bytes.
        sha256: of all names and sizes in order: equal listings are equal files, short of edits that keep sizes.
        order: which that is.
    """

    sources: tuple[Source, ...]
    empty: int
    sha256: str
    order: DocumentOrder = "hash"

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
    kind: Kind | None = None,
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
        kind: of all files; None goes by their names.

    Raises:
        DataError: a path is not there, cannot be read, or there is no text.
    """
    found = [s for root, path in enumerate(paths) for s in _found(path, suffixes, excluded, kind, root)]
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
    return Listing(tuple(taken), len(found) - len(taken), digest.hexdigest(), order)


def kind_of(name: str) -> tuple[Kind, str]:
    """What a file of a name has in it, and how it is compressed."""
    compression = next((c for c in COMPRESSED if name.endswith(c)), "")
    inner = name.removesuffix(compression)
    kind: Kind = next((kind for kind, endings in KINDS if inner.endswith(endings)), "text")
    if kind == "text" and not inner.endswith(TEXTS):
        compression = ""
    return kind, compression


def _found(
    path: Path, suffixes: Sequence[str], excluded: Sequence[str], kind: Kind | None, root: int
) -> Iterator[Source]:
    """The regular files of one path, names ascending in each directory."""

    def source(file: Path, name: str, status: os.stat_result) -> Source:
        by_name, compression = kind_of(name)
        if kind is not None:
            compression = next((c for c in COMPRESSED if name.endswith(c)), "")
        return Source(file, name, status.st_size, kind or by_name, compression, status.st_mtime_ns, root)

    try:
        mode = path.stat()
    except OSError as error:
        raise unreadable(error, path) from error
    if stat.S_ISREG(mode.st_mode):
        yield source(path, path.name, mode)
        return
    if not stat.S_ISDIR(mode.st_mode):
        raise SourceError(f"Source {path} is neither a file nor a directory; name one of these.")
    for folder, folders, files in os.walk(path, onerror=_raise):
        folders[:] = sorted(f for f in folders if not f.startswith(".") and f not in excluded)
        for name in sorted(f for f in files if not f.startswith(".") and f.endswith(tuple(suffixes) or "")):
            file = Path(folder, name)
            try:
                status = file.stat()
            except FileNotFoundError:
                continue  # a dangling link
            except OSError as error:
                raise unreadable(error, file) from error
            if stat.S_ISREG(status.st_mode):
                yield source(file, file.relative_to(path).as_posix(), status)


def _raise(error: OSError) -> None:
    raise unreadable(error, Path(error.filename)) from error


def unreadable(error: OSError, path: Path) -> SourceError:
    """The sentence about a source that cannot be read."""
    return SourceError(
        f"Source {path} cannot be read: {error.strerror or error}; check the path and its rights, or leave it out."
    )
