"""Tensor-parallel layers (Shoeybi et al., arXiv 1909.08053).

Activations between them are replicated over tp or, with sequence parallelism (Korthikanti et al., arXiv
2205.05198), sharded over the sequence. Each layer takes over the parameters of the plain module it replaces,
already cut to this rank's box.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hpctrain.model.mlp import FanOut
from hpctrain.model.packed import Packed, Weight
from hpctrain.model.transformer import Embedding, Head, present
from hpctrain.parallel.autograd import reduce_from, reduce_scatter_from, sum_gradients
from hpctrain.parallel.comm import Axis, Pending, start_all_gather, start_all_reduce_, start_reduce_scatter
from hpctrain.parallel.deferred import Deferred, Later, Tensors

SEQ = 1
"""The dim of `[batch, seq, hidden]` that sequence parallelism shards."""


@dataclass(frozen=True)
class Region:
    """A stretch of the model in which activations are sharded over heads, MLP columns or vocabulary.

    A column-parallel linear leads into it, a row-parallel one out of it.

    Attributes:
        axis: tp.
        sequence: outside it activations are sharded over the sequence; otherwise they are replicated.
        overlap: backward computes the weights' gradients while the input's is summed.
    """

    axis: Axis
    sequence: bool = False
    overlap: bool = False

    def enter(self, x: Tensor, function: Callable[[Tensor], Sequence[Tensor]]) -> Sequence[Tensor]:
        """Results of a function of rows, for all rows of an activation or gradient from outside.

        Where ranks send to each other, the part of each is worked on as it is, while those of the others come.
        """
        if not self.sequence:
            return function(x)
        gathering = start_all_gather(x, self.axis)
        if not self.axis.direct:
            return function(torch.cat(gathering.wait(), SEQ))
        own = function(x)
        parts = [own if i == self.axis.index else function(part) for i, part in enumerate(gathering.wait())]
        return [torch.cat(results, SEQ) for results in zip(*parts)]

    def leave(self, function: Callable[..., Tensor], *inputs: Tensor) -> Pending[Tensor]:
        """Begin to sum a function of rows over tp and to give the sum the form it has outside."""
        if not self.sequence:
            return start_all_reduce_(function(*inputs), self.axis)
        if self.axis.direct:
            chunks = [x.chunk(self.axis.size, SEQ) for x in inputs]
            return start_reduce_scatter(lambda i: function(*(c[i] for c in chunks)), self.axis)
        whole = function(*inputs).chunk(self.axis.size, SEQ)
        return start_reduce_scatter(lambda i: whole[i], self.axis)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _split(weights: Sequence[Weight]) -> tuple[list[Tensor | None], list[Packed | None]]:
    """Weights that autograd knows, and frozen ones in 4 bits, each None where it is the other."""
    packed = [w if isinstance(w, Packed) else None for w in weights]
    return [None if isinstance(w, Packed) else w for w in weights], packed


def _unpacked(held: Sequence[Tensor], packed: Sequence[Packed | None], dtype: torch.dtype) -> list[Tensor]:
    """Weights as they are computed with, whichever way they are held."""
    return [w if p is None else p.values(dtype) for w, p in zip(held, packed)]


class _ColumnLinear(torch.autograd.Function):
    """Linears of one input whose outputs are sharded.

    Backward sums the input's gradient over tp once for all of them, while the weights' gradients are computed.
    With sequence parallelism only this rank's part of the input is kept, and gathered again while the input's
    gradient is computed. Weights held by several ranks (key/value heads fewer than tp) get the sum over those.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, region: Region, replicas: tuple[Axis, ...], later: Later, packed: Any, *params: Any
    ) -> Any:
        held, biases = params[: len(replicas)], params[len(replicas) :]
        ctx.region, ctx.replicas, ctx.later, ctx.packed = region, replicas, later, packed
        ctx.save_for_backward(x, *held)
        weights = _unpacked(held, packed, x.dtype)
        return tuple(region.enter(x, lambda rows: [F.linear(rows, w, b) for w, b in zip(weights, biases)]))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, *held = ctx.saved_tensors
        region, replicas, later = ctx.region, ctx.replicas, ctx.later
        weights = _unpacked(held, ctx.packed, x.dtype)
        gathering = start_all_gather(x, region.axis) if region.sequence and later.now else None

        def grad_input(*grads: Tensor) -> Tensor:
            out: Tensor = grads[0] @ weights[0]
            for g, w in zip(grads[1:], weights[1:]):
                out += g @ w
            return out

        pending = region.leave(grad_input, *grads) if ctx.needs_input_grad[0] else None
        if pending and not region.overlap:
            pending.wait()

        def of_parameters() -> Tensors:
            if region.sequence:
                rows = _rows(torch.cat((gathering or start_all_gather(x, region.axis)).wait(), SEQ))
            else:
                rows = _rows(x)
            grad_w = [_rows(g).T @ rows if need else None for g, need in zip(grads, later.needs)]
            grad_b = [_rows(g).sum(0) if need else None for g, need in zip(grads, later.needs[len(weights) :])]
            return [_whole(g, axis) for g, axis in zip((*grad_w, *grad_b), (*replicas, *replicas))]

        of_inputs = later.gradients(of_parameters)
        return (pending.wait() if pending else None, None, None, None, None, *of_inputs)


def _whole(grad: Tensor | None, axis: Axis) -> Tensor | None:
    """The sum of a weight's gradient over the ranks that share the weight."""
    return grad if grad is None or axis.size == 1 else sum_gradients([grad], axis)[0]


class Beside(NamedTuple):
    """A summand of a row-parallel linear by a weight that every rank has whole.

    Attributes:
        x: [..., n] partial over tp.
        weight: [out, n].
        axis: tp, over which the weight's gradient is summed.
    """

    x: Tensor
    weight: Tensor
    axis: Axis


