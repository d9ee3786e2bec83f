"""Buffers of a backend, and the little arithmetic that benchmarks need on them: of numpy (`numpymemory`), or of torch
(`torchmemory`).

Both know slices, indexing by integers, `+ * >> ^ % !=` and assignment to a slice; `Memory` has the rest. MPI's ranks
need no torch, whose import costs seconds of each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from hpctrain.errors import ConfigError

Buffer = Any
"""One-dimensional: a numpy array or a torch tensor."""

Combine = Callable[[Buffer, Buffer], object]
"""Adds the second to the first, or takes the larger."""


class Memory(Protocol):
    """Where buffers are.

    Attributes:
        kind: cpu or cuda.
        name: of the device, for people.
    """

    @property
    def kind(self) -> str: ...

    @property
    def name(self) -> str: ...

    def zeros(self, elements: int, dtype: str) -> Buffer:
        """A new buffer of one of `sizes.DTYPES`.

        Raises:
            ConfigError: there is no memory for it.
        """
        ...

    def table(self, values: Sequence[float], dtype: str) -> Buffer:
        """Numbers as elements of a dtype."""
        ...

    def places(self, start: int, count: int) -> Buffer:
        """start, start + 1, ... as 64-bit integers."""
        ...

    def doubles(self, part: Buffer, dtype: str) -> Buffer:
        """Elements of a dtype as float64."""
        ...

    def combine(self, reduction: str) -> Combine | None:
        """In place; None where there is none of that name."""
        ...

    def product(self, side: int, dtype: str) -> Callable[[], object]:
        """A product of two square matrices, always the same."""
        ...

    def finish(self) -> None:
        """Return when all that was begun has ended."""
        ...


def too_large(elements: int, dtype: str, device: str) -> ConfigError:
    """What is said of a buffer for which there is no memory."""
    return ConfigError(
        "--sizes", f"{elements} x {dtype}", f"{device} has no memory for such a buffer", "use smaller ones"
    )
