"""Collectives that autograd understands. The group is always an argument; inputs and gradients are never changed.

Words: a tensor is *replicated* over an axis (equal on its ranks), *partial* (its sum over the ranks is meant),
or *sharded* (each rank has one of equal parts along a dim, or its own number of rows). Each function's backward is the
adjoint of its forward, with the gradient of a replicated tensor replicated and counted once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hpctrain.parallel.comm import (
    Axis,
    all_gather,
    all_reduce_,
    start_all_to_all,
    start_exchange_rows,
    start_gather_rows,
    start_reduce_scatter,
    start_scatter_rows,
)


class _ReduceFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        return all_reduce_(x.contiguous().clone(), axis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None


def reduce_from(x: Tensor, axis: Axis) -> Tensor:
    """in: partial, out: replicated, summed; backward: replicated, unchanged."""
    return x if axis.size == 1 else _ReduceFrom.apply(x, axis)  # type: ignore[no-any-return, no-untyped-call]


class _ReduceScatterFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        parts = x.chunk(axis.size, dim)
        return start_reduce_scatter(lambda i: parts[i].contiguous(), axis).wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return torch.cat(all_gather(grads[0], ctx.axis), ctx.dim), None, None


def reduce_scatter_from(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """in: partial, out: sharded along `dim`, summed; backward: sharded in, gathered to replicated."""
    return x if axis.size == 1 else _ReduceScatterFrom.apply(x, axis, dim)  # type: ignore[no-any-return, no-untyped-call]


class _OwnPart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return x.chunk(axis.size, dim)[axis.index].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return torch.cat(all_gather(grads[0], ctx.axis), ctx.dim), None, None


def own_part(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """in: replicated, out: sharded along `dim`; backward: sharded in, gathered to replicated."""
    return x if axis.size == 1 else _OwnPart.apply(x, axis, dim)  # type: ignore[no-any-return, no-untyped-call]


class _Reshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, split: int, join: int) -> Tensor:
        ctx.axis, ctx.split, ctx.join = axis, split, join
        return _trade_parts(x, axis, split, join)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _trade_parts(grads[0], ctx.axis, ctx.join, ctx.split), None, None, None


def _trade_parts(x: Tensor, axis: Axis, split: int, join: int) -> Tensor:
    parts = start_all_to_all(torch.stack(x.chunk(axis.size, split)), axis).wait()
    return torch.cat(parts.unbind(), join)


def reshard(x: Tensor, axis: Axis, split: int, join: int) -> Tensor:
    """in: sharded along dim `join`, out: sharded along dim `split`, by an all-to-all; backward: the other way round.

    The axis divides `split`.
    """
    return x if axis.size == 1 else _Reshard.apply(x, axis, split, join)  # type: ignore[no-any-return, no-untyped-call]


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, axis: Axis, *tensors: Tensor) -> Any:
        ctx.axis = axis
        return tuple(t.view_as(t) for t in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, *sum_gradients(grads, ctx.axis)


def shared(axis: Axis, *tensors: Tensor) -> tuple[Tensor, ...]:
    """in: replicated, out: the same, of which each rank uses a part or for a part of the data;
    backward: partial in, summed to replicated, all tensors in one collective."""
    return tensors if axis.size == 1 else _Shared.apply(axis, *tensors)  # type: ignore[no-any-return, no-untyped-call]


Sizes = Sequence[int]
"""Rows of each rank of an axis."""


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sends: Sizes, receives: Sizes, axis: Axis) -> Tensor:
        ctx.sends, ctx.receives, ctx.axis = sends, receives, axis
        return start_exchange_rows(x, sends, receives, axis).wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return start_exchange_rows(grads[0], ctx.receives, ctx.sends, ctx.axis).wait(), None, None, None


def exchange_rows(x: Tensor, sends: Sizes, receives: Sizes, axis: Axis) -> Tensor:
    """in: rows for every rank, out: rows from every rank, as `start_exchange_rows`; backward: the way back."""
    return x if axis.size == 1 else _ExchangeRows.apply(x, sends, receives, axis)  # type: ignore[no-any-return, no-untyped-call]


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: Sizes, axis: Axis) -> Tensor:
        ctx.sizes, ctx.axis = sizes, axis
        return start_gather_rows(x, sizes, axis).wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return start_scatter_rows(grads[0], ctx.sizes, ctx.axis).wait(), None, None


def gather_rows(x: Tensor, sizes: Sizes, axis: Axis) -> Tensor:
    """in: sharded rows, out: replicated, of which each rank uses a part; backward: partial in, summed to own rows."""
    return x if axis.size == 1 else _GatherRows.apply(x, sizes, axis)  # type: ignore[no-any-return, no-untyped-call]


class _ScatterRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: Sizes, axis: Axis) -> Tensor:
        ctx.sizes, ctx.axis = sizes, axis
        return start_scatter_rows(x, sizes, axis).wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return start_gather_rows(grads[0], ctx.sizes, ctx.axis).wait(), None, None


def scatter_rows(x: Tensor, sizes: Sizes, axis: Axis) -> Tensor:
    """in: partial, out: sharded rows, summed; backward: sharded in, gathered to replicated."""
    return x if axis.size == 1 else _ScatterRows.apply(x, sizes, axis)  # type: ignore[no-any-return, no-untyped-call]


class _OwnRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: Sizes, axis: Axis) -> Tensor:
        ctx.sizes, ctx.axis = sizes, axis
        return torch.split(x, list(sizes))[axis.index].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return start_gather_rows(grads[0], ctx.sizes, ctx.axis).wait(), None, None


def own_rows(x: Tensor, sizes: Sizes, axis: Axis) -> Tensor:
    """in: replicated, out: sharded rows; backward: sharded in, gathered to replicated."""
    return x if axis.size == 1 else _OwnRows.apply(x, sizes, axis)  # type: ignore[no-any-return, no-untyped-call]


class _AllRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: Sizes, axis: Axis) -> Tensor:
        ctx.sizes, ctx.axis = sizes, axis
        return start_gather_rows(x, sizes, axis).wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return torch.split(grads[0], list(ctx.sizes))[ctx.axis.index].clone(), None, None


def all_rows(x: Tensor, sizes: Sizes, axis: Axis) -> Tensor:
    """in: sharded rows, out: replicated; backward: replicated in, own rows out."""
    return x if axis.size == 1 else _AllRows.apply(x, sizes, axis)  # type: ignore[no-any-return, no-untyped-call]


def sum_gradients(grads: Sequence[Tensor], axis: Axis) -> list[Tensor]:
    """Partial gradients summed over an axis in one collective, in float32 or wider; in their own dtypes."""
    wide = torch.promote_types(grads[0].dtype, torch.float32)
    total = all_reduce_(torch.cat([g.reshape(-1).to(wide) for g in grads]), axis)
    parts = torch.split(total, [g.numel() for g in grads])
    return [part.view(g.shape).to(g.dtype) for part, g in zip(parts, grads)]
