"""In which order samples are read: a pure function of (seed, epoch, index), in O(1) memory.

The stream of a run has one coordinate, the global sample count. Count `s` of a corpus with `n` windows is
index `s % n` of epoch `s // n`, and each epoch is a permutation of the windows of its own. Nothing is stored,
so nothing has to be saved: a resumed run, under any number of ranks, continues at its count.

The permutation is a Feistel network on pairs (a, b), a < left, b < right, left x right >= n: each round adds a
keyed hash of one half to the other, modulo its size. `left x right` exceeds n by less than `left`, about its
root; an index that lands in that excess goes through the network again until it does not (cycle walking),
which keeps the map a bijection.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
from numpy.typing import NDArray

ROUNDS = 8
"""Four for each half."""


def shuffled(samples: NDArray[np.int64], n: int, seed: int) -> NDArray[np.int64]:
    """Which windows a run reads.

    Args:
        samples: global sample counts, any shape, not negative.
        n: windows in an epoch, at least 1.
        seed: of the run.

    Returns:
        indices of windows in [0, n), in the shape of `samples`.
    """
    assert n > 0
    epochs, index = np.divmod(samples, n)
    out = np.empty_like(samples)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        out[here] = permuted(index[here], n, seed, int(epoch))
    return out


def permuted(index: NDArray[np.int64], n: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Images of `index` under the permutation of [0, n) that belongs to (seed, epoch). One-dimensional."""
    left = math.isqrt(n - 1) + 1
    right = -(-n // left)
    keys = np.frombuffer(hashlib.blake2b(f"order {seed} {epoch}".encode(), digest_size=8 * ROUNDS).digest(), "<u8")
    out = _network(index.astype(np.uint64), left, right, keys)
    while (outside := out >= n).any():
        out[outside] = _network(out[outside], left, right, keys)
    return out.astype(np.int64)


def _network(x: NDArray[np.uint64], left: int, right: int, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A bijection of [0, left x right)."""
    a, b = np.divmod(x, np.uint64(right))
    for i in range(0, ROUNDS, 2):
        a = (a + _hash(b, keys[i])) % np.uint64(left)
        b = (b + _hash(a, keys[i + 1])) % np.uint64(right)
    out: NDArray[np.uint64] = a * np.uint64(right) + b
    return out


def _hash(x: NDArray[np.uint64], key: np.uint64) -> NDArray[np.uint64]:
    """32 well mixed bits of each element under a key (the finalizer of splitmix64)."""
    x = x + key
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x >>= np.uint64(32)
    return x
