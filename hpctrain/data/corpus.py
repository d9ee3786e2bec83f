"""A corpus in memory-mapped form, and its parts."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.data import format
from hpctrain.data.format import Header
from hpctrain.data.mapped import Mapped
from hpctrain.errors import DataError

BLOCK = 1 << 22
"""Elements read at a time where a whole array is gone through."""
QUICK = 1 << 23
"""Offsets up to which `open` looks at all of them (64 MiB)."""


@dataclass(frozen=True, eq=False)
class Corpus:
    """A corpus that was opened: its arrays are mapped, its file is closed. Safe to fork, and cheap to pickle.

    Attributes:
        path: of the file.
        header: what it says about itself.
        tokens: [tokens] ids, uint16 or uint32, read-only.
        documents: [documents + 1] int64, where each document begins, and the end.
        loss_mask: [tokens] uint8, 1 where a token is learnt; None: all are.
        checksums: [documents] CRC-32 of each document's tokens and loss mask; None in files of old.
        tokenizer_json: what gives ids their meaning; empty where that needs no file.
    """

    path: Path
    header: Header
    tokens: NDArray[Any]
    documents: NDArray[np.int64]
    loss_mask: NDArray[np.uint8] | None = None
    checksums: NDArray[np.uint32] | None = None
    tokenizer_json: bytes = b""
    mapped: Mapped | None = field(default=None, repr=False)
    """The file; None for a corpus that is none."""

    @classmethod
    def open(cls, path: Path | str) -> Corpus:
        """Map a corpus, after checks that do not read the tokens.

        Raises:
            DataError: the file is missing, damaged, foreign or unfinished.
        """
        path = Path(path)
        header, places = format.read(path)
        try:
            mapped = Mapped(path, f"Corpus {path}")
        except (OSError, ValueError) as error:
            raise DataError(
                f"Corpus {path} cannot be memory-mapped: {error}; check the file and its filesystem."
            ) from error

        def array(place: int, length: int, dtype: np.dtype[Any]) -> NDArray[Any]:
            return mapped.data[place : place + length * dtype.itemsize].view(dtype)

        tokens = array(places.tokens, header.tokens, header.dtype)
        documents = array(places.documents, header.documents + 1, format.OFFSET)
        mask = None if places.loss_mask is None else array(places.loss_mask, header.tokens, format.BYTE)
        sums = None if places.checksums is None else array(places.checksums, header.documents, format.CHECKSUM)
        text = array(*places.tokenizer, format.BYTE).tobytes() if places.tokenizer else b""
        corpus = cls(path, header, tokens, documents, mask, sums, text, mapped)
        if documents[0] != 0 or documents[-1] != header.tokens:
            raise DataError(
                f"Corpus {path} is damaged: its documents span tokens {documents[0]} to {documents[-1]} "
                f"instead of 0 to {header.tokens}; {format.REBUILD}."
            )
        if len(documents) <= QUICK:
            corpus._check_offsets()
        return corpus

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopened, (self.path, self.header.sha256)

    def verify(self) -> None:
        """Read everything: offsets, ids and checksum.

        Raises:
            DataError: the content is not what was written; the first document that is not is named if it can be.
        """
        self._check_offsets()
        digest = hashlib.sha256()
        for block in _blocks(self.documents):
            digest.update(block.data)
        for block in _blocks(self.tokens):
            digest.update(block.data)
            if block.max() >= self.header.vocab:
                raise DataError(
                    f"Corpus {self.path} is damaged: it has token id {block.max()}, its vocabulary ends at "
                    f"{self.header.vocab - 1}{self._first_bad_in_words()}; {format.REBUILD}."
                )
        for block in _blocks(self.loss_mask if self.loss_mask is not None else self.tokens[:0]):
            digest.update(block.data)
        if digest.hexdigest() != self.header.sha256:
            raise DataError(
                f"Corpus {self.path} is damaged: its content has checksum {digest.hexdigest()[:12]}, "
                f"{self.header.sha256[:12]} was written{self._first_bad_in_words()}; {format.REBUILD}."
            )

    def first_bad(self) -> int | None:
        """The first document whose offsets, ids or checksum are not sound; None where all are."""
        for n in range(self.header.documents):
            start, end = int(self.documents[n]), int(self.documents[n + 1])
            if not 0 <= start < end <= self.header.tokens or self.tokens[start:end].max() >= self.header.vocab:
                return n
            if self.checksums is not None and self.checksum(n) != self.checksums[n]:
                return n
        return None

    def checksum(self, document: int) -> int:
        """CRC-32 of a document's tokens and loss mask, as they are now."""
        part = slice(int(self.documents[document]), int(self.documents[document + 1]))
        crc = zlib.crc32(self.tokens[part].data)
        return crc if self.loss_mask is None else zlib.crc32(self.loss_mask[part].data, crc)

    def check(self) -> None:
        """Refuse a file that is not as it was when it was opened (`Mapped.check`); costs next to nothing."""
        if self.mapped is not None:
            self.mapped.check()

    def _first_bad_in_words(self) -> str:
        n = self.first_bad()
        if n is None:
            return ""
        return f"; the first bad document is {n}, tokens {self.documents[n]} to {self.documents[n + 1]}"

    def view(self, first_document: int, end_document: int) -> Split:
        """The documents in [first_document, end_document)."""
        assert 0 <= first_document < end_document <= self.header.documents
        return Split(self, first_document, end_document)

    def split(self, validation: float) -> tuple[Split, Split | None]:
        """Training and validation parts, by document.

        Args:
            validation: share of the documents, the last ones; more than 0 gives at least one. Documents lie in
                the order of a hash, so that the last ones are like the first.

        Returns:
            (training, validation), the latter None for a share of 0.

        Raises:
            DataError: there are not enough documents for two parts.
        """
        documents = self.header.documents
        if not validation:
            return self.view(0, documents), None
        kept = min(max(1, round(validation * documents)), documents - 1)
        if not kept:
            raise DataError(
                f"Corpus {self.path} has one document, which cannot be split into training and validation; build it "
                f"from more files, or set data.validation=0."
            )
        return self.view(0, documents - kept), self.view(documents - kept, documents)

    def _check_offsets(self) -> None:
        last, done = -1, 0
        for block in _blocks(self.documents):
            wrong = np.flatnonzero(np.diff(block, prepend=last) <= 0)
            if len(wrong):
                at = done + int(wrong[0])
                raise DataError(
                    f"Corpus {self.path} is damaged: its document offsets do not ascend at document {max(at - 1, 0)}, "
                    f"which ends at {self.documents[at]}; {format.REBUILD}."
                )
            last, done = int(block[-1]), done + len(block)


