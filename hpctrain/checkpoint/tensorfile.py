"""Files in the safetensors format: written as a stream, read through a memory map.

Such a file is eight bytes with the length of the header, little-endian; the header, JSON with the dtype,
shape and extent of each tensor; and the values, one tensor after the other.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.errors import CheckpointError

CODES = {"float32": "F32", "float64": "F64"}
"""Code of each dtype that master state can have."""

ALIGNMENT = 64
"""Where the values begin is a multiple of this, bytes."""

LENGTH = 8
"""Bytes of the header's length."""


def nbytes(dtype: str, shape: Sequence[int]) -> int:
    """Size of a tensor's values."""
    return math.prod(shape) * np.dtype(dtype).itemsize


def header(tensors: Sequence[tuple[str, str, Sequence[int]]]) -> bytes:
    """What stands before the values.

    Args:
        tensors: key, dtype and shape, in the order the values will follow.
    """
    described, end = {}, 0
    for key, dtype, shape in tensors:
        begin, end = end, end + nbytes(dtype, shape)
        described[key] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-(LENGTH + len(text)) % ALIGNMENT)
    return len(text).to_bytes(LENGTH, "little") + text


class TensorFile:
    """Tensors of one file, mapped into memory: only what is looked at is read.

    Args:
        path: the file.

    Raises:
        CheckpointError: it is missing, or not such a file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                length = int.from_bytes(file.read(LENGTH), "little")
                if not 0 < length <= size - LENGTH:
                    raise ValueError(f"a header of {length} bytes in a file of {size}")
                self._tensors = json.loads(file.read(length))
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read as a safetensors file: {error}.") from error
        self._begin = LENGTH + length

    def tensor(self, key: str) -> NDArray[Any]:
        """A read-only view of a tensor."""
        try:
            about = self._tensors[key]
            dtype = next(name for name, code in CODES.items() if code == about["dtype"])
            begin, shape = self._begin + about["data_offsets"][0], about["shape"]
            flat: NDArray[Any] = np.frombuffer(self._map, np.dtype(dtype).newbyteorder("<"), math.prod(shape), begin)
            return flat.reshape(tuple(shape))
        except (KeyError, TypeError, ValueError, StopIteration) as error:
            raise CheckpointError(f"{self.path} does not hold tensor {key!r} as its index says: {error!r}.") from error
