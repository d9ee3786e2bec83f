"""The samples of one corpus: windows of a fixed length, or documents packed into as many places."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from hpctrain.data.corpus import Split
from hpctrain.data.packing import pack
from hpctrain.errors import DataError
from hpctrain.model.batch import IGNORED

Ints = NDArray[np.int64]
Numbers = NDArray[np.int32]


class Rows(NamedTuple):
    """Some samples: [rows, seq] each; no documents where nobody asked for them. Tokens and labels may share memory."""

    tokens: Ints
    labels: Ints
    documents: Numbers | None


class Samples(Protocol):
    """What a blend is made of.

    Attributes:
        count: samples in an epoch.
    """

    count: int

    def take(self, which: Ints) -> Rows:
        """Some of them, by number in the order of the file."""

    def places(self, which: Ints) -> list[tuple[int, int]]:
        """(document, offset in it) of the first token of each."""


class Windows:
    """Stretches of `seq` tokens that follow each other, across documents, each with the one token after it.

    Args:
        split: what is read.
        seq: tokens in a sample.
        document_mask: labels do not cross document boundaries, and documents are told apart.

    Raises:
        DataError: the split is too small for one.
    """

    def __init__(self, split: Split, seq: int, document_mask: bool = True) -> None:
        self.count = split.samples(seq)
        self._split, self._seq, self._document_mask = split, seq, document_mask
        self._windows = split.windows(seq)
        self._mask = split.mask_windows(seq)
        self._vocab, self._corpus = split.corpus.header.vocab, split.corpus

    def take(self, which: Ints) -> Rows:
        """See `Samples.take`."""
        self._corpus.check()
        rows = self._windows[which]
        check_ids(self._split, rows)
        if not self._document_mask and self._mask is None:  # no label differs: one array is half the memory and time
            both = rows.astype(np.int64)
            return Rows(both[:, :-1], both[:, 1:], None)
        tokens, labels = rows[:, :-1].astype(np.int64), rows[:, 1:].astype(np.int64)
        documents = self._separate(which, labels) if self._document_mask else None
        if self._mask is not None:
            labels[self._mask[which, 1:] == 0] = IGNORED
        return Rows(tokens, labels, documents)

    def places(self, which: Ints) -> list[tuple[int, int]]:
        """See `Samples.places`."""
        return [self._split.place(self._split.first_token + int(n) * self._seq) for n in which]

    def _separate(self, window: Ints, labels: Ints) -> Numbers:
        """Ignore labels that belong to the document after their token.

        Args:
            window: [local] which windows.
            labels: [local, seq], changed in place.

        Returns:
            [local, seq] number of the document of each token, counted from the first one in its window.
        """
        offsets, seq = self._corpus.documents, self._seq
        start = self._split.first_token + window * seq
        # A piece is what a window, with the token after it, has of one document.
        first, last = offsets.searchsorted((start, start + seq), "right") - 1
        if (first == last).all():
            return np.zeros(labels.shape, np.int32)
        pieces = last - first + 1
        ends = pieces.cumsum()
        row = np.arange(len(window)).repeat(pieces)
        number = np.arange(ends[-1]) - (ends - pieces)[row]
        begin = np.maximum(offsets[first[row] + number] - start[row], 0) + row * seq  # in the flattened batch
        labels.reshape(-1)[begin[number > 0] - 1] = IGNORED
        length = np.append(begin[1:], labels.size) - begin  # 0 for the piece that is only the token after a window
        documents: Numbers = number.astype(np.int32).repeat(length).reshape(labels.shape)
        return documents


class Packed:
    """Whole documents in samples of `seq` places (`data.packing`); what is left of a sample is not predicted.

    Args:
        split: what is read.
        seq: places of a sample.
        document_mask: documents are told apart.

    Raises:
        DataError: there is nothing to learn.
    """

    def __init__(self, split: Split, seq: int, document_mask: bool = True) -> None:
        corpus = split.corpus
        offsets = corpus.documents[split.first_document : split.end_document + 1] - split.first_token
        self.packing = pack(offsets, seq)
        self.count = self.packing.samples
        if not self.count:
            raise DataError(
                f"Documents {split.first_document} to {split.end_document - 1} of corpus {corpus.path} are all empty, "
                f"so there is nothing to pack; build a larger corpus."
            )
        self._split, self._seq, self._document_mask, self._corpus = split, seq, document_mask, corpus

    def take(self, which: Ints) -> Rows:
        """See `Samples.take`."""
        self._corpus.check()
        tokens = np.full((len(which), self._seq), self._corpus.header.end_of_document, np.int64)
        labels, documents = np.full_like(tokens, IGNORED), np.empty(tokens.shape, np.int32)
        first, base = self.packing.first, self._split.first_token
        ids, mask = self._corpus.tokens, self._corpus.loss_mask
        for row, sample in enumerate(which.tolist()):
            at, number = 0, 0
            for piece in range(int(first[sample]), int(first[sample + 1])):
                start, length = base + int(self.packing.start[piece]), int(self.packing.length[piece])
                part, here = ids[start : start + length + 1], slice(at, at + length)
                check_ids(self._split, part)
                tokens[row, here], labels[row, here] = part[:-1], part[1:]
                if mask is not None:
                    labels[row, here][mask[start + 1 : start + length + 1] == 0] = IGNORED
                documents[row, here] = number
                at, number = at + length, number + 1
            documents[row, at:] = number
        return Rows(tokens, labels, documents if self._document_mask else None)

    def places(self, which: Ints) -> list[tuple[int, int]]:
        """See `Samples.places`."""
        firsts = self.packing.start[self.packing.first[which]]
        return [self._split.place(self._split.first_token + int(start)) for start in firsts]


def check_ids(split: Split, ids: NDArray[Any]) -> None:
    """Refuse ids that the vocabulary does not have: under tensor parallelism their embedding would be zero."""
    corpus = split.corpus
    if ids.max() >= corpus.header.vocab:
        raise DataError(
            f"Corpus {corpus.path} is damaged: it has token id {ids.max()}, its vocabulary ends at "
            f"{corpus.header.vocab - 1}; see `hpctrain data check`, and build it again."
        )
