"""Megatron-LM's .bin and .idx, both ways.

The layout is that of `megatron/core/datasets/indexed_dataset.py`: magic, version, type code, counts; then int32 lengths
and int64 byte offsets of all sequences, and int64 numbers of the sequences that begin documents, and the end. All is
little-endian.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.data.corpus import Corpus
from hpctrain.data.foreign import BLOCK, Array, Foreign, mapped, same, stretches
from hpctrain.data.output import check_names_a_file, written
from hpctrain.errors import DataError
from hpctrain.files import sync

MAGIC = b"MMIDIDX\x00\x00"
HEAD = struct.Struct("<9sQBQQ")
TYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""Codes of types that ids have; 6 and 7 are floats."""
LONGEST = 2**31 - 1
"""Tokens of a sequence, whose length is an int32."""


def read_megatron(prefix: Path) -> Foreign:
    """What is in PREFIX.bin and PREFIX.idx.

    Raises:
        DataError: they are missing, damaged, of another kind, or do not belong together.
    """
    return _read(*_files(prefix))


def _files(prefix: Path) -> tuple[Path, Path, Path]:
    """The prefix, the index and the ids; the prefix may be given as either file."""
    check_names_a_file(prefix)
    base = prefix.with_suffix("") if prefix.suffix in (".bin", ".idx") else prefix
    return base, base.with_name(base.name + ".idx"), base.with_name(base.name + ".bin")


def _read(base: Path, index_path: Path, bin_path: Path) -> Foreign:
    index = mapped(index_path)
    if len(index) < HEAD.size:
        raise DataError(f"{index_path} is truncated: it has {len(index)} bytes and no whole header; get it again.")
    magic, version, code, sequences, documents = HEAD.unpack(index[: HEAD.size].tobytes())
    if magic != MAGIC:
        raise DataError(
            f"{index_path} is no index of Megatron-LM; name a .bin and .idx that its preprocess_data.py made."
        )
    if version != 1:
        swapped = version == 1 << 56
        what = "is in big-endian byte order" if swapped else f"has version {version}"
        raise DataError(f"{index_path} {what}; version 1 in little-endian is read: preprocess the data again.")
    if code not in TYPES:
        raise DataError(f"{index_path} says that ids have type code {code}, which is none of integers; get it again.")
    need = HEAD.size + 12 * sequences + 8 * documents
    if len(index) < need:
        raise DataError(f"{index_path} is truncated: it has {len(index)} of {need} bytes; get it again.")
    lengths = np.frombuffer(index, "<i4", sequences, HEAD.size).astype(np.int64)
    pointers = np.frombuffer(index, "<i8", sequences, HEAD.size + 4 * sequences)
    firsts = np.frombuffer(index, "<i8", documents, HEAD.size + 12 * sequences)
    dtype, tokens = np.dtype(TYPES[code]), mapped(bin_path)
    _check(index_path, bin_path, lengths, pointers, firsts, dtype, len(tokens))
    ends = np.concatenate([np.zeros(1, np.int64), lengths.cumsum()])
    offsets = np.unique(ends[firsts])  # documents without a token are none
    return Foreign(base, "megatron", offsets, stretches(tokens.view(dtype)), facts={"dtype": dtype.name})


def _check(
    index: Path,
    data: Path,
    lengths: Array,
    pointers: Array,
    firsts: Array,
    dtype: np.dtype[Any],
    size: int,
) -> None:
    """Type, lengths, pointers and the size of the .bin say the same."""
    total = int(lengths.sum()) * dtype.itemsize
    if size != total:
        other = [np.dtype(t).name for t in TYPES.values() if np.dtype(t).itemsize * int(lengths.sum()) == size]
        hint = f" (it would fit {' or '.join(other)})" if other else ""
        raise DataError(
            f"{data} has {size:,} bytes, its index says {int(lengths.sum()):,} tokens of {dtype.name}, which are "
            f"{total:,}{hint}: the files do not belong together or one is truncated; get both again."
        )
    if (lengths < 0).any() or (pointers != (lengths.cumsum() - lengths) * dtype.itemsize).any():
        raise DataError(f"{index} is damaged: its sequences do not follow each other in {dtype.name}; get it again.")
    if not len(firsts) or firsts[0] != 0 or firsts[-1] != len(lengths) or (np.diff(firsts) < 0).any():
        raise DataError(f"{index} is damaged: its documents do not ascend from 0 to {len(lengths)}; get it again.")


def write_megatron(corpus: Corpus, prefix: Path, replace_existing: bool = False) -> tuple[tuple[Path, Path], int]:
    """Write PREFIX.bin and PREFIX.idx, a sequence a document; ids are uint16 where Megatron-LM has them so.

    Returns:
        the files, and the CRC-32 of all tokens as uint32, which they and the corpus have in common.

    Raises:
        DataError: a document is too long, or they cannot be written.
    """
    base, index_path, bin_path = _files(prefix)
    lengths = np.diff(corpus.documents)
    if lengths.max() > LONGEST:
        raise DataError(f"Document {int(lengths.argmax())} of {corpus.path} has more than {LONGEST:,} tokens, which "
                        f"an .idx cannot say; build the corpus with smaller documents.")  # fmt: skip
    dtype = np.dtype("<u2" if corpus.header.vocab < 65500 else "<i4")  # as its DType.optimal_dtype
    code = next(code for code, name in TYPES.items() if np.dtype(name) == dtype)
    with written(index_path, replace_existing) as index_partial, written(bin_path, replace_existing) as partial:
        with partial.open("wb") as file:
            for at in range(0, corpus.header.tokens, BLOCK):
                file.write(corpus.tokens[at : at + BLOCK].astype(dtype).data)
        with index_partial.open("wb") as file:
            file.write(HEAD.pack(MAGIC, 1, code, len(lengths), len(lengths) + 1))
            file.write(lengths.astype("<i4").data)
            file.write((corpus.documents[:-1] * dtype.itemsize).astype("<i8").data)
            file.write(np.arange(len(lengths) + 1, dtype="<i8").data)
        crc = same(_read(base, index_partial, partial), corpus)
        sync(index_partial)  # so that nothing is left that can fail when the first of both gets its name
    return (bin_path, index_path), crc
