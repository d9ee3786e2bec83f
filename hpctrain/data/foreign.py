"""Corpora from and to other tools: what all formats have in common.

Nothing about a foreign file is guessed. Its type is what the file itself says, or the user; and what that type gives is
held against everything that is known: the sizes of files, the vocabulary, and, where the user knows it, the number of
tokens. What was written is read again and compared with the source by count and checksum.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain import __version__
from hpctrain.data import format
from hpctrain.data.corpus import Corpus
from hpctrain.data.format import Header
from hpctrain.data.mapped import Mapped
from hpctrain.data.output import written
from hpctrain.data.seal import entropy, seal
from hpctrain.data.tokenizer import Tokenizer
from hpctrain.errors import DataError

BLOCK = 1 << 20
"""Tokens converted at a time."""
CANONICAL = np.dtype("<u4")
"""Type in which the tokens of all formats are compared."""

Array = NDArray[Any]


@dataclass(frozen=True)
class Foreign:
    """The content of a foreign corpus.

    Attributes:
        path: of it, for sentences.
        kind: what it is.
        offsets: [documents + 1] where documents begin, in tokens.
        blocks: gives the tokens in order, a stretch at a time, each time it is called.
        mask: gives the loss mask likewise; None where all is learnt.
        facts: more about it, for the provenance.
    """

    path: Path
    kind: str
    offsets: NDArray[np.int64]
    blocks: Callable[[], Iterator[Array]]
    mask: Callable[[], Iterator[Array]] | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """How many there are."""
        return int(self.offsets[-1])


def import_corpus(
    foreign: Foreign,
    output: Path,
    tokenizer: Tokenizer,
    *,
    expected: int | None = None,
    replace_existing: bool = False,
    progress: Callable[[int], None] = lambda done: None,
) -> tuple[Header, int]:
    """Write a corpus with the content of another; whole or not at all.

    Args:
        foreign: what is imported.
        output: the corpus.
        tokenizer: that gives its ids their meaning.
        expected: tokens that it must have, if that is known.
        replace_existing: replace a file of that name.
        progress: called with the number of tokens written since the last call.

    Returns:
        the header, and the CRC-32 of all tokens as uint32, which the source and the corpus have in common.

    Raises:
        DataError: ids that the vocabulary does not have, another number of tokens, or an output that cannot be written.
    """
    if expected is not None and expected != foreign.tokens:
        raise DataError(
            f"{foreign.path} has {foreign.tokens:,} tokens, and not the {expected:,} that --tokens says: it is another "
            f"file, or its type is another one."
        )
    if not foreign.tokens or len(foreign.offsets) < 2:
        raise DataError(f"{foreign.path} has no tokens; there is nothing to import.")
    vocab, masked = tokenizer.vocab, foreign.mask is not None
    with written(output, replace_existing) as partial:
        documents = len(foreign.offsets) - 1
        places = format.create(partial, foreign.tokens, documents, vocab, loss_mask=masked, tokenizer=tokenizer.json)
        counts, crc, source_crc = np.zeros(vocab, np.int64), 0, 0
        with partial.open("r+b") as file:
            file.seek(places.documents)
            file.write(foreign.offsets.astype(format.OFFSET).data)
            file.seek(places.tokens)
            done = 0
            for block in foreign.blocks():
                _check(block, vocab, foreign, done)
                source_crc = zlib.crc32(block.astype(CANONICAL).data, source_crc)
                data = block.astype(format.token_dtype(vocab)).data
                crc = zlib.crc32(data, crc)
                file.write(data)
                counts += np.bincount(block.astype(np.int64), minlength=vocab)
                done += len(block)
                progress(len(block))
            if done != foreign.tokens:
                raise DataError(f"{foreign.path} gave {done:,} tokens and says that it has {foreign.tokens:,}.")
            mask = _write_mask(file, places.loss_mask, foreign)
        _write_checksums(partial, places, foreign.offsets, vocab)
        header = Header(
            tokenizer=tokenizer.identity,
            tokenizer_sha256=tokenizer.sha256,
            vocab=vocab,
            end_of_document=tokenizer.end_of_document,
            tokens=foreign.tokens,
            documents=documents,
            sha256="",
            entropy=entropy(counts),
            provenance={
                "imported": str(foreign.path),
                "kind": foreign.kind,
                "tokens_crc32": f"{source_crc:08x}",
                "hpctrain": __version__,
                **foreign.facts,
            },
            loss_mask=masked,
        )
        header = seal(partial, places, header, [(foreign.tokens * header.dtype.itemsize, crc)], mask)
        if (found := canonical_crc(Corpus.open(partial))) != source_crc:
            raise DataError(f"{foreign.path} was not imported: its tokens have CRC-32 {source_crc:08x}, what was "
                            f"written has {found:08x}; please report this.")  # fmt: skip
    return header, source_crc


def canonical_crc(corpus: Corpus) -> int:
    """CRC-32 of all tokens as uint32."""
    crc = 0
    for at in range(0, corpus.header.tokens, BLOCK):
        crc = zlib.crc32(corpus.tokens[at : at + BLOCK].astype(CANONICAL).data, crc)
    return crc


def same(foreign: Foreign, corpus: Corpus) -> int:
    """The CRC-32 that the tokens of both have.

    Raises:
        DataError: they are not the same, in number, checksum or documents.
    """
    crc = canonical_crc(corpus)
    if not np.array_equal(foreign.offsets, corpus.documents) or crc_of(foreign) != crc:
        raise DataError(
            f"{foreign.path} is not what is in {corpus.path}: the disk or its server fails; write elsewhere."
        )
    return crc


def crc_of(foreign: Foreign) -> int:
    """The same of a foreign corpus."""
    crc = 0
    for block in foreign.blocks():
        crc = zlib.crc32(block.astype(CANONICAL).data, crc)
    return crc


def stretches(tokens: Array) -> Callable[[], Iterator[Array]]:
    """An array, possibly a mapped one, in blocks."""

    def blocks() -> Iterator[Array]:
        for at in range(0, len(tokens), BLOCK):
            yield tokens[at : at + BLOCK]

    return blocks


def cut_after(tokens: Callable[[], Iterator[Array]], end: int) -> NDArray[np.int64]:
    """Offsets of documents that end after each `end`; what follows the last one is a document too."""
    found, done = [np.zeros(1, np.int64)], 0
    for block in tokens():
        found.append(np.flatnonzero(block == end) + done + 1)
        done += len(block)
    offsets = np.concatenate(found)
    return offsets if offsets[-1] == done else np.append(offsets, done)


def mapped(path: Path) -> NDArray[np.uint8]:
    """The bytes of a file.

    Raises:
        DataError: it is not there, empty, or cannot be read.
    """
    try:
        if path.stat().st_size == 0:
            raise DataError(f"{path} is empty; there is nothing to import.")
        return Mapped(path, str(path)).data
    except (OSError, ValueError) as error:
        said = getattr(error, "strerror", None) or error
        raise DataError(f"{path} cannot be read: {said}; check the path and its rights.") from error


def _check(block: Array, vocab: int, foreign: Foreign, done: int) -> None:
    wrong = np.flatnonzero((block < 0) | (block >= vocab))
    if len(wrong):
        at = done + int(wrong[0])
        document = int(foreign.offsets.searchsorted(at, "right")) - 1
        raise DataError(
            f"{foreign.path} has id {block[wrong[0]]} at token {at} (document {document}), which a vocabulary of "
            f"{vocab} does not have: it was made with another tokenizer, or its ids have another type or byte order."
        )


def _write_mask(file: Any, place: int | None, foreign: Foreign) -> list[tuple[int, int]]:
    if place is None or foreign.mask is None:
        return []
    crc = 0
    file.seek(place)
    for block in foreign.mask():
        data = block.astype(format.BYTE).data
        crc = zlib.crc32(data, crc)
        file.write(data)
    return [(foreign.tokens, crc)]


def _write_checksums(partial: Path, places: format.Places, offsets: NDArray[np.int64], vocab: int) -> None:
    """Those of all documents, from what was written."""
    data, dtype = mapped(partial), format.token_dtype(vocab)
    ids = data[places.tokens :][: int(offsets[-1]) * dtype.itemsize].view(dtype)
    mask = None if places.loss_mask is None else data[places.loss_mask :][: int(offsets[-1])]
    assert places.checksums is not None
    with partial.open("r+b") as file:
        file.seek(places.checksums)
        for start, end in zip(offsets[:-1].tolist(), offsets[1:].tolist()):
            crc = zlib.crc32(ids[start:end].data)
            crc = crc if mask is None else zlib.crc32(mask[start:end].data, crc)
            file.write(crc.to_bytes(4, "little"))
