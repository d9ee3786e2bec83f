"""Tokens in plain arrays: numpy's .npy, which says its type, and raw .bin files, which do not."""

from __future__ import annotations

import tokenize
import zipfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hpctrain.data.corpus import Corpus
from hpctrain.data.foreign import Array, Foreign, cut_after, mapped, same, stretches
from hpctrain.data.output import check_names_a_file, written
from hpctrain.errors import DataError, first_line
from hpctrain.files import sync

LOOK = 1 << 20
"""Elements of a raw file that are looked at for signs of another type."""
UNSOUND = (
    OSError,
    ValueError,
    EOFError,
    OverflowError,
    SyntaxError,
    TypeError,
    tokenize.TokenError,
    zipfile.BadZipFile,
)
"""What numpy raises at bytes that are no array."""


def read_array(path: Path, end: int, dtype: str | None = None, offsets: Path | None = None) -> Foreign:
    """What is in a .npy file of one dimension, or in a raw file of a type that is named.

    Args:
        path: of it.
        end: id that ends a document.
        dtype: of a raw file, for example uint16; never guessed.
        offsets: a .npy file of where documents begin, and the end; None: documents end after each `end`.

    Raises:
        DataError: it is damaged, of another type than is said, or not of integers.
    """
    tokens = _raw(path, dtype) if path.suffix != ".npy" else _npy(path)
    if dtype is not None and path.suffix == ".npy" and np.dtype(dtype) != tokens.dtype.newbyteorder("="):
        raise DataError(f"{path} says that its type is {tokens.dtype.name}, and --dtype {dtype}; leave --dtype out.")
    return _read(path, tokens, cut_after(stretches(tokens), end) if offsets is None else offsets)


def _read(path: Path, tokens: Array, offsets: Path | NDArray[np.int64]) -> Foreign:
    if isinstance(offsets, Path):
        where = _npy(offsets).astype(np.int64)
        if len(where) < 2 or where[0] != 0 or where[-1] != len(tokens) or (np.diff(where) <= 0).any():
            raise DataError(f"{offsets} does not ascend from 0 to the {len(tokens):,} tokens of {path}.")
        offsets = where
    return Foreign(path, "numpy", offsets, stretches(tokens), facts={"dtype": tokens.dtype.name})


def _npy(path: Path) -> Array:
    data = mapped(path)
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except UNSOUND as error:
        raise DataError(f"{path} is no sound .npy file ({first_line(error)}); get it again.") from error
    if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.kind not in "iu":
        shape = getattr(array, "shape", "?")
        raise DataError(f"{path} has shape {shape} and type {getattr(array, 'dtype', '?')}; one dimension of integers "
                        f"is read.")  # fmt: skip
    assert isinstance(array, np.memmap)
    if (size := array.offset + array.nbytes) != len(data):
        raise DataError(f"{path} has {len(data):,} bytes, and an array that ends at {size:,}; get it again.")
    return data[array.offset : array.offset + array.nbytes].view(array.dtype)


def _raw(path: Path, name: str | None) -> Array:
    if name is None:
        raise DataError(
            f"{path} does not say of which type its ids are, and that is not guessed: name it with --dtype, for "
            f"example uint16."
        )
    dtype, data = np.dtype(name).newbyteorder("<"), mapped(path)
    if len(data) % dtype.itemsize:
        raise DataError(f"{path} has {len(data):,} bytes, which is no whole number of {name}; it is of another type or "
                        f"truncated.")  # fmt: skip
    tokens: Array = data.view(dtype)
    _refuse_other_type(path, tokens, name)
    return tokens


def _refuse_other_type(path: Path, tokens: Array, name: str) -> None:
    """Ids of twice the width that is named are low and high halves by turns, and all high ones are small.

    The other way round two ids make one that is larger than any vocabulary, which every import checks.
    """
    head = tokens[:LOOK]
    width = 2 * head.dtype.itemsize
    if width > 8 or len(head) < 16:
        return
    for high, low in ((head[1::2], head[0::2]), (head[0::2], head[1::2])):
        if high.max() <= 16 and len(np.unique(low)) > 4 * max(len(np.unique(high)), 4):
            raise DataError(
                f"{path} looks like ids of {width} bytes: every second {name} of it is at most {int(high.max())}; "
                f"if it is, say --dtype {'int64' if width == 8 else f'uint{8 * width}'}."
            )


def write_array(corpus: Corpus, output: Path, replace_existing: bool = False) -> tuple[tuple[Path, Path], int]:
    """Write the tokens as OUT.npy and where documents begin as OUT.documents.npy.

    Returns:
        the files, and the CRC-32 of all tokens as uint32, which they and the corpus have in common.

    Raises:
        DataError: they cannot be written.
    """
    check_names_a_file(output)
    tokens = output if output.suffix == ".npy" else output.with_name(output.name + ".npy")
    documents = tokens.with_suffix(".documents.npy")
    with written(documents, replace_existing) as other, written(tokens, replace_existing) as partial:
        _save(corpus.tokens, partial)
        _save(corpus.documents, other)
        crc = same(_read(partial, _npy(partial), other), corpus)
        sync(other)  # so that nothing is left that can fail when the first of both gets its name
    return (tokens, documents), crc


def _save(array: Array, path: Path) -> None:
    """As `np.save`, but from memory of our own: to the kernel, a mapped file that was cut is a bad address."""
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
        for block in stretches(array)():
            file.write(block.copy().data)
