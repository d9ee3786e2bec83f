"""The 4-bit format: the published numbers, bitsandbytes' bits, and parts of a matrix that are those of the whole."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from hpctrain.layout.placement import Box
from hpctrain.model import nf4
from hpctrain.model.packed import Packed, product

CPU = torch.device("cpu")

PUBLISHED = [
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634),
    *(0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
]
"""Appendix E of arXiv 2305.14314."""

# What bitsandbytes 0.50.2 makes of `matrix()` on a CPU: SHA-256 of its codes, of what they stand for in float32, and of
# that of the same matrix in bfloat16; the codes of the scales; their tops and mean. Where two of the 256 numbers are
# almost as near, to 1%, its library takes the farther for one scale in some hundreds: this matrix has none of those.
CODES = "f03a21aa7ba85b2da0c339e21ba10d3562f25fe31e0763d68f8ffeb19afe25fc"
FIRST = "168d3a81b71d0e7dbd29c64e17afd996786d77daa770e5747abd732a76777678"
FLOAT32 = "d512d86a9661332fa81fdadf965511d42a8d8ff7b2479520f848e1ee4a2bc7e4"
BFLOAT16 = "688275b934883220dfb24c83eecee8edf9cbf1b1f3e90a9c25d381ca0e1b2931"
SCALES = (
    "111112101120252225243537363835ac00a43e63ce5bc8ccc9d5d6e1dfd5f0f3e4ebf3121212121123252224233437343733af83ae908ecfce"
    "cfcfcddbe1dddfdbeeedf3eff0121211121121252421213138373336acafa8ac5fcececacdcce0e1dad8e1f4edf2f3e7121211121225242423"
    "243436363838b1a45da860c5cecdc4cedcd7dde1dcf0eeedf4ee12110f121225242423253738373835a5aeaead49cacbcccbc8dcdbe0e0d9ec"
    "f0eff4ea121212121223232421223336383538a8aaaa9fa6cececacecedfdcd6ddddf1e0e9eff0121212121225242425253036373738b0525d"
    "6ea3c9c0cecbc6ddc9dddae1f5f3ecf4df121210121225232524243432332d2fa9a8aaaab3d3d0d1cfd0e6dfe4e5def7fffbfdfc0908090908"
    "1f1e1d1d1f35352f343534b04894afd1cbbfd2d2e1e7e7e2ddf7fffbfbfc0509080609"
)
DYNAMIC = "e732639a65f497b4ad684bb166a4467708255edd5207757de8b8f0c7e1fda89c"
"""Of the 256 numbers that the codes of scales stand for."""

TOPS, MEAN, MEAN_OF_BFLOAT16 = [0.4702759385108948, 0.40099185705184937], 0.4702759385108948, 0.47032469511032104


def matrix() -> torch.Tensor:
    """[64, 320] of exact numbers in rows of unequal size, with a block of zeros."""
    at = np.arange(64 * 320, dtype=np.uint64)
    mixed = (at * np.uint64(2654435761) + np.uint64(2)) % np.uint64(2**32)
    mixed = (mixed ^ (mixed >> np.uint64(15))) * np.uint64(2246822519) % np.uint64(2**32)
    values = (mixed.astype(np.float64) / 2**31 - 1) ** 3
    values = values.reshape(64, 320) * ((np.arange(64) % 7 + 1) / 8)[:, None]
    values[3, 64:128] = 0.0
    return torch.from_numpy(values.astype(np.float32))


def digest(values: torch.Tensor) -> str:
    return hashlib.sha256(values.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def filled(values: torch.Tensor, block: int, box: Box | None = None) -> Packed:
    packed = Packed(values.shape, block)
    if box is not None:
        packed.cut(box)
    packed.fill(lambda start, shape: values[tuple(slice(a, a + n) for a, n in zip(start, shape))], CPU)
    return packed


def test_the_book_is_the_published_one() -> None:
    assert nf4.normal_float().tolist() == PUBLISHED
    assert digest(nf4.dynamic_float()) == DYNAMIC and len(nf4.dynamic_float().unique()) == 256


def test_bits_are_those_of_bitsandbytes() -> None:
    codes, magnitudes = nf4.quantize(matrix(), 64)
    assert digest(codes) == CODES and codes.flatten()[:32].numpy().tobytes().hex() == FIRST
    scales = nf4.double_quantize(magnitudes.flatten(), torch.tensor(MEAN))
    assert scales.codes.numpy().tobytes().hex() == SCALES and scales.tops.tolist() == TOPS
    places = torch.arange(len(scales.codes))
    found = nf4.dequantize(codes, nf4.magnitudes_of(scales, places).view(64, 5), torch.float32)
    assert digest(found) == FLOAT32
    half, magnitudes = nf4.quantize(matrix().bfloat16().float(), 64)
    scales = nf4.double_quantize(magnitudes.flatten(), torch.tensor(MEAN_OF_BFLOAT16))
    values = nf4.dequantize(half, nf4.magnitudes_of(scales, places).view(64, 5), torch.bfloat16)
    assert digest(values) == BFLOAT16


def test_the_mean_is_summed_so_that_it_does_not_depend_on_who_sums() -> None:
    """bitsandbytes sums it in float32, which is that of its threads and vectors; ours is the nearest number."""
    magnitudes = nf4.quantize(matrix(), 64)[1].flatten()
    scales, shuffled = nf4.double_quantize(magnitudes), magnitudes[torch.randperm(len(magnitudes))]
    assert scales.mean == nf4.double_quantize(shuffled).mean and abs(scales.mean.item() - MEAN) < 1e-7


@given(st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=40))
def test_nearest_is_nearest(values: list[float]) -> None:
    book, x = nf4.dynamic_float(), torch.tensor(values)
    off = (x.double()[:, None] - book.double()).abs()
    chosen = off.gather(1, nf4.nearest(x, book).long()[:, None])[:, 0]
    assert torch.all(chosen <= off.amin(1) + 1e-9)


@pytest.mark.parametrize(("start", "shape"), [((0, 0), (32, 320)), ((40, 0), (24, 320)), ((0, 64), (64, 192))])
def test_a_part_is_that_of_the_whole(start: tuple[int, int], shape: tuple[int, int]) -> None:
    """Rows and columns as tensor parallelism cuts them; read in more than one go."""
    whole = filled(matrix(), 64).values(torch.float32)
    part = filled(matrix(), 64, Box(start, (0, 0), shape)).values(torch.float32)
    assert torch.equal(part, whole[start[0] : start[0] + shape[0], start[1] : start[1] + shape[1]])


def test_read_a_few_rows_at_a_time_it_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = filled(matrix(), 64)
    monkeypatch.setattr("hpctrain.model.packed.ROOM", 320 * 7)
    monkeypatch.setattr("hpctrain.model.nf4.ROOM", 320 * 5)
    pieces = filled(matrix(), 64)
    assert all(map(torch.equal, whole.tensors(), pieces.tensors()))
    assert torch.equal(whole.values(torch.float64), pieces.values(torch.float64))


def test_every_expert_is_a_matrix_by_itself() -> None:
    stack = torch.stack([matrix(), matrix().flip(0) * 3, matrix().flip(1)])
    packed = filled(stack, 64)
    alone = [filled(one, 64).values(torch.float32) for one in stack]
    assert torch.equal(packed.values(torch.float32), torch.stack(alone))
    some = filled(stack, 64, Box((1, 0, 64), (0, 0, 0), (2, 64, 128)))
    assert torch.equal(some.values(torch.float32), torch.stack(alone)[1:, :, 64:192])


def test_what_is_lost_and_what_it_takes() -> None:
    values = matrix()
    packed = filled(values, 64)
    found, top = packed.values(torch.float32), values.unflatten(1, (-1, 64)).abs().amax(-1)
    gap = nf4.normal_float().diff().max().item() / 2
    room = (top * (gap + 0.01) + 0.01).repeat_interleave(64, 1)  # and what eight bits of a scale lose
    assert torch.all((found - values).abs() <= room) and torch.all(found[3, 64:128] == 0)
    held = sum(t.numel() * t.element_size() for t in packed.tensors())
    assert held == values.numel() // 2 + 320 + 2 * 4 + 4
    assert 8 * held / values.numel() < 4.14


def test_a_product_keeps_no_other_copy() -> None:
    """Its gradient is that of the weight as it is computed with, and nothing of its size waits for backward."""
    packed, x = filled(matrix(), 64), torch.randn(7, 320, dtype=torch.float64, requires_grad=True)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        out = product(x, packed, F.linear)
    grad = torch.randn_like(out)
    (found,) = torch.autograd.grad(out, x, grad)
    assert torch.allclose(out, x @ packed.values(torch.float64).T) and kept == []
    assert torch.allclose(found, grad @ packed.values(torch.float64))
