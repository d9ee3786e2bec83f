"""Training a tokenizer: byte-level BPE, by the `tokenizers` library."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from hpctrain.data.output import written
from hpctrain.data.tokenizer import ENDS, JsonTokenizer, _library
from hpctrain.errors import DataError

SMALLEST = 257
"""All bytes, and one end of document."""


def train_bpe(texts: Iterable[bytes], vocab: int) -> JsonTokenizer:
    """A byte-level BPE tokenizer in which every text can be written; the same texts give the same one.

    Args:
        texts: in UTF-8.
        vocab: number of ids, the 256 bytes and one end of document among them.

    Raises:
        DataError: the vocabulary is too small, or there is no text.
    """
    if vocab < SMALLEST:
        raise DataError(
            f"A vocabulary of {vocab} (--vocab) is too small: bytes and the end of a document are {SMALLEST}; "
            f"ask for more."
        )
    lib = _library()
    tokenizer = lib.Tokenizer(lib.models.BPE())
    tokenizer.pre_tokenizer = lib.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = lib.decoders.ByteLevel()
    trainer = lib.trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[ENDS[0]],
        initial_alphabet=sorted(lib.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text.decode("utf-8") for text in texts), trainer)
    return JsonTokenizer(tokenizer.to_str(pretty=True).encode(), ENDS[0])


def save(tokenizer: JsonTokenizer, output: Path, force: bool = False) -> None:
    """Write a tokenizer.json, whole or not at all.

    Raises:
        DataError: it is there already, or cannot be written.
    """
    with written(output, force) as part:
        part.write_bytes(tokenizer.json)
