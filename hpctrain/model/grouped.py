"""Products of groups of rows with a matrix each: by one kernel where torch has it on the device, else one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

ALIGNED = 8
"""Rows that the kernel wants groups to be a multiple of: 16 bytes of bf16, in the products of their gradients."""


GroupedLinear = Callable[[Tensor, Tensor], Tensor]
"""Rows [rows, in] in groups, and a matrix of each group, [groups, out, in], to [rows, out]."""


def has_kernel(x: Tensor, shape: Sequence[int]) -> bool:
    """Whether torch multiplies groups of `x` with matrices, of `shape` [groups, out, in], in one kernel, which takes
    bf16 on a GPU and rows of whole 16 bytes."""
    return x.is_cuda and x.dtype == torch.bfloat16 and not any(size % ALIGNED for size in shape[1:])


def grouped_linear(x: Tensor, weight: Tensor, sizes: list[int]) -> Tensor:
    """Consecutive groups of rows, each times its own matrix, one by one.

    Args:
        x: [rows, in].
        weight: [groups, out, in].
        sizes: rows of each group; their sum is `rows`.

    Returns:
        [rows, out].
    """
    out: Tensor = _GroupedLinear.apply(x, weight, sizes)  # type: ignore[no-untyped-call]
    return out


def kernel_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """The same by the kernel: `ends` [groups] int32 are the rows at which groups end, the last one's all of them, as
    `room_for` makes them."""
    out: Tensor = F.grouped_mm(x, weight.transpose(1, 2), offs=ends)
    return out


def room_for(counts: Tensor, rows: int) -> tuple[Tensor, int]:
    """Room for groups of `counts` [groups] rows, `rows` in all, whatever they are, that the kernel takes.

    Returns:
        [groups] rows of each, and their sum, which does not depend on the counts.
    """
    total = (rows // ALIGNED + 1 + len(counts)) * ALIGNED
    room = (counts + ALIGNED - 1) // ALIGNED * ALIGNED
    return torch.cat([room[:-1], total - room[:-1].sum(0, keepdim=True)]), total


def slots_of(counts: Tensor, room: Tensor, rows: int) -> Tensor:
    """Where the rows of groups lie when each group has room for more, [rows] int64.

    Args:
        counts: [groups] rows of each.
        room: [groups] rows that there is room for.
        rows: the sum of the counts, for which the device need not be waited for.
    """
    gaps = (room.cumsum(0) - room) - (counts.cumsum(0) - counts)
    return torch.arange(rows, device=counts.device) + gaps.repeat_interleave(counts, output_size=rows)


class _GroupedLinear(torch.autograd.Function):
    """See `grouped_linear`. A matrix at a time, without a gradient of all matrices for each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, sizes: list[int]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sizes = sizes
        out = x.new_empty(len(x), weight.shape[1])
        for into, rows, matrix in zip(torch.split(out, sizes), torch.split(x, sizes), weight):
            torch.mm(rows, matrix.t(), out=into)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x, weight), sizes, (grad,) = ctx.saved_tensors, ctx.sizes, grads
        grad_x = torch.empty_like(x)
        grad_weight = torch.empty_like(weight if ctx.needs_input_grad[1] else weight[:, :0])
        rows = zip(*(torch.split(t, sizes) for t in (grad, x, grad_x)))
        for (of_out, of_x, into_x), matrix, into_matrix in zip(rows, weight, grad_weight):
            if ctx.needs_input_grad[0]:
                torch.mm(of_out, matrix, out=into_x)
            if ctx.needs_input_grad[1]:
                torch.mm(of_out.t(), of_x, out=into_matrix)
        return tuple(g if needed else None for g, needed in zip((grad_x, grad_weight, None), ctx.needs_input_grad))
