"""Tensor-parallel layers (Shoeybi et al., arXiv 1909.08053). Activations between them are replicated over tp.

Each takes over the parameters of the plain module it replaces, already cut to this rank's box.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hpctrain.model.transformer import Embedding, FanOut, Head, present
from hpctrain.parallel.autograd import reduce_from
from hpctrain.parallel.comm import Axis, Pending, all_reduce_, start_all_reduce_
from hpctrain.parallel.deferred import Deferred, Later


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _sum_wide(grad: Tensor | None, axis: Axis) -> Tensor | None:
    """Sum a weight's gradient over the ranks that share the weight, in float32 or wider."""
    if grad is None or axis.size == 1:
        return grad
    wide = torch.promote_types(grad.dtype, torch.float32)
    return all_reduce_(grad.to(wide, copy=True), axis).to(grad.dtype)


class _ColumnLinear(torch.autograd.Function):
    """Linears of one replicated input whose outputs are sharded.

    Backward sums the input's gradient over tp once for all of them, while the weights' gradients are computed.
    Weights held by several ranks (key/value heads fewer than tp) get the sum over those.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, axis: Axis, replicas: tuple[Axis, ...], overlap: bool, later: Later, *params: Any
    ) -> Any:
        weights, biases = params[: len(replicas)], params[len(replicas) :]
        ctx.axis, ctx.replicas, ctx.overlap, ctx.later = axis, replicas, overlap, later
        ctx.save_for_backward(x, *weights)
        return tuple(F.linear(x, w, b) for w, b in zip(weights, biases))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, *weights = ctx.saved_tensors
        pending: Pending | None = None
        if ctx.needs_input_grad[0]:
            grad_x = grads[0] @ weights[0]
            for g, w in zip(grads[1:], weights[1:]):
                grad_x += g @ w
            pending = start_all_reduce_(grad_x, ctx.axis)
            if not ctx.overlap:
                pending.wait()
        replicas, need_weight, need_bias = (
            ctx.replicas,
            ctx.later.needs[: len(weights)],
            ctx.later.needs[len(weights) :],
        )

        def of_weights() -> list[Tensor | None]:
            rows = _rows(x)
            grad_w = [_rows(g).T @ rows if need else None for g, need in zip(grads, need_weight)]
            grad_b = [_rows(g).sum(0) if need else None for g, need in zip(grads, need_bias)]
            return [_sum_wide(g, axis) for g, axis in zip((*grad_w, *grad_b), (*replicas, *replicas))]

        shared = ctx.later.gradients(of_weights)
        return (pending.wait() if pending else None, None, None, None, None, *shared)


class _RowLinear(torch.autograd.Function):
    """A linear whose input is sharded and whose output is summed to be replicated. Backward sends nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, later: Later, weight: Tensor, *_: Tensor) -> Tensor:
        ctx.later = later
        ctx.save_for_backward(x, weight)
        return all_reduce_(F.linear(x, weight), axis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        grad_x = grads[0] @ weight if ctx.needs_input_grad[0] else None
        needs = ctx.later.needs

        def of_weights() -> list[Tensor | None]:
            return [_rows(grads[0]).T @ _rows(x) if needs[0] else None]

        return grad_x, None, None, *ctx.later.gradients(of_weights)


def column_linear(
    x: Tensor,
    axis: Axis,
    replicas: tuple[Axis, ...],
    overlap: bool,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    deferred: Deferred | None = None,
) -> tuple[Tensor, ...]:
    """in: replicated over tp; out: sharded on the last dim, one tensor a weight."""
    later = Later((*weights, *biases), deferred)
    return _ColumnLinear.apply(x, axis, replicas, overlap, later, *later.inputs)  # type: ignore[no-any-return, no-untyped-call]


def row_linear(x: Tensor, weight: Tensor, axis: Axis, deferred: Deferred | None = None) -> Tensor:
    """in: sharded on the last dim; out: replicated over tp."""
    later = Later([weight], deferred)
    return _RowLinear.apply(x, axis, later, *later.inputs)  # type: ignore[no-any-return, no-untyped-call]


class ColumnFanOut(FanOut):
    """`FanOut` with the output features of each linear sharded over tp.

    Args:
        fan: the linears, cut.
        axis: tp.
        replicas: for each linear the ranks that hold the same features.
        overlap: reduce the input's gradient beside the weights' gradients.
    """

    def __init__(self, fan: FanOut, axis: Axis, replicas: tuple[Axis, ...], overlap: bool) -> None:
        super().__init__(dict(fan.items()))
        self.axis, self.replicas, self.overlap = axis, replicas, overlap
        self.deferred: Deferred | None = None

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        linears = [linear for linear in self.values() if isinstance(linear, nn.Linear)]
        weights, biases = [linear.weight for linear in linears], [linear.bias for linear in linears]
        return column_linear(x, self.axis, self.replicas, self.overlap, weights, biases, self.deferred)


class RowLinear(nn.Module):
    """`nn.Linear` with the input features sharded over tp; its bias is added once, after the sum."""

    def __init__(self, linear: nn.Linear, axis: Axis) -> None:
        super().__init__()
        self.weight, self.bias, self.axis = linear.weight, linear.bias, axis
        self.deferred: Deferred | None = None

    def forward(self, x: Tensor) -> Tensor:
        out = row_linear(x, self.weight, self.axis, self.deferred)
        return out if self.bias is None else out + self.bias


class VocabParallelEmbedding(Embedding):
    """`Embedding` with the vocabulary sharded over tp, unevenly where it does not divide.

    Args:
        embedding: the module replaced, cut.
        start: first token id of this rank.
        axis: tp.
    """

    def __init__(self, embedding: Embedding, start: int, axis: Axis) -> None:
        nn.Module.__init__(self)
        self.weight, self.start, self.axis = embedding.weight, start, axis

    def forward(self, tokens: Tensor) -> Tensor:
        local = tokens - self.start
        elsewhere = (local < 0) | (local >= self.weight.shape[0])
        found = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return reduce_from(found.masked_fill(elsewhere[..., None], 0.0), self.axis)


class ColumnHead(Head):
    """`Head` whose logits are sharded over the vocabulary."""

    def __init__(self, head: Head, axis: Axis, alone: Axis, overlap: bool) -> None:
        nn.Module.__init__(self)
        self.register_parameter("weight", head.weight)
        self.axis, self.alone, self.overlap = axis, alone, overlap
        self.deferred: Deferred | None = None

    def forward(self, x: Tensor, tied: Tensor | None) -> Tensor:
        weight = present(self.weight, tied)
        return column_linear(x, self.axis, (self.alone,), self.overlap, [weight], [None], self.deferred)[0]
