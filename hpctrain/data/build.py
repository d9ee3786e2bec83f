"""Building a corpus from text files, in bounded memory, whole or not at all."""

from __future__ import annotations

import datetime
import errno
import glob
import hashlib
import os
import secrets
import shutil
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from hpctrain import __version__
from hpctrain.data import format
from hpctrain.data.corpus import Corpus
from hpctrain.data.format import Header
from hpctrain.data.sources import Listing, Source
from hpctrain.data.tokenizer import ByteTokenizer
from hpctrain.errors import DataError

BLOCK = 1 << 20
"""Bytes of text read, tokenized and written at a time."""
NAMED = 100
"""Sources that are named in the provenance; their number is always there."""

Progress = Callable[[int], None]
"""Called with the number of bytes of text that were written since the last call."""


def build(
    output: Path,
    listing: Listing,
    sources: Sequence[Path],
    *,
    replace_existing: bool = False,
    progress: Progress = lambda done: None,
    **provenance: Any,
) -> Header:
    """Write a corpus. Each file becomes a document: its bytes and an end of document.

    The corpus appears under its name when it is complete, on disk and verified; until then, and after any
    failure, there is nothing under that name, or what was there before.

    Args:
        output: the corpus file; its directory is made.
        listing: the files, from `list_sources`.
        sources: the paths they were found under, for the provenance.
        replace_existing: replace a file of that name.
        progress: see `Progress`.
        provenance: further JSON facts to keep.

    Returns:
        the header of the corpus.

    Raises:
        DataError: the output exists, cannot be written or does not fit; a source cannot be read or changes.
    """
    tokenizer = ByteTokenizer()
    offsets = np.zeros(len(listing.sources) + 1, np.int64)
    np.cumsum([s.size + 1 for s in listing.sources], out=offsets[1:])
    tokens, documents = int(offsets[-1]), len(listing.sources)
    header = Header(
        tokenizer=tokenizer.identity,
        tokenizer_sha256=tokenizer.sha256,
        vocab=tokenizer.vocab,
        end_of_document=tokenizer.end_of_document,
        tokens=tokens,
        documents=documents,
        sha256="",
        entropy=0.0,
        provenance={
            "sources": [str(s) for s in sources[:NAMED]],
            "source_count": len(sources),
            "files": documents,
            "empty_files": listing.empty,
            "bytes": listing.bytes,
            "listing_sha256": listing.sha256,
            "created_at": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "hpctrain": __version__,
            **provenance,
        },
    )
    with _whole_or_nothing(output, format.file_size(tokens, documents, tokenizer.vocab), replace_existing) as partial:
        places = format.create(partial, offsets, tokenizer.vocab)
        digest = hashlib.sha256(offsets.astype(format.OFFSET).data)
        counts = np.zeros(tokenizer.vocab, np.int64)
        with _raw(partial) as file:
            file.seek(places.tokens)
            for block in _text(listing.sources, tokenizer):
                data = block.astype(header.dtype).data
                digest.update(data)
                file.write(data)
                ids = np.bincount(block, minlength=tokenizer.vocab)
                counts += ids
                progress(len(block) - int(ids[tokenizer.end_of_document]))
        header = replace(header, sha256=digest.hexdigest(), entropy=entropy(counts))
        format.complete(partial, header)
        _flush(partial)
        Corpus.open(partial).verify()
    return header


def entropy(counts: NDArray[np.int64]) -> float:
    """Entropy of the distribution with these counts, nats."""
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log(share)).sum())


def _text(sources: Sequence[Source], tokenizer: ByteTokenizer) -> Iterator[NDArray[Any]]:
    """The tokens of all documents in blocks of about `BLOCK`, many small files or a part of a large one."""
    end = np.array([tokenizer.end_of_document], np.uint16)
    held: list[NDArray[Any]] = []
    size = 0
    for source in sources:
        for text in _read(source):
            held.append(tokenizer.encode(text))
            size += len(text)
            if size >= BLOCK:
                yield np.concatenate(held)
                held, size = [], 0
        held.append(end)
    yield np.concatenate(held)


def _read(source: Source) -> Iterator[bytes]:
    """A file's bytes in blocks; exactly as many as it had when it was listed."""
    left = source.size
    try:
        with source.path.open("rb") as file:
            while text := file.read(min(BLOCK, left + 1)):
                left -= len(text)
                if left < 0:
                    break
                yield text
    except OSError as error:
        raise DataError(
            f"Source {source.path} cannot be read: {error.strerror}; check the path and its rights, or leave it out."
        ) from error
    if left:
        raise DataError(
            f"Source {source.path} changed while the corpus was built: it had {source.size} bytes, now it has "
            f"{'more' if left < 0 else source.size - left}; build again when nobody writes it."
        )


def _raw(partial: Path) -> BinaryIO:
    return partial.open("r+b")


@contextmanager
def _whole_or_nothing(output: Path, size: int, replace_existing: bool) -> Iterator[Path]:
    """A temporary path beside `output` that takes its name when the block ends well, and is gone otherwise."""
    if output.is_dir():
        raise DataError(f"Output {output} is a directory; name a file in it, for example {output / 'corpus.h5'}.")
    if output.is_symlink() or (output.exists() and not output.is_file()):
        raise DataError(f"Output {output} is not a regular file, and is left alone; name a file of its own.")
    if output.exists() and not replace_existing:
        raise DataError(f"Output {output} is there already; name another file, or replace it with --force.")
    partial = output.with_name(f"{_prefix(output)}{os.getpid()}.{secrets.token_hex(4)}.partial")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(output)
        free = shutil.disk_usage(output.parent).free
        if free < size:
            raise DataError(
                f"Output {output} needs {size:,} bytes, its filesystem has {free:,} free; make room, or name a file "
                f"elsewhere."
            )
        try:
            yield partial
            os.replace(partial, output)
        finally:
            partial.unlink(missing_ok=True)
        _flush(output.parent)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise DataError(
                f"Output {output} needs {size:,} bytes and does not fit ({error.strerror}); make room, or name a file "
                f"elsewhere."
            ) from error
        raise DataError(
            f"Output {output} cannot be written: {error.strerror or error}; check the directory and its rights."
        ) from error


def _remove_abandoned(output: Path) -> None:
    """Delete what killed builds of this file on this host left behind."""
    prefix = _prefix(output)
    for path in output.parent.glob(f"{glob.escape(prefix)}*.partial"):
        pid = path.name[len(prefix) :].split(".")[0]
        if pid.isdigit() and not _alive(int(pid)):
            path.unlink(missing_ok=True)


def _prefix(output: Path) -> str:
    """Start of the names of this host's partial files of a corpus."""
    return f".{output.name}.{socket.gethostname()}."


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _flush(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
