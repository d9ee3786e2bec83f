"""The samples of a step, as one data-parallel rank reads them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from hpctrain.data.blend import Blend
from hpctrain.data.corpus import Split
from hpctrain.data.order import shuffled
from hpctrain.data.samples import Rows, Samples, Windows
from hpctrain.model.batch import IGNORED, Batch

AHEAD = 4096
"""Samples whose order is computed together, within an epoch: a thousand cost little more than ten."""


class Batches:
    """Batches of one or more corpora, by global sample count.

    The samples of a global batch are the same whatever the number of ranks, and lie in it in the same order:
    rank r reads the r-th of `size` equal parts. Ranks of tp and cp of one data-parallel rank read the same; those of cp
    keep a part of each sample. Threads may read different batches at once.

    Args:
        sources: what is read: windows of a split, or the samples of each corpus of a blend.
        seq: tokens in a sample.
        seed: of the order. None reads in the order of the file, and once only: what lies past the end is
            filled with samples that have no valid labels, so that a sum over all is exact.
        global_batch: samples in a step over all ranks, a multiple of `size`.
        rank: data-parallel rank.
        size: number of data-parallel ranks.
        document_mask: for a split: labels do not cross document boundaries, and batches tell documents apart.
        spans: (start, end) of the stretches of a sample that are kept; None: all of it.
        blend: says which corpus each sample is of; None where there is one.

    Attributes:
        samples: those of an epoch; of a blend, samples after which each corpus was read once.

    Raises:
        DataError: the split is too small for one sample.
    """

    def __init__(
        self,
        sources: Split | Sequence[Samples],
        seq: int,
        *,
        seed: int | None,
        global_batch: int,
        rank: int = 0,
        size: int = 1,
        document_mask: bool = True,
        spans: Sequence[tuple[int, int]] | None = None,
        blend: Blend | None = None,
    ) -> None:
        assert 0 <= rank < size and global_batch % size == 0, (global_batch, rank, size)
        self._sources = [Windows(sources, seq, document_mask)] if isinstance(sources, Split) else list(sources)
        assert len(self._sources) == (blend.corpora if blend else 1)
        self._counts = np.array([source.count for source in self._sources])
        self._blend, self._seed = blend, seed
        self._seeds = [seed if seed is None or blend is None else seed_of(seed, n) for n in range(len(self._sources))]
        self._global, self._local = global_batch, global_batch // size
        self._first = rank * self._local
        self._spans = spans or ((0, seq),)
        self.samples = int(self._counts[0]) if blend is None else _until_all_read(blend, self._counts)
        none = np.empty((0, self._local), np.int64)
        self._ahead = (0, none, none, none)

    def batch(self, sample: int) -> Batch:
        """This rank's part of the global batch that begins at a global sample count."""
        samples = np.arange(sample + self._first, sample + self._first + self._local)
        corpus, index, which = self._order(sample)
        rows = self._take(corpus, which)
        if self._seed is None and (past := index >= self._counts[corpus]).any():
            rows = rows._replace(labels=rows.labels.copy())
            rows.labels[past] = IGNORED
        whole = Batch(
            torch.from_numpy(rows.tokens),
            torch.from_numpy(rows.labels),
            None if rows.documents is None else torch.from_numpy(rows.documents),
            torch.from_numpy(samples),
        )
        return whole.part(self._spans)

    def stream(self, sample: int) -> Iterator[Batch]:
        """Consecutive batches from a global sample count on, without end."""
        while True:
            yield self.batch(sample)
            sample += self._global

    def places(self, sample: int) -> list[tuple[int, int, int]]:
        """(corpus, document, offset) of the first tokens of this rank's part of a global batch."""
        corpus, _, which = self._order(sample)
        return [(int(c), *self._sources[c].places(which[i : i + 1])[0]) for i, c in enumerate(corpus)]

    def epochs(self, sample: int) -> list[float]:
        """How often each corpus was read in the first `sample` samples."""
        counts = np.array([sample]) if self._blend is None else self._blend.counts(sample)
        return [float(n) for n in counts / self._counts]

    def _take(self, corpus: NDArray[np.int64], which: NDArray[np.int64]) -> Rows:
        """Samples of several corpora, in their order."""
        if len(self._sources) == 1:
            return self._sources[0].take(which)
        found = [(np.flatnonzero(corpus == c), c) for c in np.unique(corpus)]
        parts = [self._sources[c].take(which[rows]) for rows, c in found]
        back = np.argsort(np.concatenate([rows for rows, _ in found]))
        tokens, labels = (np.concatenate([part[i] for part in parts])[back] for i in (0, 1))
        documents = [part.documents for part in parts if part.documents is not None]
        return Rows(tokens, labels, np.concatenate(documents)[back] if documents else None)

    def _order(self, sample: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Of this rank's part of a global batch, [local] each: corpus, count in its stream, number in its file."""
        begin, corpus, index, which = self._ahead
        step, off = divmod(sample - begin, self._global)
        if off or not 0 <= step < len(corpus):
            steps = max(1, min(AHEAD // self._local, self.samples // self._global))
            starts = sample + self._first + self._global * np.arange(steps)
            corpus, index, which = self._located(starts[:, None] + np.arange(self._local))
            self._ahead, step = (sample, corpus, index, which), 0
        return corpus[step], index[step], which[step]

    def _located(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """`_order` of global sample counts of any shape."""
        if self._blend is None:
            return np.zeros_like(samples), samples, self._shuffled(samples, 0)
        corpus, index = self._blend.locate(samples)
        which = np.empty_like(index)
        for c in np.unique(corpus):
            which[corpus == c] = self._shuffled(index[corpus == c], c)
        return corpus, index, which

    def _shuffled(self, index: NDArray[np.int64], corpus: int) -> NDArray[np.int64]:
        count, seed = int(self._counts[corpus]), self._seeds[corpus]
        return index % count if seed is None else shuffled(index, count, seed)


def seed_of(seed: int, corpus: int) -> int:
    """The seed of the order of one corpus of a blend, by its place among them."""
    return int.from_bytes(hashlib.blake2b(f"corpus {corpus} {seed}".encode(), digest_size=7).digest(), "little")


def _until_all_read(blend: Blend, counts: NDArray[np.int64]) -> int:
    """The least number of samples, to a few, that have all of each corpus but those that are never read whole."""
    found = [blend.until(c, int(n)) for c, n in enumerate(counts)]
    return max((n for n in found if n is not None), default=1)
