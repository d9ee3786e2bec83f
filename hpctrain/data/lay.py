"""Laying parts into a corpus, each at its place."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from hpctrain.data import format
from hpctrain.data.format import Places
from hpctrain.data.partfile import Part, facts, read
from hpctrain.errors import DataError

BLOCK = 1 << 20
"""Tokens that are copied at a time."""

Span = tuple[int, int]


@dataclass(frozen=True)
class Place:
    """Where a part goes.

    Attributes:
        corpus: the file, and where its arrays are.
        token, document: number of its first ones there.
    """

    corpus: Path
    places: Places
    vocab: int
    token: int
    document: int


@dataclass(frozen=True)
class Laid:
    """What was written of a part into the corpus.

    Attributes:
        counts: how often each id is in it.
        tokens, mask: bytes and CRC-32 of them.
    """

    counts: NDArray[np.int64]
    tokens: Span
    mask: Span


def keep_file(folder: Path, key: str) -> Path:
    """Where it says which documents of a part stay: uint8 a document, 0 for one that is there already."""
    return folder / f"{key}.keep"


def kept(folder: Path, key: str, part: Part) -> NDArray[np.bool_]:
    """Which documents of a part are not left out.

    Raises:
        DataError: what says so is damaged.
    """
    path = keep_file(folder, key)
    if not path.exists():
        return np.ones(part.documents, np.bool_)
    keep = np.fromfile(path, np.uint8)
    if len(keep) != part.documents or keep.max(initial=0) > 1:
        raise DataError(f"File {path} of the build is damaged: the disk or its server fails; build elsewhere.")
    return keep.astype(np.bool_)


def lay(folder: Path, key: str, part: Part, place: Place) -> Laid:
    """Copy a part to its place in a corpus.

    Raises:
        Damaged: the part is not what was written.
    """
    known, keep = facts(folder, key, part), kept(folder, key, part)
    dtype, counts, places = format.token_dtype(place.vocab), np.zeros(place.vocab, np.int64), place.places
    ends = known.lengths.cumsum()
    spans = _spans(keep, ends - known.lengths, ends)

    def selected(name: str, width: int) -> Iterator[bytes]:
        blocks = read(folder, key, part, name, BLOCK * width)
        return _selected(blocks, [(start * width, end * width) for start, end in spans])

    with place.corpus.open("r+b") as file:
        offsets = place.token + known.lengths[keep].cumsum()  # the end of each document is the beginning of the next
        file.seek(places.documents + format.OFFSET.itemsize * (place.document + 1))
        file.write(offsets.astype(format.OFFSET).data)
        assert places.checksums is not None
        file.seek(places.checksums + format.CHECKSUM.itemsize * place.document)
        file.write(np.ascontiguousarray(known.checksums[keep]).data)

        def counted() -> Iterator[bytes]:
            for block in selected("tokens", dtype.itemsize):
                found = np.bincount(np.frombuffer(block, dtype), minlength=place.vocab)
                counts[:] += found[: place.vocab]  # there are more where it is damaged, which is known at the end
                yield block

        file.seek(places.tokens + place.token * dtype.itemsize)
        tokens = _write(file, counted())
        mask = (0, 0)
        if places.loss_mask is not None:
            file.seek(places.loss_mask + place.token)
            mask = _write(file, selected("mask", 1))
    return Laid(counts, tokens, mask)


def _spans(keep: NDArray[np.bool_], starts: NDArray[np.int64], ends: NDArray[np.int64]) -> list[Span]:
    """(start, end) of stretches of tokens that are kept."""
    changes = np.flatnonzero(np.diff(np.concatenate([[False], keep, [False]])))
    return [(int(starts[a]), int(ends[b - 1])) for a, b in changes.reshape(-1, 2)]


def _selected(blocks: Iterable[bytes], spans: Iterable[Span]) -> Iterator[bytes]:
    """What lies in some spans of a file, from first to last; all of it is read."""
    at, left = 0, iter(spans)
    start, end = next(left, (0, 0))
    for block in blocks:
        stop = at + len(block)
        while start < min(stop, end):
            yield block[max(start, at) - at : end - at]
            if end > stop:
                break
            start, end = next(left, (0, 0))
        at = stop


def _write(file: BinaryIO, blocks: Iterable[bytes]) -> Span:
    """Bytes and CRC-32 of what was written."""
    written = crc = 0
    for block in blocks:
        file.write(block)
        crc, written = zlib.crc32(block, crc), written + len(block)
    return written, crc
