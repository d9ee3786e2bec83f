"""Randomness as pure functions: initial values and dropout masks that no layout, restart or recompute changes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from hpctrain.layout.parameters import ParameterSpec
from hpctrain.layout.placement import Box, Index

BLOCK = 1 << 16
"""Initial values are drawn in blocks of whole rows of about this many elements, each from a stream of its own,
so that a rank draws only the rows it needs."""


def stream_key(*parts: int | str) -> int:
    """A 63-bit key for a random stream, from whatever names it."""
    text = "\0".join(str(p) for p in parts).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def initial_values(spec: ParameterSpec, seed: int, box: Box) -> Tensor:
    """The initial values of one box of a parameter: float32, the same whichever rank asks."""
    if spec.init.norms_of is not None:
        return row_norms(initial_reader(spec.init.norms_of, seed), spec.init.norms_of.shape[-1], box)
    if spec.init.std == 0.0:
        return torch.full(box.shape, spec.init.constant)
    row_shape = spec.shape[1:]
    rows = max(1, BLOCK // int(np.prod(row_shape, dtype=np.int64)))
    columns = tuple(slice(s, s + n) for s, n in zip(box.start[1:], box.shape[1:]))
    out = np.empty(box.shape, np.float32)
    first, end = box.start[0], box.start[0] + box.shape[0]
    for block in range(first // rows, -(-end // rows)):
        at = block * rows
        height = min(rows, spec.shape[0] - at)
        generator = np.random.Generator(np.random.Philox(stream_key(seed, spec.name, block)))
        values = generator.standard_normal((height, *row_shape), dtype=np.float32)
        lo, hi = max(first, at), min(end, at + height)
        window = (slice(lo - at, hi - at), *columns)
        out[lo - first : hi - first] = values[window]
    return torch.from_numpy(out).mul_(spec.init.std)


def initial_reader(spec: ParameterSpec, seed: int) -> Callable[[Index, Index], Tensor]:
    """The initial values of a parameter, by where a box of them starts and its shape."""
    return lambda start, shape: initial_values(spec, seed, Box(start, (0,) * len(start), shape))


def row_norms(read: Callable[[Index, Index], Tensor], width: int, box: Box) -> Tensor:
    """Norms of some rows of a matrix, float32; each is that of its row alone, whoever asks.

    Args:
        read: values of a box of the matrix, by start and shape.
        width: of a row.
        box: of the rows, [rows].
    """
    (first,), (rows,), step = box.start, box.shape, max(1, BLOCK // width)
    out = np.empty(rows, np.float32)
    for row in range(0, rows, step):
        n = min(step, rows - row)
        values = read((first + row, 0), (n, width)).numpy().astype(np.float64)
        out[row : row + n] = np.sqrt(np.square(values).sum(-1))
    return torch.from_numpy(out)


class Dropout(nn.Module):
    """Dropout of `[batch, seq, hidden]` whose mask depends only on (seed, sample, site).

    Ranks that hold the same activations drop the same elements, samples never share a mask, and a recomputed
    forward drops what the first one did, without any generator state.

    Args:
        p: probability of dropping.
        seed: of the run.
        site: name of the place in the model.
    """

    def __init__(self, p: float, seed: int, site: str) -> None:
        super().__init__()
        self.p, self.seed, self.site = p, seed, site

    def forward(self, x: Tensor, samples: Sequence[int]) -> Tensor:
        if not self.training or self.p == 0.0:
            return x
        return x * (self.mask(samples, x.shape[1:], x.device) / (1.0 - self.p)).to(x.dtype)

    def mask(self, samples: Sequence[int], shape: torch.Size, device: torch.device) -> Tensor:
        """1 where an element is kept, [batch, *shape] float32."""
        out = torch.empty((len(samples), *shape), device=device)
        generator = torch.Generator(device)
        for row, sample in zip(out, samples):
            generator.manual_seed(stream_key(self.seed, self.site, sample))
            row.bernoulli_(1.0 - self.p, generator=generator)
        return out
