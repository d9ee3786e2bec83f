"""How long a matrix product takes on a device, by its shape. All arguments may be numpy arrays.

A product of `[m, k]` and `[k, n]` is cut into tiles; each of the device's units computes one tile at a time. So it
takes whole waves of tiles, and the last wave is as long as a full one. A tile of a x b elements reads (a + b) k and
multiplies a b k: small tiles fill the device better and compute slower. The library is taken to choose the best tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Array = Any
"""A number, or a numpy array of numbers."""

TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 64))
"""Rows and columns of the tiles that libraries have: cuBLAS, as named in NVIDIA's guide "Matrix Multiplication
Background"."""

FEED = 57.0
"""A tile of a x b takes 1 + FEED (1/a + 1/b) of the time its multiplications would: a tile of 64 x 64 then reaches
60% of one of 256 x 128, as in the figure of efficiency by tile in the same guide."""

FILL = 200.0
"""Steps of k that a tile's first loads and last stores take. Writing 128 x 256 half-precision results takes an SM of an
A100 4.6 us of its share of memory bandwidth, in which it could do 200 steps of k."""

NORM = 1 + FEED * (1 / 256 + 1 / 128)


@dataclass(frozen=True)
class Device:
    """What products and passes over memory go at.

    Attributes:
        rate: FLOP/s of products that fill the device for ever.
        sms: tiles at a time.
        bandwidth: bytes/s of memory that streaming reaches.
        gap: seconds from one kernel to the next.
    """

    rate: float
    sms: float
    bandwidth: float
    gap: float


def gemm(
    device: Device, m: Array, n: Array, k: Array, batch: Array = 1.0, width: float = 2.0, out: float = 2.0
) -> Array:
    """Seconds of `batch` products.

    Args:
        width: bytes of an element of the inputs.
        out: bytes that an element of the result moves: 8 where it is added to a float32 sum.
    """
    best: Array = np.inf
    steps = 2.0 * (k + FILL) / (device.rate / device.sms * NORM)
    for a, b in TILES:
        waves = np.ceil(np.ceil(m / a) * np.ceil(n / b) * batch / device.sms)
        best = np.minimum(best, waves * (a * b * (1 + FEED * (1 / a + 1 / b))) * steps)
    moved = batch * (width * (m * k + k * n) + out * m * n) / device.bandwidth
    return np.maximum(best, moved) + device.gap


def streamed(device: Device, size: Array, kernels: Array = 1.0) -> Array:
    """Seconds of passes over memory, of `size` bytes in all."""
    return size / device.bandwidth + kernels * device.gap
