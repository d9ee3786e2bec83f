"""Text as token ids.

A corpus names the tokenizer that wrote it by identity and hash, so that a model never reads ids under
another meaning.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hpctrain.errors import DataError, first_line

ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")
"""What tokenizers in use call the end of a document. One that has exactly one of them needs no `--end`."""
TOKENIZER_FILE = "tokenizer.json"
"""Name in a run folder."""
MOST = 1 << 24
"""Ids of a tokenizer; the largest in use have a fiftieth of it."""
PIECE = 1 << 20
"""Bytes of one document that are encoded at a time; a larger one is cut after a line, or else between characters."""


class Tokenizer(Protocol):
    """What is asked of a tokenizer.

    Attributes:
        identity: name under which a corpus refers to it.
        vocab: number of ids.
        end_of_document: id after the last token of each document.
        sha256: hash of everything that gives ids their meaning.
        json: the tokenizer.json it was made of; empty for one that needs none.
        text: takes UTF-8 only.
    """

    identity: str
    vocab: int
    end_of_document: int
    sha256: str
    json: bytes
    text: bool

    def encode(self, text: bytes) -> NDArray[Any]:
        """The ids of a text, without an end of document. What is not UTF-8 raises UnicodeDecodeError if `text`."""

    def encode_batch(self, texts: Sequence[bytes]) -> list[NDArray[Any]]:
        """The ids of some texts, as `encode` gives them."""

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some ids, without ends of documents."""


class ByteTokenizer:
    """Ids 0-255 are the bytes themselves, 256 ends a document. Every input can be encoded."""

    identity = "bytes-257"
    vocab = 257
    end_of_document = 256
    sha256 = hashlib.sha256(b"hpctrain tokenizer: id i < 256 is byte i; id 256 ends a document").hexdigest()
    json = b""
    text = False

    def encode(self, text: bytes) -> NDArray[np.uint16]:
        """The ids of some bytes, without an end of document. Cutting the input anywhere changes nothing."""
        return np.frombuffer(text, np.uint8).astype(np.uint16)

    def encode_batch(self, texts: Sequence[bytes]) -> list[NDArray[Any]]:
        """The ids of some texts."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some ids. Ends of documents are left out; what is not UTF-8 becomes U+FFFD.

        Raises:
            DataError: an id is outside the vocabulary.
        """
        return bytes(_known(self, ids)).decode("utf-8", errors="replace")


class JsonTokenizer:
    """A tokenizer.json of the `tokenizers` library. Text never makes special tokens, whatever it spells.

    Args:
        content: of the file.
        end: the token that ends a document; None takes the one of `ENDS` that it has.
        name: of it, for sentences.

    Raises:
        DataError: it is not such a file, has no such token, or the library is not there.
    """

    text = True

    def __init__(self, content: bytes, end: str | None = None, name: str = "tokenizer.json") -> None:
        library = _library()
        try:
            self._inner = library.Tokenizer.from_str(content.decode("utf-8"))
            kind = str(json.loads(content)["model"].get("type") or "tokens").lower()
        except Exception as error:  # the library raises plain Exception
            raise DataError(
                f"Tokenizer {name} is not a tokenizer.json that the tokenizers library reads "
                f"({first_line(error)[:200]}); give one that it saved."
            ) from error
        self._inner.no_padding()
        self._inner.no_truncation()
        self._inner.encode_special_tokens = True
        vocabulary: dict[str, int] = self._inner.get_vocab(with_added_tokens=True)
        self.end_of_document = _end(vocabulary, end, name)
        self.vocab = check_size(max(vocabulary.values()) + 1, name)
        self.identity = f"{kind}-{self.vocab}"
        self.json = content
        self.sha256 = _hash(content, self.end_of_document)

    def encode(self, text: bytes) -> NDArray[Any]:
        """The ids of a text in UTF-8, without an end of document."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[bytes]) -> list[NDArray[Any]]:
        """The ids of some texts in UTF-8. Long ones are cut (`PIECE`), so that memory stays bounded."""
        parts = [[piece.decode("utf-8") for piece in pieces(text)] for text in texts]
        done = iter(self._inner.encode_batch_fast([p for some in parts for p in some], add_special_tokens=False))
        ids = [[np.array(next(done).ids, np.uint32) for _ in some] for some in parts]
        return [one[0] if len(one) == 1 else np.concatenate(one) for one in ids]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some ids. Ends of documents are left out.

        Raises:
            DataError: an id is outside the vocabulary.
        """
        return str(self._inner.decode(_known(self, ids), skip_special_tokens=False))


