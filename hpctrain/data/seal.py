"""The end of writing a corpus: what is on disk is read once more, and gets its header."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hpctrain.data import format
from hpctrain.data.corpus import Corpus
from hpctrain.data.format import Header, Places
from hpctrain.errors import DataError

BLOCK = 1 << 22
"""Bytes read at a time."""

Stretch = tuple[int, int]
"""Bytes that were written one after the other, and their CRC-32."""


def seal(path: Path, places: Places, header: Header, tokens: Sequence[Stretch], mask: Sequence[Stretch] = ()) -> Header:
    """Complete a corpus whose arrays were written.

    Args:
        path: of it.
        places: of the arrays.
        header: all of it but the hash.
        tokens: what was written of the tokens, in order, by whoever wrote it.
        mask: the same of the loss mask.

    Returns:
        the header with the hash of what is on disk.

    Raises:
        DataError: the file does not hold what was written.
    """
    digest = hashlib.sha256()
    with path.open("r+b") as file:
        file.seek(places.documents)
        file.write(np.zeros(1, format.OFFSET).data)
        file.flush()
        size = (header.documents + 1) * format.OFFSET.itemsize
        for block in _blocks(path, places.documents, size):
            digest.update(block)
        for start, stretches in ((places.tokens, tokens), (places.loss_mask, mask)):
            for size, crc in stretches:
                assert start is not None
                found = 0
                for block in _blocks(path, start, size):
                    digest.update(block)
                    found = zlib.crc32(block, found)
                if found != crc:
                    raise DataError(
                        f"Corpus {path} is damaged: what is on disk from byte {start} on has another checksum than "
                        f"what was written; the disk or its server fails, write elsewhere."
                    )
                start += size
    header = replace(header, sha256=digest.hexdigest())
    format.complete(path, header)
    Corpus.open(path)
    return header


def _blocks(path: Path, start: int, size: int) -> Iterator[bytes]:
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while size and (block := file.read(min(BLOCK, size))):
            size -= len(block)
            yield block


def entropy(counts: NDArray[np.int64]) -> float:
    """Entropy of the distribution with these counts, nats."""
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log(share)).sum())
