"""The layout of a corpus file: an HDF5 file whose two arrays can be memory-mapped.

    /tokens      [tokens]         uint16 or uint32, little-endian, contiguous
    /documents   [documents + 1]  int64, little-endian, contiguous: where each document begins, and the end
    attributes of /: those of `Header`, `format`, `version`, and `complete`, which is set last

Nothing else knows this layout. HDF5 is used for structure, not for access: a reader asks it where the arrays
lie and closes it, so no HDF5 handle or lock is ever held across a fork, and none is needed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from hpctrain.errors import DataError

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
        sha256: of the bytes of `documents`, then of `tokens`. It finds damage, and it names the content: two
            corpora with the same hash hold the same stream. A CRC would be too short for the second use.
        entropy: of the distribution of single tokens, nats per token; what a model without context can reach.
        provenance: where the corpus comes from; plain JSON.
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

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the elements of `tokens`."""
        return token_dtype(self.vocab)


@dataclass(frozen=True)
class Places:
    """Where the arrays begin in the file, in bytes."""

    tokens: int
    documents: int


def token_dtype(vocab: int) -> np.dtype[Any]:
    """The smallest type of the format that holds every id of a vocabulary."""
    return np.dtype("<u2") if vocab <= 1 << 16 else np.dtype("<u4")


def file_size(tokens: int, documents: int, vocab: int) -> int:
    """Bytes that a corpus takes on disk, at most."""
    return tokens * token_dtype(vocab).itemsize + (documents + 1) * OFFSET.itemsize + STRUCTURE


def create(path: Path, documents: NDArray[np.int64], vocab: int) -> Places:
    """Write a corpus that has its structure and its offsets, but neither tokens nor a header yet.

    The caller writes tokens at the place returned by plain file writes: HDF5 learns of a full disk only when
    it closes the file, and then can neither close it nor let go of it.

    Args:
        path: a new file.
        documents: [documents + 1] offsets.
        vocab: of the tokenizer.
    """
    how = {"libver": LIBVER, "locking": False, "alignment_threshold": PAGE, "alignment_interval": PAGE}
    with h5py.File(path, "w-", **how) as file:
        _set(file, format=FORMAT, version=VERSION, complete=False)
        for name, size, dtype in (
            ("documents", len(documents), OFFSET),
            ("tokens", int(documents[-1]), token_dtype(vocab)),
        ):
            plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            plist.set_layout(h5py.h5d.CONTIGUOUS)
            plist.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
            plist.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
            space, kind = h5py.h5s.create_simple((size,)), h5py.h5t.py_create(dtype)
            h5py.h5d.create(file.id, name.encode(), kind, space, plist)
        places = Places(file["tokens"].id.get_offset(), file["documents"].id.get_offset())
    with path.open("r+b") as raw:
        raw.seek(places.documents)
        raw.write(documents.astype(OFFSET).tobytes())
    return places


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
        tokens = _place(path, file, "tokens", header.tokens, header.dtype)
        documents = _place(path, file, "documents", header.documents + 1, OFFSET)
    if max(tokens + header.tokens * header.dtype.itemsize, documents + (header.documents + 1) * OFFSET.itemsize) > size:
        raise DataError(f"Corpus {path} is truncated: its arrays reach past the {size} bytes it has; {REBUILD}.")
    return header, Places(tokens, documents)


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
    except (OSError, RuntimeError, KeyError) as error:
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
        )
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"Corpus {path} has an incomplete header ({error!r}); {REBUILD}.") from error


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
