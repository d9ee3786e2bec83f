"""The layout of a corpus file: an HDF5 file whose arrays can be memory-mapped.

    /tokens      [tokens]         uint16 or uint32, little-endian, contiguous
    /documents   [documents + 1]  int64, little-endian, contiguous: where each document begins, and the end
    /loss_mask   [tokens]         uint8: 1 where a token is learnt, 0 where it is only read (a prompt). Not in all
    /checksums   [documents]      uint32: CRC-32 of each document's tokens and loss mask. Not in files of old
    /tokenizer   [bytes]          uint8: the tokenizer.json that gives ids their meaning. Not where ids are bytes
    attributes of /: those of `Header`, `format`, `version`, and `complete`, which is set last

Nothing else knows this layout. HDF5 is used for structure, not for access: a reader asks it where the arrays
lie and closes it, so no HDF5 handle or lock is ever held across a fork, and none is needed. Equal content gives
equal files: no times are in them.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpctrain.errors import DataError, first_line

FORMAT = "hpctrain-tokens"
VERSION = 1
MAGIC = b"\x89HDF\r\n\x1a\n"
PAGE = 4096
"""Arrays larger than this begin at multiples of it."""
LIBVER = ("v108", "v108")
"""The oldest structures of HDF5 that carry checksums. Without them damage can crash the library itself."""
STRUCTURE = 1 << 20
"""Bytes that all else in a file takes, at most: HDF5's own structures, the header, and gaps."""
OFFSET = np.dtype("<i8")
"""Type of the elements of `documents`."""
CHECKSUM = np.dtype("<u4")
"""Type of the elements of `checksums`."""
BYTE = np.dtype("u1")
REBUILD = "build it again with `hpctrain data build`"