class _RowLinear(torch.autograd.Function):
    """A linear whose input is sharded and whose output is summed; the bias is added once, after the sum.

    Backward gathers the output's gradient over the sequence if that is sharded, and sends nothing otherwise.
    Either way the gradients of weight and bias see all of the sequence; left for later, they gather it again, because
    until then only this rank's part is kept.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, more: Tensor | None, region: Region, later: Later, packed: Any, axis: Any, *params: Any
    ) -> Tensor:
        held, bias, beside = params[:3]
        ctx.region, ctx.later, ctx.packed, ctx.axis = region, later, packed, axis
        ctx.save_for_backward(x, more, held, beside)
        (weight,) = _unpacked([held], [packed], x.dtype)
        if more is None:
            out = region.leave(lambda rows: F.linear(rows, weight), x).wait()
        else:
            out = region.leave(lambda rows, also: F.linear(rows, weight) + F.linear(also, beside), x, more).wait()
        return out if bias is None else out.add_(bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, more, held, beside = ctx.saved_tensors
        region, later = ctx.region, ctx.later
        own, now, weights = grads[0], later.now, _unpacked([held], [ctx.packed], x.dtype)
        weights += [] if beside is None else [beside]
        found = list(region.enter(own, lambda rows: (*(rows @ w for w in weights), *([rows] if now else []))))
        of_inputs, whole = found[: len(weights)], found[len(weights) :]
        need_weight, need_bias, need_beside = later.needs

        def of_parameters() -> Tensors:
            (grad,) = whole or region.enter(own, lambda rows: (rows,))
            grad_w = _rows(grad).T @ _rows(x) if need_weight else None
            grad_b = _rows(grad).sum(0) if need_bias else None
            return grad_w, grad_b, _whole(_rows(grad).T @ _rows(more), ctx.axis) if need_beside else None

        of_more = of_inputs[1] if more is not None else None
        return of_inputs[0], of_more, None, None, None, None, *later.gradients(of_parameters)


def column_linear(
    x: Tensor,
    region: Region,
    replicas: tuple[Axis, ...],
    weights: Sequence[Weight],
    biases: Sequence[Tensor | None],
    deferred: Deferred | None = None,
) -> tuple[Tensor, ...]:
    """in: replicated over tp, or sharded over the sequence; out: sharded on the last dim, one tensor a weight."""
    known, packed = _split(weights)
    later = Later((*known, *biases), deferred)
    return _ColumnLinear.apply(x, region, replicas, later, packed, *later.inputs)  # type: ignore[no-any-return, no-untyped-call]


def row_linear(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None,
    region: Region,
    deferred: Deferred | None = None,
    beside: Beside | None = None,
) -> Tensor:
    """in: sharded on the last dim; out: replicated over tp, or sharded over the sequence."""
    (known,), (packed,) = _split([weight])
    more, factor, axis = (None, None, None) if beside is None else beside
    later = Later((known, bias, factor), deferred)
    return _RowLinear.apply(x, more, region, later, packed, axis, *later.inputs)  # type: ignore[no-any-return, no-untyped-call]


class ColumnFanOut(FanOut):
    """`FanOut` with the output features of each linear sharded over tp.

    Args:
        fan: the linears, cut.
        region: entered here.
        replicas: for each linear the ranks that hold the same features.
    """

    def __init__(self, fan: FanOut, region: Region, replicas: tuple[Axis, ...]) -> None:
        super().__init__(dict(fan.items()))
        self.region, self.replicas = region, replicas
        self.deferred: Deferred | None = None

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        linears = [linear for linear in self.values() if isinstance(linear, nn.Linear)]
        weights, biases = [linear.weight for linear in linears], [linear.bias for linear in linears]
        return column_linear(x, self.region, self.replicas, weights, biases, self.deferred)


class RowLinear(nn.Module):
    """`nn.Linear` with the input features sharded over tp; the region is left here."""

    def __init__(self, linear: nn.Linear, region: Region) -> None:
        super().__init__()
        self.weight, self.bias, self.region = linear.weight, linear.bias, region
        self.deferred: Deferred | None = None

    def forward(self, x: Tensor) -> Tensor:
        return row_linear(x, self.weight, self.bias, self.region, self.deferred)


class VocabParallelEmbedding(Embedding):
    """`Embedding` with the vocabulary sharded over tp, unevenly where it does not divide.

    Args:
        embedding: the module replaced, cut.
        start: first token id of this rank.
        region: left here.
    """

    def __init__(self, embedding: Embedding, start: int, region: Region) -> None:
        nn.Module.__init__(self)
        self.weight, self.start, self.region = embedding.weight, start, region

    def forward(self, tokens: Tensor) -> Tensor:
        local = tokens - self.start
        elsewhere = (local < 0) | (local >= self.weight.shape[0])
        found = F.embedding(local.masked_fill(elsewhere, 0), self.weight).masked_fill(elsewhere[..., None], 0.0)
        axis = self.region.axis
        return reduce_scatter_from(found, axis, SEQ) if self.region.sequence else reduce_from(found, axis)


class ColumnHead(Head):
    """`Head` whose logits are sharded over the vocabulary."""

    def __init__(self, head: Head, region: Region, alone: Axis) -> None:
        nn.Module.__init__(self)
        self.register_parameter("weight", head.weight)
        self.region, self.alone = region, alone
        self.deferred: Deferred | None = None

    def forward(self, x: Tensor, tied: Tensor | None) -> Tensor:
        weight = present(self.weight, tied)
        return column_linear(x, self.region, (self.alone,), [weight], [None], self.deferred)[0]
