"""Whole documents in samples of a fixed length, for fine-tuning: best fit, longest first.

A document of T tokens takes T - 1 places of a sample: its last token, the end, is only predicted. One that is longer
than a sample is cut into pieces of a sample's length, and the rest is packed like a document, so that no token is
lost (H. Ding et al., "Fewer truncations improve language modeling", 2024).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Packing:
    """Which pieces of documents lie in which sample.

    Attributes:
        first: [samples + 1] where each sample's pieces begin in the next two.
        start: [pieces] tokens before each piece in the part of the corpus.
        length: [pieces] places it takes.
        seq: places of a sample.
        cut: documents that are in more than one piece.
    """

    first: NDArray[np.int64]
    start: NDArray[np.int64]
    length: NDArray[np.int64]
    seq: int
    cut: int

    @property
    def samples(self) -> int:
        """How many there are."""
        return len(self.first) - 1

    @property
    def waste(self) -> float:
        """Share of all places that hold nothing."""
        return 1.0 - int(self.length.sum()) / max(self.samples * self.seq, 1)


def pack(offsets: NDArray[np.int64], seq: int) -> Packing:
    """Pack documents.

    Args:
        offsets: [documents + 1] where they begin, from 0 on, and the end.
        seq: places of a sample.
    """
    start, length = _pieces(offsets, seq)
    bins, samples = _best_fit(length, seq)
    order = np.lexsort((start, bins))
    first = np.zeros(samples + 1, np.int64)
    np.cumsum(np.bincount(bins, minlength=samples), out=first[1:])
    return Packing(first, start[order], length[order], seq, int((np.diff(offsets) - 1 > seq).sum()))


def _pieces(offsets: NDArray[np.int64], seq: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Start and length of all pieces, in the order of the tokens."""
    places = np.diff(offsets) - 1
    count = -(-places // seq)
    number = np.arange(count.sum()) - (count.cumsum() - count).repeat(count)
    start = offsets[:-1].repeat(count) + number * seq
    return start, np.minimum(places.repeat(count) - number * seq, seq)


def _best_fit(length: NDArray[np.int64], seq: int) -> tuple[NDArray[np.int64], int]:
    """The sample of each piece: longest first, each into the sample with the least room that is enough.

    Pieces of one length go together: the sample that took one is the tightest for the next until it is too full.
    """
    bins = np.empty(len(length), np.int64)
    room: list[list[int]] = [[] for _ in range(seq + 1)]  # samples by the places they have left
    filled = np.zeros(seq + 1, bool)
    samples = 0
    longest_first = np.argsort(-length, kind="stable")
    sizes, counts = np.unique(length, return_counts=True)
    at = 0
    for size, left in zip(sizes[::-1].tolist(), counts[::-1].tolist()):
        while left:
            fits = np.flatnonzero(filled[size:])
            space = size + int(fits[0]) if len(fits) else seq
            each = space // size
            wanted = -(-left // each)
            if len(fits):
                taken, room[space] = room[space][:wanted], room[space][wanted:]
                filled[space] = bool(room[space])
            else:
                taken = list(range(samples, samples + wanted))
                samples += wanted
            for sample in taken:
                some = min(each, left)
                bins[longest_first[at : at + some]] = sample
                at, left = at + some, left - some
                rest = space - some * size
                room[rest].append(sample)
                filled[rest] = True
    return bins, samples