class UnknownTokenizer:
    """The tokenizer of a corpus that was imported without one: ids have a number and no text."""

    text = True
    json = b""

    def __init__(self, vocab: int, end_of_document: int) -> None:
        self.identity = f"unknown-{vocab}"
        check_size(vocab, "of --vocab")
        self.vocab, self.end_of_document = vocab, end_of_document
        self.sha256 = _hash(b"unknown %d" % vocab, end_of_document)

    def encode(self, text: bytes) -> NDArray[Any]:
        """Refused."""
        raise DataError(f"{self.identity} has no text; import the corpus again with --tokenizer.")

    def encode_batch(self, texts: Sequence[bytes]) -> list[NDArray[Any]]:
        """Refused."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """The numbers."""
        return " ".join(str(i) for i in _known(self, ids))


def check_size(vocab: int, name: str) -> int:
    """The number of ids of a tokenizer.

    Raises:
        DataError: it is more than `MOST`: arrays of that length are made.
    """
    if vocab > MOST:
        raise DataError(f"Tokenizer {name} has {vocab:,} ids; at most {MOST:,} are possible: ids must lie close.")
    return vocab


def load_tokenizer(path: Path | None, end: str | None = None) -> Tokenizer:
    """The tokenizer of a file; None is that of bytes.

    Raises:
        DataError: see `JsonTokenizer`.
    """
    if path is None:
        if end is not None:
            raise DataError(f"--end {end!r} names a token of a tokenizer.json; give one with --tokenizer.")
        return ByteTokenizer()
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"Tokenizer {path} cannot be read: {error.strerror}; check the path and its rights.") from error
    return JsonTokenizer(content, end, str(path))


def tokenizer_of(identity: str, sha256: str, candidates: Iterable[bytes] = ()) -> Tokenizer:
    """The tokenizer that a corpus or a checkpoint names.

    Args:
        identity: of it.
        sha256: of it.
        candidates: contents of files that may be its tokenizer.json.

    Raises:
        DataError: this version of hpctrain has no such tokenizer, or gives its ids another meaning.
    """
    known = ByteTokenizer()
    if (identity, sha256) == (known.identity, known.sha256):
        return known
    vocab = identity.rpartition("-")[2]
    for content in filter(None, candidates):
        digest = hashlib.sha256(content).digest()
        for end in _ids(content):
            if _with_end(digest, end) == sha256:
                return JsonTokenizer(content, _name_of(content, end), identity)
    if identity == f"unknown-{vocab}" and vocab.isdigit():
        for end in range(int(vocab)):
            if (unknown := UnknownTokenizer(int(vocab), end)).sha256 == sha256:
                return unknown
    raise DataError(
        f"Tokenizer {identity!r} with hash {sha256[:12]} is unknown here; this version of hpctrain has "
        f"{known.identity!r} with hash {known.sha256[:12]}, and reads a tokenizer.json that lies in a corpus or in the "
        f"run folder: build the corpus again with `hpctrain data build`."
    )


def _hash(content: bytes, end: int) -> str:
    return _with_end(hashlib.sha256(content).digest(), end)


def _with_end(digest: bytes, end: int) -> str:
    return hashlib.sha256(b"hpctrain tokenizer.json, id %d ends a document\n" % end + digest).hexdigest()


def _ids(content: bytes) -> list[int]:
    """Ids that may end a document: those of added tokens."""
    try:
        added = [int(token["id"]) for token in json.loads(content)["added_tokens"]]
        vocabulary = json.loads(content)["model"]["vocab"]
        return added + ([int(i) for i in vocabulary.values()] if isinstance(vocabulary, dict) else [])
    except (ValueError, KeyError, TypeError):
        return []


def _name_of(content: bytes, end: int) -> str:
    tree = json.loads(content)
    names = {int(token["id"]): str(token["content"]) for token in tree["added_tokens"]}
    if end in names:
        return names[end]
    return next(str(name) for name, i in tree["model"]["vocab"].items() if i == end)


def _end(vocabulary: dict[str, int], end: str | None, name: str) -> int:
    if end is not None:
        if end not in vocabulary:
            raise DataError(f"Tokenizer {name} has no token {end!r} (--end): name the one that ends a document.")
        return vocabulary[end]
    found = [token for token in ENDS if token in vocabulary]
    if len(found) != 1:
        has = f"has {' and '.join(found)}" if found else f"has none of {', '.join(ENDS)}"
        raise DataError(f"Tokenizer {name} {has}: say with --end which token ends a document.")
    return vocabulary[found[0]]


def _known(tokenizer: Tokenizer, ids: Iterable[int]) -> list[int]:
    """The ids without ends of documents, all of them in the vocabulary."""
    kept = [int(i) for i in ids if i != tokenizer.end_of_document]
    for i in kept:
        if not 0 <= i < tokenizer.vocab:
            raise DataError(
                f"Token id {i} is not in the vocabulary of {tokenizer.identity}, which is 0 to {tokenizer.vocab - 1}."
            )
    return kept


def cut(text: bytes, at: int = 0) -> int:
    """Where the first stretch of a text ends that is longer than `PIECE` bytes from `at` on."""
    end = text.rfind(b"\n", at, at + PIECE) + 1
    if end <= at:
        end = at + PIECE
        while end > max(at + PIECE - 4, at + 1) and text[end] & 0xC0 == 0x80:  # inside a character
            end -= 1
    return end


def pieces(text: bytes) -> Iterator[bytes]:
    """A text in stretches of at most `PIECE` bytes, of which only the content decides where they end."""
    at = 0
    while len(text) - at > PIECE:
        end = cut(text, at)
        yield text[at:end]
        at = end
    yield text[at:]


def _library() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise DataError(
            "A tokenizer.json needs the tokenizers library, which is not installed: pip install tokenizers."
        ) from error
    return tokenizers
