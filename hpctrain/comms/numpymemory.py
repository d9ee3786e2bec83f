"""Arrays of numpy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hpctrain.comms.memory import Buffer, Combine, too_large


class NumpyMemory:
    """Arrays of numpy. It has no bfloat16: these are kept as their bits, the upper half of a float32."""

    kind = "cpu"
    name = "cpu"

    def zeros(self, elements: int, dtype: str) -> Buffer:
        try:
            return np.zeros(elements, dtype=_kind(dtype))
        except (ValueError, MemoryError):
            raise too_large(elements, dtype, self.name) from None

    def table(self, values: Sequence[float], dtype: str) -> Buffer:
        if dtype == "bfloat16":  # the pattern's values fit: nothing is rounded
            return (np.array(values, dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16)
        return np.array(values, dtype=np.float64).astype(_kind(dtype))

    def places(self, start: int, count: int) -> Buffer:
        return np.arange(start, start + count, dtype=np.int64)

    def doubles(self, part: Buffer, dtype: str) -> Buffer:
        if dtype == "bfloat16":
            part = (part.astype(np.uint32) << 16).view(np.float32)
        return part.astype(np.float64)

    def combine(self, reduction: str) -> Combine | None:
        found = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}.get(reduction)
        return None if found is None else lambda into, other: found(into, other, out=into)

    def product(self, side: int, dtype: str) -> Callable[[], object]:
        kind = "float32" if dtype in ("float16", "bfloat16") else dtype  # no BLAS has halves
        a, b, out = (np.ones((side, side), dtype=kind) for _ in range(3))
        return lambda: np.matmul(a, b, out=out)

    def finish(self) -> None:
        """All has ended."""


def _kind(dtype: str) -> np.dtype[Any]:
    return np.dtype("uint16" if dtype == "bfloat16" else dtype)
