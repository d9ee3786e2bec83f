"""A mixture of experts in the place of an MLP. It knows nothing of parallelism: `MoE.dispatch` is what expert
parallelism replaces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hpctrain.config.schema import ModelConfig
from hpctrain.model.grouped import GroupedLinear, grouped_linear, has_kernel, kernel_linear, room_for, slots_of
from hpctrain.model.mlp import Activated, Mlp, activated, input_names
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
        self.dispatch: nn.Module = LocalDispatch(model.moe.experts)
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
        rows = len(x) * self.router.rows(x.shape[1]) if self.padded else None
        out = self.dispatch(x.flatten(0, 1), ids.flatten(0, 1), weights.flatten(0, 1), self.experts, rows).view_as(x)
        return (out if self.shared is None else out + self.shared(x)), loss


class Experts(nn.Module):
    """Some MLPs of equal width, each for its own rows.

    Attributes:
        activated: as of `Mlp`.
    """

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        assert model.moe is not None
        self.activation, self.inputs = model.activation, input_names(model)
        self.activated: Activated = activated
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
        if not self._kernel(x):
            sizes = counts.tolist()
            return self._each(x, lambda rows, weight: grouped_linear(rows, weight, sizes))
        room, total = room_for(counts, len(x))
        slots, ends = slots_of(counts, room, len(x)), room.cumsum(0).int()
        padded = x.new_zeros(total, x.shape[1]).index_put((slots,), x)
        return self._each(padded, lambda rows, weight: kernel_linear(rows, weight, ends))[slots]

    def _kernel(self, x: Tensor) -> bool:
        """Whether all products can be by the kernel."""
        return has_kernel(x, self.down.shape)

    def _each(self, x: Tensor, linear: GroupedLinear) -> Tensor:
        inner = [self._through(x, name, linear) for name in self.inputs]
        return self.activated(self.activation, inner, lambda rows: self._through(rows, "down", linear))

    def _through(self, x: Tensor, name: str, linear: GroupedLinear) -> Tensor:
        """Rows through the matrix of this name of each expert."""
        return linear(x, getattr(self, name))


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
    choices = rows.new_zeros(weights.numel(), rows.shape[-1]).index_put((places,), rows)
    return torch.bmm(weights.to(rows.dtype)[:, None], choices.view(*weights.shape, -1))[:, 0]


class LocalDispatch(nn.Module):
    """All experts are here.

    Args:
        number: of experts.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

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
        places, counts = by_expert(ids, self.number)
        sent = x[places // ids.shape[1]]
        if rows is None:
            return combine(experts(sent, counts), places, weights)
        room = torch.full_like(counts, rows)
        slots = slots_of(counts, room, len(sent))
        padded = sent.new_zeros(self.number * rows, x.shape[1]).index_put((slots,), sent)
        return combine(experts(padded, room)[slots], places, weights)
