"""Text as token ids.

A corpus names the tokenizer that wrote it by identity and hash, so that a model never reads ids under
another meaning.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from hpctrain.errors import DataError


class ByteTokenizer:
    """Ids 0-255 are the bytes themselves, 256 ends a document. Every input can be encoded.

    Attributes:
        identity: name under which a corpus refers to it.
        vocab: number of ids.
        end_of_document: id after the last byte of each document.
        sha256: hash of everything that gives ids their meaning.
    """

    identity = "bytes-257"
    vocab = 257
    end_of_document = 256
    sha256 = hashlib.sha256(b"hpctrain tokenizer: id i < 256 is byte i; id 256 ends a document").hexdigest()

    def encode(self, text: bytes) -> NDArray[np.uint16]:
        """The ids of some bytes, without an end of document. Cutting the input anywhere changes nothing."""
        return np.frombuffer(text, np.uint8).astype(np.uint16)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some ids. Ends of documents are left out; what is not UTF-8 becomes U+FFFD.

        Raises:
            DataError: an id is outside the vocabulary.
        """
        kept = [int(i) for i in ids if i != self.end_of_document]
        for i in kept:
            if not 0 <= i < self.vocab:
                raise DataError(
                    f"Token id {i} is not in the vocabulary of {self.identity}, which is 0 to {self.vocab - 1}."
                )
        return bytes(kept).decode("utf-8", errors="replace")


def tokenizer_of(identity: str, sha256: str) -> ByteTokenizer:
    """The tokenizer that a corpus or a checkpoint names.

    Raises:
        DataError: this version of hpctrain has no such tokenizer, or gives its ids another meaning.
    """
    known = ByteTokenizer()
    if (identity, sha256) != (known.identity, known.sha256):
        raise DataError(
            f"Tokenizer {identity!r} with hash {sha256[:12]} is unknown here; this version of hpctrain has "
            f"{known.identity!r} with hash {known.sha256[:12]}: build the corpus again with `hpctrain data build`."
        )
    return known
