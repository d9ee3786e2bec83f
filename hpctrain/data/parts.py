"""A build in parts: what one part is made of, and making it.

A part is named by a hash of all that it depends on. So a build that was killed finds what is done, whatever changed
meanwhile is made anew, and any number of processes on any node make the same files.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from hpctrain.data import format
from hpctrain.data.partfile import HASH, Damaged, Part, Writer, path_of
from hpctrain.data.records import Chunk, Piece, Reading, chunks
from hpctrain.data.sources import Listing, SourceError
from hpctrain.data.tokenizer import ByteTokenizer, JsonTokenizer, Tokenizer

VERSION = 2
"""Changes whenever parts of old would not do any more."""
BATCH_BYTES, BATCH_CHUNKS = 1 << 20, 2048
"""Text that is encoded at a time."""
SMALLEST, MOST, LARGEST = 1 << 20, 2048, 1 << 30
"""Bytes of a part at least, parts of a build, and bytes of a part at most, in the order in which they give way."""
BLOCK = 1 << 20
"""Bytes of a mask that are written at a time."""

T = TypeVar("T")


@dataclass(frozen=True)
class Job:
    """What is the same for all parts of a build; goes to every worker once.

    Attributes:
        folder: of the parts.
        tokenizer_json: of its tokenizer; empty: bytes.
        end: name of the token that ends a document.
        reading: how records become documents.
        unique: documents get hashes of their texts.
    """

    folder: Path
    tokenizer_json: bytes = b""
    end: str | None = None
    reading: Reading = field(default_factory=Reading)
    unique: bool = False

    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the job, made anew."""
        return JsonTokenizer(self.tokenizer_json, self.end) if self.tokenizer_json else ByteTokenizer()


@dataclass(frozen=True)
class Unit:
    """The work of one part.

    Attributes:
        key: names the part.
        pieces: of it, in order.
        bytes: of the sources.
    """

    key: str
    pieces: tuple[Piece, ...]
    bytes: int


