"""A mixture of experts in the place of an MLP. It knows nothing of parallelism: `MoE.dispatch` is what expert
parallelism replaces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hpctrain.config.schema import ModelConfig
from hpctrain.model.mlp import Mlp, activate, input_names
from hpctrain.model.router import Router


class MoE(nn.Module):
    """Each token through the experts that the router chooses for it, and through the shared MLP if there is one.

    Attributes:
        dispatch: brings tokens to experts and back; see `LocalDispatch`.
    """

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        assert model.moe is not None
        self.router = Router(model)
        self.experts = Experts(model)
        self.shared = Mlp(model, model.moe.shared_ffn) if model.moe.shared_ffn else None
        self.dispatch: nn.Module = LocalDispatch()
        self.padded = model.moe.capacity is not None and model.moe.overflow == "pad"

    def forward(self, x: Tensor, samples: Sequence[int], valid: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """
        Args:
            x: [batch, seq, hidden].
            samples: as for `Router`.
            valid: as for `Router`.

        Returns:
            [batch, seq, hidden], and the router's loss.
        """
        ids, weights, loss = self.router(x, samples, valid)
        rows = len(x) * self.router.capacity.rows(x.shape[1]) if self.padded else None
        out = self.dispatch(x.flatten(0, 1), ids.flatten(0, 1), weights.flatten(0, 1), self.experts, rows).view_as(x)
        return (out if self.shared is None else out + self.shared(x)), loss


class Experts(nn.Module):
    """Some MLPs of equal width, each for its own rows."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        assert model.moe is not None
        self.activation, self.inputs = model.activation, input_names(model)
        experts, hidden, width = model.moe.experts, model.hidden, model.expert_width
        for name in self.inputs:
            self.register_parameter(name, nn.Parameter(torch.empty(experts, width, hidden)))
        self.down = nn.Parameter(torch.empty(experts, hidden, width))

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """
        Args:
            x: [rows, hidden], those of the first expert held first.
            counts: [experts held] int64, how many each has; their sum is `rows`.

        Returns:
            [rows, hidden].
        """
        sizes = counts.tolist()
        inner = [_GroupedLinear.apply(x, self.get_parameter(name), sizes) for name in self.inputs]  # type: ignore[no-untyped-call]
        out: Tensor = _GroupedLinear.apply(activate(self.activation, inner), self.down, sizes)  # type: ignore[no-untyped-call]
        return out


class _GroupedLinear(torch.autograd.Function):
    """Consecutive groups of rows [rows, in], of `sizes`, each times its own matrix of [experts, out, in]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, sizes: list[int]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sizes = sizes
        out = x.new_empty(len(x), weight.shape[1])
        for into, rows, matrix in zip(out.split(sizes), x.split(sizes), weight):
            torch.mm(rows, matrix.t(), out=into)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x, weight), sizes, (grad,) = ctx.saved_tensors, ctx.sizes, grads
        grad_x, grad_weight = torch.empty_like(x), torch.empty_like(weight)
        parts = zip(grad.split(sizes), x.split(sizes), weight, grad_x.split(sizes), grad_weight)
        for of_rows, rows, matrix, into_rows, into_matrix in parts:
            if ctx.needs_input_grad[0]:
                torch.mm(of_rows, matrix, out=into_rows)
            if ctx.needs_input_grad[1]:
                torch.mm(of_rows.t(), rows, out=into_matrix)
        return tuple(g if needed else None for g, needed in zip((grad_x, grad_weight, None), ctx.needs_input_grad))


class Order(NamedTuple):
    """Choices of tokens in the order of experts.

    Attributes:
        places: [rows] int64, which of the flat [tokens x top_k] choices each row is; those of no expert are left out.
        counts: [experts] int64, rows of each.
    """

    places: Tensor
    counts: Tensor


def by_expert(ids: Tensor, experts: int) -> Order:
    """Sort choices [tokens, top_k] by expert; those of one expert stay in the order of tokens."""
    flat = ids.flatten()
    counts = torch.bincount(flat, minlength=experts + 1)[:experts]
    places = flat.argsort(stable=True)
    return Order(places[: int(counts.sum())], counts)


def combine(rows: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum [tokens, hidden] of each token's rows; a choice without a row adds nothing.

    Args:
        rows: [rows, hidden].
        places: as in `Order`.
        weights: [tokens, top_k].
    """
    choices = rows.new_zeros(weights.numel(), rows.shape[-1]).index_copy(0, places, rows)
    return torch.bmm(weights.to(rows.dtype)[:, None], choices.view(*weights.shape, -1))[:, 0]


class LocalDispatch(nn.Module):
    """All experts are here."""

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor, experts: nn.Module, rows: int | None) -> Tensor:
        """
        Args:
            x: [tokens, hidden].
            ids: [tokens, top_k]; what is no expert is left out.
            weights: [tokens, top_k].
            experts: as `Experts`.
            rows: that each expert computes with, at least as many as it has; None: as many as it has.

        Returns:
            [tokens, hidden].
        """
        number = experts.down.shape[0]
        places, counts = by_expert(ids, number)
        sent = x[places // ids.shape[1]]
        if rows is None:
            return combine(experts(sent, counts), places, weights)
        slots = slots_of(counts, rows)
        padded = sent.new_zeros(number * rows, x.shape[1]).index_copy(0, slots, sent)
        return combine(experts(padded, torch.full_like(counts, rows))[slots], places, weights)


def slots_of(counts: Tensor, rows: int) -> Tensor:
    """Where rows in the order of experts lie when each expert has `rows` of them, [sum of counts] int64."""
    experts = torch.arange(len(counts), device=counts.device)
    gaps = experts * rows - (counts.cumsum(0) - counts)
    return torch.arange(int(counts.sum()), device=counts.device) + gaps.repeat_interleave(counts)
