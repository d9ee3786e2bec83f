"""A frozen weight in 4 bits, or a rank's box of one, and products with it that keep no other copy."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hpctrain.layout.placement import Box, Index
from hpctrain.model.nf4 import ROOM, Scales, dequantize, double_quantize, magnitudes_of, quantize

Read = Callable[[Index, Index], Tensor]
"""Values of a block of a logical tensor, by where it starts and its shape, in any dtype."""


class _Matrix(NamedTuple):
    """Of one matrix: codes [rows, n / 2], and scales of its blocks [rows, n / block]."""

    codes: Tensor
    scales: Scales


class Packed:
    """A weight [out, in], or [experts, out, in] of which every expert's is a matrix by itself.

    Args:
        shape: of the logical tensor.
        block: elements of a row with a scale of their own; divides rows, and lies within what is held of them.
    """

    requires_grad = False

    def __init__(self, shape: Sequence[int], block: int) -> None:
        self.whole, self.block = tuple(shape), block
        self.box = Box((0,) * len(shape), (0,) * len(shape), tuple(shape))
        self._matrices: list[_Matrix] = []

    @property
    def shape(self) -> Index:
        """Of what is held."""
        return self.box.shape

    def cut(self, box: Box) -> None:
        """Hold a box alone. Comes before `fill`."""
        assert not self._matrices and box.start[-1] % self.block == box.shape[-1] % self.block == 0, (box, self.block)
        self.box = box

    def fill(self, read: Read, device: torch.device) -> None:
        """Take values. All of a matrix is read, a few rows at a time: the scales are those of the whole."""
        experts = (range(start, start + n) for start, n in zip(self.box.start[:-2], self.box.shape[:-2]))
        self._matrices = [self._matrix(read, lead, device) for lead in itertools.product(*experts)]

    def values(self, dtype: torch.dtype) -> Tensor:
        """The weights that are computed with, rounded once from float32."""
        assert self._matrices, "a weight in 4 bits is filled before it is used"
        places = self._places().to(self._matrices[0].codes.device)
        parts = [dequantize(m.codes, magnitudes_of(m.scales, places), dtype) for m in self._matrices]
        return parts[0] if len(self.shape) == 2 else torch.stack(parts)

    def tensors(self) -> list[Tensor]:
        """All that is held."""
        return [t for m in self._matrices for t in (m.codes, *m.scales)]

    def _matrix(self, read: Read, lead: Index, device: torch.device) -> _Matrix:
        out, width = self.whole[-2:]
        (first, left), (rows, columns) = self.box.start[-2:], self.box.shape[-2:]
        step, codes, magnitudes = max(1, ROOM // width), [], []
        for row in range(0, out, step):
            n = min(step, out - row)
            values = read((*lead, row, 0), (*(1 for _ in lead), n, width)).reshape(n, width)
            found, of_blocks = quantize(values.float().to(device), self.block)
            magnitudes.append(of_blocks.cpu())
            mine = slice(min(max(first - row, 0), n), min(max(first + rows - row, 0), n))
            codes.append(found[mine, left // 2 : (left + columns) // 2].clone())
        scales = double_quantize(torch.cat(magnitudes).flatten())
        own = scales.codes[self._places()]
        return _Matrix(torch.cat(codes), Scales(*(t.to(device) for t in (own, scales.tops, scales.mean))))

    def _places(self) -> Tensor:
        """Which blocks of a matrix are held, [rows, n / block] int64."""
        (first, left), (rows, columns) = self.box.start[-2:], self.box.shape[-2:]
        across = torch.arange(left // self.block, (left + columns) // self.block)
        return torch.arange(first, first + rows)[:, None] * (self.whole[-1] // self.block) + across


Weight = Tensor | Packed
"""A weight as it is held."""


def values_of(weight: Weight, dtype: torch.dtype) -> Tensor:
    """What a product takes."""
    return weight.values(dtype) if isinstance(weight, Packed) else weight


def product(x: Tensor, weight: Weight, linear: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """A linear function of rows by a frozen weight in 4 bits, or by any other.

    Args:
        x: [..., in].
        weight: [..., out, in].
        linear: of rows and a weight; its adjoint is itself, of the weight transposed.
    """
    if isinstance(weight, Packed):
        out: Tensor = _Frozen.apply(x, weight, linear)  # type: ignore[no-untyped-call]
        return out
    return linear(x, weight)


class _Frozen(torch.autograd.Function):
    """Backward unpacks the weight again, so that what is unpacked does not wait for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Packed, linear: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        ctx.weight, ctx.linear = weight, linear
        return linear(x, weight.values(x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        with torch.no_grad():
            return ctx.linear(grads[0], ctx.weight.values(grads[0].dtype).mT), None, None


def packed_weights(root: nn.Module) -> dict[str, Packed]:
    """The weights in 4 bits in a module, by the name of the parameter that each stands for."""
    held = ((path, vars(module)) for path, module in root.named_modules())
    return {f"{path}.{name}": v for path, values in held for name, v in values.items() if isinstance(v, Packed)}