@dataclass(frozen=True, eq=False)
class Split:
    """A range of a corpus' documents. Its samples are windows of `seq` tokens that follow each other, each
    with the one token after it; what is left at the end is not read."""

    corpus: Corpus
    first_document: int
    end_document: int

    @property
    def first_token(self) -> int:
        """Where it begins in the corpus."""
        return int(self.corpus.documents[self.first_document])

    @property
    def tokens(self) -> int:
        """How many tokens it has."""
        return int(self.corpus.documents[self.end_document]) - self.first_token

    def samples(self, seq: int) -> int:
        """How many windows of `seq` tokens it has.

        Raises:
            DataError: not one.
        """
        if self.tokens <= seq:
            raise DataError(
                f"Documents {self.first_document} to {self.end_document - 1} of corpus {self.corpus.path} have "
                f"{self.tokens} tokens, a sample needs {seq + 1} (data.seq={seq} and the one after): set a smaller "
                f"data.seq, another data.validation, or build a larger corpus."
            )
        return (self.tokens - 1) // seq

    def place(self, token: int) -> tuple[int, int]:
        """The document that a token of the corpus is in, and its offset there."""
        document = int(self.corpus.documents.searchsorted(token, "right")) - 1
        return document, token - int(self.corpus.documents[document])

    def mask_windows(self, seq: int) -> NDArray[np.uint8] | None:
        """The loss mask of all windows, as `windows`; None where all is learnt."""
        mask = self.corpus.loss_mask
        return None if mask is None else self._windows_of(mask, seq)

    def windows(self, seq: int) -> NDArray[Any]:
        """All windows as one read-only view of the file, [samples, seq + 1].

        Raises:
            DataError: there is not one.
        """
        return self._windows_of(self.corpus.tokens, seq)

    def _windows_of(self, array: NDArray[Any], seq: int) -> NDArray[Any]:
        n, first, width = self.samples(seq), self.first_token, array.strides[0]
        tokens = array[first : first + n * seq + 1]
        return np.lib.stride_tricks.as_strided(tokens, (n, seq + 1), (seq * width, width), writeable=False)


def check_vocabulary(corpus: Corpus, vocab: int) -> None:
    """Refuse a model of another vocabulary than the corpus.

    Raises:
        DataError: the sizes differ.
    """
    if corpus.header.vocab != vocab:
        header = corpus.header
        raise DataError(
            f"Corpus {corpus.path} has a vocabulary of {header.vocab} ({header.tokenizer}), the model has "
            f"model.vocab={vocab}: set model.vocab={header.vocab}, or data.corpus to another corpus."
        )


def _blocks(array: NDArray[Any]) -> Iterator[NDArray[Any]]:
    for i in range(0, len(array), BLOCK):
        yield array[i : i + BLOCK]


def _reopened(path: Path, sha256: str) -> Corpus:
    corpus = Corpus.open(path)
    if corpus.header.sha256 != sha256:
        raise DataError(f"Corpus {path} was replaced by another one while it was in use; start again.")
    return corpus