def units(listing: Listing, job: Job, tokenizer_sha256: str, size: int | None = None) -> list[Unit]:
    """The work of a build, a pure function of what is built from: not of who does it.

    Args:
        listing: the sources.
        job: of the build.
        tokenizer_sha256: of its tokenizer.
        size: bytes of a part; None takes what suits the whole.
    """
    size = size or max(SMALLEST, min(listing.bytes // MOST, LARGEST))
    out: list[Unit] = []
    held: list[Piece] = []
    bytes_held = 0
    for piece in _pieces(listing, size):
        held.append(piece)
        bytes_held += piece.end - piece.start
        if bytes_held >= size:
            out.append(_unit(held, job, tokenizer_sha256))
            held, bytes_held = [], 0
    return [*out, _unit(held, job, tokenizer_sha256)] if held else out


def _pieces(listing: Listing, size: int) -> list[Piece]:
    found = []
    for source in listing.sources:
        whole = source.kind != "jsonl" or bool(source.compression)
        starts = [0] if whole else range(0, source.size, size)
        found += [Piece(source, start, source.size if whole else min(start + size, source.size)) for start in starts]
    if listing.order == "hash":  # stretches of large files of records lie among each other
        found.sort(key=_hash_of)
    return found


def _hash_of(piece: Piece) -> bytes:
    name = os.fsencode(piece.source.name)
    return hashlib.sha256(name + b"\0%d" % piece.start if piece.start else name).digest()


def _unit(held: Sequence[Piece], job: Job, tokenizer_sha256: str) -> Unit:
    facts = [[str(p.source.path), p.source.size, p.source.changed, p.source.kind, p.start, p.end] for p in held]
    roots = [p.source.root for p in held]
    content = json.dumps([VERSION, tokenizer_sha256, asdict(job.reading), job.unique, facts, roots])
    key = hashlib.sha256(content.encode(errors="surrogateescape")).hexdigest()[:24]
    return Unit(key, tuple(held), sum(p.end - p.start for p in held))


def make(unit: Unit, job: Job, tokenizer: Tokenizer, progress: Callable[[int], None] = lambda done: None) -> Part:
    """Encode a unit. What was written when it fails or is killed is not taken for the part.

    Raises:
        SourceError: see `chunks`.
        OSError: it cannot be written.
    """
    part, writer = Part(), Writer(job.folder, unit.key)
    try:
        _fill(unit, job, tokenizer, part, writer, progress)
        writer.close(part)
    finally:
        writer.drop()
    return part


def mended(unit: Unit, part: Part, job: Job, tokenizer: Tokenizer, look: Callable[[], T]) -> T:
    """What `look` finds in a part. One that is damaged is made again, it alone, and looked at once more.

    Raises:
        Damaged: it is so still.
        SourceError: it cannot be made again, or is another one now.
    """
    try:
        return look()
    except Damaged:
        if make(unit, job, tokenizer) != part:
            path_of(job.folder, unit.key).unlink(missing_ok=True)
            raise SourceError(
                f"Source {unit.pieces[0].source.path} or one after it changes while the corpus is built: a part that "
                f"was made twice is not the same; build again when nobody writes them."
            ) from None
        return look()


def _fill(
    unit: Unit, job: Job, tokenizer: Tokenizer, part: Part, writer: Writer, progress: Callable[[int], None]
) -> None:
    document = _Document(tokenizer, writer, job.reading.prompt is not None, job.unique)
    lengths, sums, hashes = array("q"), array("I"), bytearray()
    for piece in unit.pieces:
        before = part.tokens
        for lot in batches(chunks(piece, job.reading, progress)):
            for chunk, ids in zip(lot, tokenizer.encode_batch([c.text for c in lot])):
                document.add(chunk, ids)
                if not chunk.last:
                    continue
                if chunk.bad or not document.text:
                    part.bad += chunk.bad
                    part.empty += not chunk.bad
                    document.drop()
                    continue
                document.end()
                lengths.append(document.tokens)
                sums.append(document.crc)
                hashes += document.hash() if job.unique else b""
                part.tokens += document.tokens
                part.documents += 1
                document.begin()
        root = str(piece.source.root)
        part.shares[root] = part.shares.get(root, 0) + part.tokens - before
    writer.end("tokens")
    if job.reading.prompt is not None:
        for stretch in document.learnt:
            for block in stretch.blocks():
                writer.write(block)
        writer.end("mask")
    for values in (lengths, sums, hashes):
        writer.write(bytes(values))
    writer.end("facts")


@dataclass(frozen=True)
class _Stretch:
    """Tokens that are learnt, or that are not."""

    learnt: bool
    tokens: int

    def blocks(self) -> Iterator[bytes]:
        """Its part of the mask."""
        for at in range(0, self.tokens, BLOCK):
            yield bytes([self.learnt]) * min(BLOCK, self.tokens - at)


class _Document:
    """The document that is being written; a long one is never in memory as a whole.

    Attributes:
        tokens: of it so far.
        text: bytes of it so far that are to be learnt.
        crc: of its tokens and mask, once it has ended.
        learnt: of all documents that have ended, where there is a mask.
    """

    def __init__(self, tokenizer: Tokenizer, out: Writer, masked: bool, unique: bool) -> None:
        self._dtype = format.token_dtype(tokenizer.vocab)
        self._end = np.array([tokenizer.end_of_document], self._dtype)
        self._out, self._masked, self._unique = out, masked, unique
        self.learnt: list[_Stretch] = []
        self.begin()

    def begin(self) -> None:
        """Another one begins where the last one ended."""
        self.tokens = self.text = self.crc = 0
        self._start = self._out.mark()
        self._stretches: list[_Stretch] = []
        self._texts = {prompt: hashlib.blake2b(digest_size=32) for prompt in (True, False)} if self._unique else {}

    def drop(self) -> None:
        """Leave out all that was added."""
        self._out.back_to(self._start)
        self.begin()

    def add(self, chunk: Chunk, ids: NDArray[Any]) -> None:
        """Write a chunk."""
        self._write(ids.astype(self._dtype, copy=False), not chunk.prompt)
        self.text += 0 if chunk.prompt else len(chunk.text)
        if self._unique:
            self._texts[chunk.prompt].update(chunk.text)

    def end(self) -> None:
        """Write the end of the document, and note what of it is learnt."""
        self._write(self._end, True)
        if self._masked:
            for stretch in self._stretches:
                for block in stretch.blocks():
                    self.crc = zlib.crc32(block, self.crc)
            self.learnt += self._stretches

    def hash(self) -> bytes:
        """Of the text, prompt and answer apart."""
        both = b"".join(text.digest() for text in self._texts.values())
        return hashlib.blake2b(both, digest_size=HASH).digest()

    def _write(self, ids: NDArray[Any], learnt: bool) -> None:
        data = ids.tobytes()
        self._out.write(data)
        self.crc = zlib.crc32(data, self.crc)
        self.tokens += len(ids)
        if self._masked:
            self._stretches.append(_Stretch(learnt, len(ids)))


def batches(found: Iterable[Chunk]) -> Iterator[list[Chunk]]:
    """Chunks in lots that are worth one call of a tokenizer."""
    held: list[Chunk] = []
    size = 0
    for chunk in found:
        held.append(chunk)
        size += len(chunk.text)
        if size >= BATCH_BYTES or len(held) >= BATCH_CHUNKS:
            yield held
            held, size = [], 0
    yield held