@dataclass(frozen=True)
class Header:
    """What a corpus says about itself.

    Attributes:
        tokenizer: identity of the tokenizer.
        tokenizer_sha256: its hash.
        vocab: number of ids it has.
        end_of_document: the id that ends each document.
        tokens: number of tokens, ends of documents included.
        documents: number of documents.
        sha256: of the bytes of `documents`, then of `tokens`, then of `loss_mask`. It finds damage, and it names the
            content: two corpora with the same hash hold the same stream. A CRC would be too short for the second use.
        entropy: of the distribution of single tokens, nats per token; what a model without context can reach.
        provenance: where the corpus comes from; plain JSON.
        loss_mask: some tokens are only read, not learnt.
    """

    tokenizer: str
    tokenizer_sha256: str
    vocab: int
    end_of_document: int
    tokens: int
    documents: int
    sha256: str
    entropy: float
    provenance: dict[str, Any]
    loss_mask: bool = False

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the elements of `tokens`."""
        return token_dtype(self.vocab)


@dataclass(frozen=True)
class Places:
    """Where the arrays begin in the file, in bytes; None for those that are not there."""

    tokens: int
    documents: int
    loss_mask: int | None = None
    checksums: int | None = None
    tokenizer: tuple[int, int] | None = None
    """And how many bytes it has."""


def token_dtype(vocab: int) -> np.dtype[Any]:
    """The smallest type of the format that holds every id of a vocabulary."""
    return np.dtype("<u2") if vocab <= 1 << 16 else np.dtype("<u4")


def file_size(tokens: int, documents: int, vocab: int, loss_mask: bool = False, tokenizer: int = 0) -> int:
    """Bytes that a corpus takes on disk, at most."""
    a_token = token_dtype(vocab).itemsize + loss_mask
    a_document = OFFSET.itemsize + CHECKSUM.itemsize
    return tokens * a_token + (documents + 1) * a_document + tokenizer + STRUCTURE


def create(
    path: Path, tokens: int, documents: int, vocab: int, *, loss_mask: bool = False, tokenizer: bytes = b""
) -> Places:
    """Write a corpus that has its structure, but no content and no header yet.

    The caller writes the arrays at the places returned by plain file writes: HDF5 learns of a full disk only when
    it closes the file, and then can neither close it nor let go of it. Several processes may write, on several
    nodes, without an HDF5 library that was built with MPI.

    Args:
        path: of it; what is there is written over.
        tokens: how many.
        documents: how many.
        vocab: of the tokenizer.
        loss_mask: there is one.
        tokenizer: the tokenizer.json, which is written here.

    Raises:
        OSError: the filesystem has no room for all of it.
    """
    check_room(path.parent, file_size(tokens, documents, vocab, loss_mask, len(tokenizer)))
    with path.open("wb") as raw:  # HDF5 must not be the one that finds the disk full
        raw.write(bytes(STRUCTURE))
    arrays: list[tuple[str, int, np.dtype[Any]]] = [("documents", documents + 1, OFFSET)]
    arrays += [("checksums", documents, CHECKSUM)]
    arrays += [("tokens", tokens, token_dtype(vocab))]  # bytes come last: below a page HDF5 lays arrays end to end
    arrays += [("loss_mask", tokens, BYTE)] if loss_mask else []
    arrays += [("tokenizer", len(tokenizer), BYTE)] if tokenizer else []
    how = {"libver": LIBVER, "locking": False, "alignment_threshold": PAGE, "alignment_interval": PAGE}
    with h5py.File(path, "w", **how) as file:
        _set(file, format=FORMAT, version=VERSION, complete=False)
        for name, length, dtype in arrays:
            _create_array(file, name, length, dtype)
        at = {name: int(file[name].id.get_offset()) for name, _, _ in arrays}
    if tokenizer:
        with path.open("r+b") as raw:
            raw.seek(at["tokenizer"])
            raw.write(tokenizer)
    stored = (at["tokenizer"], len(tokenizer)) if tokenizer else None
    return Places(at["tokens"], at["documents"], at.get("loss_mask"), at["checksums"], stored)


def check_room(folder: Path, size: int) -> None:
    """Refuse what is known not to fit.

    Raises:
        OSError: ENOSPC or EFBIG.
    """
    if shutil.disk_usage(folder).free < size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit != resource.RLIM_INFINITY and limit < size:
        raise OSError(errno.EFBIG, f"{os.strerror(errno.EFBIG)}: files are limited to {limit:,} bytes (ulimit -f)")


def _create_array(file: h5py.File, name: str, length: int, dtype: np.dtype[Any]) -> None:
    """A contiguous dataset that has its place in the file at once, no content, and no time of birth."""
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_layout(h5py.h5d.CONTIGUOUS)
    plist.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    plist.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    plist.set_obj_track_times(False)
    space, kind = h5py.h5s.create_simple((length,)), h5py.h5t.py_create(dtype)
    h5py.h5d.create(file.id, name.encode(), kind, space, plist)


def complete(path: Path, header: Header) -> None:
    """Give a corpus its header, after its last token was written."""
    with h5py.File(path, "r+", libver=LIBVER, locking=False) as file:
        _set(file, **{**asdict(header), "provenance": json.dumps(header.provenance)})
        _set(file, complete=True)


def read(path: Path) -> tuple[Header, Places]:
    """Read and check what a corpus says about itself. The file is closed again on return.

    Raises:
        DataError: the file is not there, cannot be read, is damaged, or is not a finished corpus.
    """
    size = _check_file(path)
    with _opened(path) as file:
        header = _header(path, file)
        places = Places(
            _place(path, file, "tokens", header.tokens, header.dtype),
            _place(path, file, "documents", header.documents + 1, OFFSET),
            _place(path, file, "loss_mask", header.tokens, BYTE) if header.loss_mask else None,
            _place(path, file, "checksums", header.documents, CHECKSUM) if "checksums" in file else None,
            _stored_tokenizer(path, file) if "tokenizer" in file else None,
        )
    ends = [places.tokens + header.tokens * header.dtype.itemsize]
    ends += [places.documents + (header.documents + 1) * OFFSET.itemsize]
    ends += [places.loss_mask + header.tokens] if places.loss_mask is not None else []
    ends += [places.checksums + header.documents * CHECKSUM.itemsize] if places.checksums is not None else []
    ends += [sum(places.tokenizer)] if places.tokenizer is not None else []
    if max(ends) > size:
        raise DataError(f"Corpus {path} is truncated: its arrays reach past the {size} bytes it has; {REBUILD}.")
    return header, places


def _stored_tokenizer(path: Path, file: h5py.File) -> tuple[int, int]:
    length = file["tokenizer"].shape[0] if getattr(file["tokenizer"], "ndim", 0) == 1 else 0
    return _place(path, file, "tokenizer", length, BYTE), length


def _set(file: h5py.File, **attributes: str | int | float | bool) -> None:
    """Set attributes of the file. Text has a fixed length: HDF5 keeps the other kind in a heap without checksums."""
    for key, value in attributes.items():
        file.attrs[key] = np.bytes_(value.encode()) if isinstance(value, str) else value


def _check_file(path: Path) -> int:
    """Size of the file, bytes. Refuses what is not an HDF5 file by its first bytes."""
    if path.is_dir():
        raise DataError(f"Corpus {path} is a directory; name the .h5 file that `hpctrain data build` wrote.")
    try:
        with path.open("rb") as raw:
            start, size = raw.read(len(MAGIC)), os.fstat(raw.fileno()).st_size
    except FileNotFoundError:
        raise DataError(
            f"Corpus {path} is not there; build it from text with `hpctrain data build {path} SOURCE`, from "
            f"Python's own sources with `hpctrain data stdlib {path}`, or set data.corpus."
        ) from None
    except OSError as error:
        raise DataError(f"Corpus {path} cannot be read: {error.strerror or error}; check it and its rights.") from error
    if not size:
        raise DataError(f"Corpus {path} is empty; {REBUILD}.")
    if start != MAGIC:
        raise DataError(f"Corpus {path} is not an HDF5 file; {REBUILD}, or set data.corpus to one that it wrote.")
    return size


@contextmanager
def _opened(path: Path) -> Iterator[h5py.File]:
    """The file, read-only and without locks (network filesystems may have none). What HDF5 finds wrong in it
    is told as damage."""
    try:
        with h5py.File(path, "r", locking=False) as file:
            yield file
    except (OSError, RuntimeError, KeyError, UnicodeError) as error:
        what = "truncated" if "truncated file" in str(error) else "damaged"
        raise DataError(f"Corpus {path} is {what}, HDF5 says {str(error)!r}; {REBUILD}.") from error


def _header(path: Path, file: h5py.File) -> Header:
    attrs = {k: v.decode() if isinstance(v, bytes) else v for k, v in file.attrs.items()}
    if str(attrs.get("format")) != FORMAT:
        raise DataError(f"HDF5 file {path} is not a corpus of hpctrain: it has no format={FORMAT!r}; {REBUILD}.")
    if str(attrs.get("version")) != str(VERSION):
        raise DataError(
            f"Corpus {path} has version {attrs.get('version')} of the format, this hpctrain reads {VERSION}; {REBUILD}."
        )
    if not attrs.get("complete"):
        raise DataError(f"Corpus {path} is unfinished: the build that wrote it did not end; delete it and {REBUILD}.")
    try:
        return Header(
            tokenizer=str(attrs["tokenizer"]),
            tokenizer_sha256=str(attrs["tokenizer_sha256"]),
            vocab=int(attrs["vocab"]),
            end_of_document=int(attrs["end_of_document"]),
            tokens=int(attrs["tokens"]),
            documents=int(attrs["documents"]),
            sha256=str(attrs["sha256"]),
            entropy=float(attrs["entropy"]),
            provenance=dict(json.loads(attrs["provenance"])),
            loss_mask=bool(attrs.get("loss_mask", False)),
        )
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        said = f"there is no {error}" if isinstance(error, KeyError) else first_line(error)
        raise DataError(f"Corpus {path} has an incomplete header ({said}); {REBUILD}.") from error


def _place(path: Path, file: h5py.File, name: str, length: int, dtype: np.dtype[Any]) -> int:
    """Where a dataset begins in the file, bytes, if it is what the format says."""
    data = file.get(name)
    if not isinstance(data, h5py.Dataset):
        raise DataError(f"Corpus {path} has no dataset {name!r}; {REBUILD}.")
    if data.id.get_create_plist().get_layout() != h5py.h5d.CONTIGUOUS or data.external:
        raise DataError(
            f"Dataset {name!r} of corpus {path} is chunked, compressed or stored elsewhere; it must be contiguous, "
            f"to be memory-mapped: {REBUILD}."
        )
    if data.dtype != dtype:
        raise DataError(
            f"Dataset {name!r} of corpus {path} has type {data.dtype.str!r}, its header asks for "
            f"{dtype.str!r}; {REBUILD}."
        )
    if data.shape != (length,):
        raise DataError(
            f"Dataset {name!r} of corpus {path} has shape {data.shape}, its header says ({length},); {REBUILD}."
        )
    place = data.id.get_offset()
    if place is None or place % dtype.itemsize:
        raise DataError(f"Dataset {name!r} of corpus {path} has no aligned place in the file ({place}); {REBUILD}.")
    return int(place)
