"""Collectives that autograd understands. The group is always an argument; inputs and gradients are never changed.

Words: a tensor is *replicated* over an axis (equal on its ranks), *partial* (its sum over the ranks is meant),
or *sharded* (each rank has one of equal parts along a dim, or its own number of rows). Each function's backward is the
adjoint of its forward, with the gradient of a replicated tensor replicated and counted once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

Move = Callable[[Tensor], Tensor]
Sizes = Sequence[int]
"""Rows of each rank of an axis."""


class _Pair(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Move, back: Move) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.back(grads[0]), None, None


def _pair(x: Tensor, axis: Axis, there: Move, back: Move) -> Tensor:
    """`there` of x, and `back`, its adjoint, of the gradient; x itself on one rank."""
    return x if axis.size == 1 else _Pair.apply(x, there, back)  # type: ignore[no-any-return, no-untyped-call]


def reduce_from(x: Tensor, axis: Axis) -> Tensor:
    """in: partial, out: replicated, summed; backward: replicated, unchanged."""
    return _pair(x, axis, lambda t: all_reduce_(t.contiguous().clone(), axis), lambda g: g)


def reduce_scatter_from(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """in: partial, out: sharded along `dim`, summed; backward: sharded in, gathered to replicated."""

    def there(t: Tensor) -> Tensor:
        parts = t.chunk(axis.size, dim)
        return start_reduce_scatter(lambda i: parts[i].contiguous(), axis).wait()

    return _pair(x, axis, there, lambda g: torch.cat(all_gather(g, axis), dim))


def own_part(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """in: replicated, out: sharded along `dim`; backward: sharded in, gathered to replicated."""
    return _pair(
        x, axis, lambda t: t.chunk(axis.size, dim)[axis.index].clone(), lambda g: torch.cat(all_gather(g, axis), dim)
    )


def reshard(x: Tensor, axis: Axis, split: int, join: int) -> Tensor:
    """in: sharded along dim `join`, out: sharded along dim `split`, by an all-to-all; backward: the other way round.

    The axis divides `split`.
    """
    return _pair(x, axis, lambda t: _trade_parts(t, axis, split, join), lambda g: _trade_parts(g, axis, join, split))


def _trade_parts(x: Tensor, axis: Axis, split: int, join: int) -> Tensor:
    parts = start_all_to_all(torch.stack(x.chunk(axis.size, split)), axis).wait()
    return torch.cat(parts.unbind(), join)


def exchange_rows(x: Tensor, sends: Sizes, receives: Sizes, axis: Axis) -> Tensor:
    """in: rows for every rank, out: rows from every rank, as `start_exchange_rows`; backward: the way back."""
    return _pair(
        x,
        axis,
        lambda t: start_exchange_rows(t, sends, receives, axis).wait(),
        lambda g: start_exchange_rows(g, receives, sends, axis).wait(),
    )


def gather_rows(x: Tensor, sizes: Sizes, axis: Axis) -> Tensor:
    """in: sharded rows, out: replicated, of which each rank uses a part; backward: partial in, summed to own rows."""
    return _pair(x, axis, lambda t: _gathered(t, sizes, axis), lambda g: start_scatter_rows(g, sizes, axis).wait())


def scatter_rows(x: Tensor, sizes: Sizes, axis: Axis) -> Tensor:
    """in: partial, out: sharded rows, summed; backward: sharded in, gathered to replicated."""
    return _pair(x, axis, lambda t: start_scatter_rows(t, sizes, axis).wait(), lambda g: _gathered(g, sizes, axis))


def own_rows(x: Tensor, sizes: Sizes, axis: Axis) -> Tensor:
    """in: replicated, out: sharded rows; backward: sharded in, gathered to replicated."""
    return _pair(x, axis, lambda t: _own(t, sizes, axis), lambda g: _gathered(g, sizes, axis))


def all_rows(x: Tensor, sizes: Sizes, axis: Axis) -> Tensor:
    """in: sharded rows, out: replicated; backward: replicated in, own rows out."""
    return _pair(x, axis, lambda t: _gathered(t, sizes, axis), lambda g: _own(g, sizes, axis))


def _gathered(x: Tensor, sizes: Sizes, axis: Axis) -> Tensor:
    return start_gather_rows(x, sizes, axis).wait()


def _own(x: Tensor, sizes: Sizes, axis: Axis) -> Tensor:
    return torch.split(x, list(sizes))[axis.index].clone()


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


def sum_gradients(grads: Sequence[Tensor], axis: Axis) -> list[Tensor]:
    """Partial gradients summed over an axis in one collective, in float32 or wider; in their own dtypes."""
    wide = torch.promote_types(grads[0].dtype, torch.float32)
    total = all_reduce_(torch.cat([g.reshape(-1).to(wide) for g in grads]), axis)
    parts = torch.split(total, [g.numel() for g in grads])
    return [part.view(g.shape).to(g.dtype) for part, g in zip(parts, grads)]
