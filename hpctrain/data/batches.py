"""The samples of a step, as one data-parallel rank reads them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from hpctrain.data.corpus import Split
from hpctrain.data.order import shuffled
from hpctrain.errors import DataError
from hpctrain.model.batch import IGNORED, Batch

AHEAD = 4096
"""Samples whose order is computed together, within an epoch: a thousand cost little more than ten."""


class Batches:
    """Batches of a split, by global sample count.

    The samples of a global batch are the same whatever the number of ranks, and lie in it in the same order:
    rank r reads the r-th of `size` equal parts. Ranks of tp and cp of one data-parallel rank read the same; those of cp
    keep a part of each sample.

    Args:
        split: what is read.
        seq: tokens in a sample.
        seed: of the order. None reads in the order of the file, and once only: what lies past the end is
            filled with samples that have no valid labels, so that a sum over all is exact.
        global_batch: samples in a step over all ranks, a multiple of `size`.
        rank: data-parallel rank.
        size: number of data-parallel ranks.
        document_mask: labels do not cross document boundaries, and batches tell documents apart.
        spans: (start, end) of the stretches of a sample that are kept; None: all of it.

    Attributes:
        samples: windows in an epoch.

    Raises:
        DataError: the split is too small for one sample.
    """

    def __init__(
        self,
        split: Split,
        seq: int,
        *,
        seed: int | None,
        global_batch: int,
        rank: int = 0,
        size: int = 1,
        document_mask: bool = True,
        spans: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        assert 0 <= rank < size and global_batch % size == 0, (global_batch, rank, size)
        self.samples = split.samples(seq)
        self._split, self._seq, self._seed = split, seq, seed
        self._global, self._local = global_batch, global_batch // size
        self._first = rank * self._local
        self._document_mask, self._spans = document_mask, spans or ((0, seq),)
        self._windows = split.windows(seq)
        self._ahead_from, self._ahead = 0, np.empty((0, self._local), np.int64)

    def batch(self, sample: int) -> Batch:
        """This rank's part of the global batch that begins at a global sample count."""
        samples = np.arange(sample + self._first, sample + self._first + self._local)
        window = self._order(sample)
        rows = self._windows[window]
        if rows.max() >= self._split.corpus.header.vocab:
            raise DataError(
                f"Corpus {self._split.corpus.path} is damaged: it has token id {rows.max()}, its vocabulary ends at "
                f"{self._split.corpus.header.vocab - 1}; see `hpctrain data info --verify`, and build it again."
            )
        tokens, labels = rows[:, :-1].astype(np.int64), rows[:, 1:].astype(np.int64)
        documents = self._separate(window, labels) if self._document_mask else None
        if self._seed is None:
            labels[samples >= self.samples] = IGNORED
        whole = Batch(
            torch.from_numpy(tokens),
            torch.from_numpy(labels),
            None if documents is None else torch.from_numpy(documents),
            torch.from_numpy(samples),
        )
        return whole.part(self._spans)

    def stream(self, sample: int) -> Iterator[Batch]:
        """Consecutive batches from a global sample count on, without end."""
        while True:
            yield self.batch(sample)
            sample += self._global

    def _order(self, sample: int) -> NDArray[np.int64]:
        """Windows of this rank's part of a global batch, [local]."""
        step, off = divmod(sample - self._ahead_from, self._global)
        if off or not 0 <= step < len(self._ahead):
            steps = max(1, min(AHEAD // self._local, self.samples // self._global))
            starts = sample + self._first + self._global * np.arange(steps)
            counts = starts[:, None] + np.arange(self._local)
            if self._seed is None:
                self._ahead = counts % self.samples
            else:
                self._ahead = shuffled(counts, self.samples, self._seed)
            self._ahead_from, step = sample, 0
        windows: NDArray[np.int64] = self._ahead[step]
        return windows

    def _separate(self, window: NDArray[np.int64], labels: NDArray[np.int64]) -> NDArray[np.int64]:
        """Ignore labels that belong to the document after their token.

        Args:
            window: [local] which windows.
            labels: [local, seq], changed in place.

        Returns:
            [local, seq] number of the document of each token, counted from the first one in its window.
        """
        offsets, seq = self._split.corpus.documents, self._seq
        start = self._split.first_token + window * seq
        # A piece is what a window, with the token after it, has of one document.
        first, last = offsets.searchsorted((start, start + seq), "right") - 1
        if (first == last).all():
            return np.zeros(labels.shape, np.int64)
        pieces = last - first + 1
        ends = pieces.cumsum()
        row = np.arange(len(window)).repeat(pieces)
        number = np.arange(ends[-1]) - (ends - pieces)[row]
        begin = np.maximum(offsets[first[row] + number] - start[row], 0) + row * seq  # in the flattened batch
        labels.reshape(-1)[begin[number > 0] - 1] = IGNORED
        length = np.append(begin[1:], labels.size) - begin  # 0 for the piece that is only the token after a window
        documents: NDArray[np.int64] = number.repeat(length).reshape(labels.shape)
        return documents
