"""Weights in 4 bits: NormalFloat with double quantization (Dettmers et al., QLoRA, arXiv 2305.14314 section 3).

A block of consecutive elements of a row is divided by its largest magnitude, and each element becomes the nearest of 16
numbers that are quantiles of a normal distribution. The magnitudes themselves become 8 bits each, in blocks of 256,
once their mean is taken off. Bits are those of bitsandbytes: element 2i of a row is in the upper half of byte i.

What a matrix becomes is a function of that matrix alone. A rank that holds a part of it holds these bits of the whole;
so blocks lie within its part, and the few numbers that all magnitudes share are known to every rank.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from itertools import pairwise
from statistics import NormalDist
from typing import NamedTuple

import torch
from torch import Tensor

OUTERMOST = 0.9677083
"""Probability up to which the quantiles go, (1 - 1/32 + 1 - 1/30) / 2 as in appendix E of the paper, as it is rounded
where its values were published."""

SCALES = 256
"""Magnitudes of blocks that share a magnitude of their own."""

ROOM = 1 << 22
"""Elements that are worked on at a time, so that what is needed on the way stays small."""

KERNELS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Blocks that bitsandbytes' kernels know."""


@cache
def normal_float() -> Tensor:
    """The 16 numbers, ascending, [16] float32: quantiles of the normal distribution, evenly spaced in probability, 8 up
    to zero and 8 from there on, over the largest. In float32 throughout, as those published were made."""

    def steps(number: int) -> list[float]:
        """Quantiles from the outermost probability towards one half, which is left out."""
        return [NormalDist().inv_cdf(p) for p in torch.linspace(OUTERMOST, 0.5, number + 1)[:-1].tolist()]

    values = torch.tensor(sorted([*(-q for q in steps(7)), 0.0, *steps(8)]))
    return values / values[-1]


@cache
def dynamic_float() -> Tensor:
    """The numbers of an 8-bit float with as many bits of fraction as its exponent leaves, ascending, [256] float32:
    seven decades, the upper ones in finer steps (Dettmers, arXiv 1511.04561; Dettmers et al., arXiv 2110.02861)."""
    positive = []
    for decade in range(7):
        ends = torch.linspace(0.1, 1.0, 2**decade + 1)
        positive.append((ends[:-1] + ends[1:]) / 2 * 10.0 ** (decade - 6))
    halves = torch.cat(positive)
    return torch.cat([-halves, halves, torch.tensor([0.0, 1.0])]).sort().values


def nearest(values: Tensor, book: Tensor) -> Tensor:
    """Places in an ascending book of the numbers nearest to values, uint8; of two as near, the lower."""
    middles = torch.tensor([(a + b) / 2 for a, b in pairwise(book.double().tolist())])
    return torch.bucketize(values, middles.to(values)).to(torch.uint8)


class Scales(NamedTuple):
    """The magnitudes of all blocks of a matrix in 8 bits.

    Attributes:
        codes: [blocks] uint8.
        tops: [blocks / SCALES, rounded up] float32, largest magnitude of what the codes of each stretch stand for.
        mean: what was taken off, a float32 scalar.
    """

    codes: Tensor
    tops: Tensor
    mean: Tensor


def double_quantize(magnitudes: Tensor, mean: Tensor | None = None) -> Scales:
    """The second quantization, of [blocks] float32 on the host.

    Args:
        magnitudes: of blocks.
        mean: to take off; the magnitudes' own, summed in float64 so that it does not depend on who sums.
    """
    mean = magnitudes.double().mean().float() if mean is None else mean
    rest = magnitudes - mean
    padded = torch.nn.functional.pad(rest, (0, -len(rest) % SCALES)).view(-1, SCALES)
    tops = padded.abs().amax(1)
    codes = nearest(_over(padded, tops[:, None]), dynamic_float())
    return Scales(codes.flatten()[: len(rest)], tops, mean)


def quantize(values: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """The first quantization, of whole blocks in rows.

    Args:
        values: [rows, n] float32.
        block: divides n.

    Returns:
        [rows, n / 2] uint8, two elements a byte; [rows, n / block] float32, largest magnitude of each block.
    """
    blocks = torch.unflatten(values, -1, (-1, block))
    magnitudes = blocks.abs().amax(-1)
    codes = nearest(_over(blocks, magnitudes[..., None]), normal_float().to(values.device)).flatten(-2)
    return codes[..., ::2] << 4 | codes[..., 1::2], magnitudes


def dequantize(codes: Tensor, magnitudes: Tensor, dtype: torch.dtype) -> Tensor:
    """What codes stand for, [rows, n] in a dtype; rounded once from float32. On a GPU by a kernel of bitsandbytes where
    that is installed.

    Args:
        codes: [rows, n / 2] uint8.
        magnitudes: [rows, n / block] float32.
    """
    rows, half = codes.shape
    if codes.is_cuda and dtype != torch.float64 and 2 * half // magnitudes.shape[1] in KERNELS and has_kernels():
        return by_kernel(codes, magnitudes, dtype)
    pairs = _pairs().to(codes.device)
    out = torch.empty(rows, 2 * half, dtype=dtype, device=codes.device)
    step = max(1, ROOM // (2 * half))
    for into, some, of_blocks in zip(*(torch.split(t, step) for t in (out, codes, magnitudes))):
        values = torch.nn.functional.embedding(some.int(), pairs).flatten(-2)
        into.copy_((torch.unflatten(values, -1, (magnitudes.shape[1], -1)) * of_blocks[..., None]).flatten(-2))
    return out


@cache
def has_kernels() -> bool:
    """Whether bitsandbytes is here and can be used."""
    if importlib.util.find_spec("bitsandbytes") is None:
        return False
    try:
        importlib.import_module("bitsandbytes")
    except (ImportError, OSError, RuntimeError):  # built for another CUDA, or for none
        return False
    return True


def by_kernel(codes: Tensor, magnitudes: Tensor, dtype: torch.dtype) -> Tensor:
    """`dequantize` by bitsandbytes."""
    shape = [len(codes), 2 * codes.shape[1]]
    block = shape[1] // magnitudes.shape[1]
    out: Tensor = torch.ops.bitsandbytes.dequantize_4bit(
        codes.reshape(-1, 1), magnitudes.flatten(), block, "nf4", shape, dtype
    )
    return out


def magnitudes_of(scales: Scales, places: Tensor) -> Tensor:
    """Magnitudes of some blocks of a matrix, float32.

    Args:
        scales: of the matrix, their codes those of these blocks alone.
        places: which blocks of the matrix they are, int64, of the codes' shape.
    """
    values = dynamic_float().to(scales.codes.device)[scales.codes.int()]
    return values * scales.tops[places // SCALES] + scales.mean


@cache
def _pairs() -> Tensor:
    """What both halves of a byte stand for, [256, 2] float32."""
    byte = torch.arange(256)
    return normal_float()[torch.stack([byte >> 4, byte & 15], 1)]


def _over(values: Tensor, magnitudes: Tensor) -> Tensor:
    """Values over the largest magnitude among them, which may be zero."""
    return values * (1.0 / magnitudes).nan_to_num(0.0, 0.0, 0.0)
