"""The router of a mixture of experts: which experts each token goes to, how their outputs weigh, and what keeps the
load of the experts even.

Everything is a function of one sample at a time, so neither the size of a micro-batch nor the number of data-parallel
ranks changes it: the balance loss, the z-loss, the capacity of an expert. Tokens that do not count in the loss are
routed as others are, but count in no load and no loss. Scores and weights are float32, or float64 in a model of
float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hpctrain.config.schema import ModelConfig, MoeConfig


class Routing(NamedTuple):
    """Where tokens go.

    Attributes:
        ids: [batch, seq, top_k] int64, the best first; `experts` itself, which is no expert, where one is full.
        weights: [batch, seq, top_k] of the experts' outputs.
        loss: sum over the valid tokens of the router's losses, a scalar; None where there is none.
    """

    ids: Tensor
    weights: Tensor
    loss: Tensor | None


class Load(NamedTuple):
    """What a router has counted of some samples, as sums over their valid tokens.

    Attributes:
        experts: [experts] tokens that chose each expert, dropped ones included.
        dropped: of these, those that it did not take.
        aux: the balance loss and the z-loss of each token, without their weights.
        z: see `aux`.
        tokens: how many.
    """

    experts: Tensor
    dropped: Tensor
    aux: Tensor
    z: Tensor
    tokens: Tensor

    @classmethod
    def of(cls, vector: Tensor) -> Load:
        """From [experts + 4]."""
        return cls(vector[:-4], *vector[-4:])


class Tally:
    """What a router has counted since `clear`, by micro-batch: a forward that is run again overwrites what it wrote."""

    def __init__(self) -> None:
        self._counted: dict[tuple[int, ...], Tensor] = {}

    def clear(self) -> None:
        self._counted.clear()

    def put(self, samples: Sequence[int], vector: Tensor) -> None:
        """Take note of a `Load` of these samples, as one vector [experts + 4]."""
        self._counted[tuple(samples)] = vector

    def total(self) -> Tensor | None:
        """The sum, [experts + 4] float64; None where nothing was counted."""
        return torch.stack(list(self._counted.values())).sum(0) if self._counted else None


class Capacity(nn.Module):
    """Which of a sample's tokens an expert takes when it does not take all: the first ones.

    Args:
        moe: has a capacity.
    """

    def __init__(self, moe: MoeConfig) -> None:
        super().__init__()
        self.moe = moe

    def forward(self, ids: Tensor) -> Tensor:
        """What is taken, [batch, seq, top_k] bool, of the choices `ids` of whole samples."""
        flat = ids.flatten(1)  # a token chooses an expert once, so the order of its ids is none
        chosen, order = flat.sort(dim=1, stable=True)
        before = torch.arange(flat.shape[1], device=ids.device) - torch.searchsorted(chosen, chosen)
        return torch.empty_like(flat).scatter_(1, order, before).lt(self.moe.room(ids.shape[1])).view_as(ids)


def same(counts: Tensor) -> Tensor:
    """Where samples are whole, the counts of a part are those of the sample."""
    return counts


class Router(nn.Module):
    """Scores by softmax or sigmoid, top-k of them with or without groups and biases.

    Attributes:
        bias: [experts] float32, added to the scores where experts are chosen, and not to the weights; None is 0.
        capacity: what decides who is taken; None takes all.
        whole: sums [batch, n] over the ranks that hold parts of the same samples.
        tally: counts of the present step.
    """

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        assert model.moe is not None
        self.moe = model.moe
        self.weight = nn.Parameter(torch.empty(self.moe.experts, model.hidden))
        self.bias: Tensor | None = None
        self.capacity: nn.Module | None = Capacity(self.moe) if self.moe.capacity else None
        self.whole: Callable[[Tensor], Tensor] = same
        self.tally = Tally()

    def forward(self, x: Tensor, samples: Sequence[int], valid: Tensor | None) -> Routing:
        """
        Args:
            x: [batch, seq, hidden].
            samples: global counts of the batch's samples; needed in training.
            valid: [batch, seq] bool, which tokens count in the loss; None: all.
        """
        wide = torch.promote_types(x.dtype, torch.float32)
        logits = F.linear(x.to(wide), self.matrix().to(wide))
        scores = logits.softmax(-1) if self.moe.router == "softmax" else logits.sigmoid()
        ids = self.choose(scores)
        weights = scores.gather(-1, ids)
        if self.moe.normalize:
            weights = weights / (weights.sum(-1, keepdim=True) + torch.finfo(wide).tiny)
        weights = weights * self.moe.scale
        taken = None if self.capacity is None else self.capacity(ids)
        loss = self._loss(logits, scores, ids, taken, samples, valid) if self.training else None
        if taken is not None:
            ids = ids.masked_fill(~taken, self.moe.experts)
        return Routing(ids, weights, loss)

    def rows(self, seq: int) -> int:
        """Most rows that an expert gets of the `seq` tokens that this sees of a sample, where there is a capacity."""
        return self.moe.room(seq)

    def matrix(self) -> Tensor:
        """The weight that logits are made with."""
        return self.weight

    @torch.no_grad()
    def choose(self, scores: Tensor) -> Tensor:
        """The experts of each token, [..., top_k]; of equal ones the first. Groups as in DeepSeek-V3 (arXiv 2412.19437
        section 2.1.2): those with the highest sum of their two best."""
        moe = self.moe
        biased = scores if self.bias is None else scores + self.bias
        if moe.top_groups < moe.groups:
            grouped = biased.view(*biased.shape[:-1], moe.groups, -1)
            best = grouped.topk(min(2, grouped.shape[-1])).values.sum(-1)
            outside = torch.ones_like(best, dtype=torch.bool).scatter_(-1, first(best, moe.top_groups), False)
            biased = grouped.masked_fill(outside[..., None], -torch.inf).flatten(-2)
        return first(biased, moe.top_k)

    def _loss(
        self,
        logits: Tensor,
        scores: Tensor,
        ids: Tensor,
        taken: Tensor | None,
        samples: Sequence[int],
        valid: Tensor | None,
    ) -> Tensor | None:
        """The losses of each sample, summed; and note of them in the tally.

        Balance: DeepSeek-V3's, of a sequence (arXiv 2412.19437 equations 17 to 20), times the sequence's valid tokens.
        As there it looks at the top-k of the bare scores. z: ST-MoE's (arXiv 2202.08906 equation 5).
        """
        assert len(samples) == len(ids), "a router that is trained needs to know the samples"
        moe, (batch, seq, _) = self.moe, ids.shape
        counts = logits.new_ones(batch, seq) if valid is None else valid.to(logits.dtype)
        probability = ((scores / scores.sum(-1, keepdim=True)) * counts[..., None]).sum(1)
        z = (logits.logsumexp(-1).square() * counts).sum(1)
        with torch.no_grad():
            bare = ids if self.bias is None and moe.top_groups == moe.groups else first(scores, moe.top_k)
            dropped = counts.new_zeros(batch) if taken is None else (~taken * counts[..., None]).sum((1, 2))
            parts = [_load(bare, counts, moe.experts), _load(ids, counts, moe.experts), probability]
            known = self.whole(torch.cat([*parts, torch.stack([dropped, z, counts.sum(1)], 1)], 1))
            chosen, load, probable = (known[:, i * moe.experts :][:, : moe.experts] for i in range(3))
            dropped, whole_z, tokens = known[:, 3 * moe.experts :].unbind(1)
            share = chosen * (moe.experts / moe.top_k) / tokens.clamp_min(1)[:, None]
            seen = torch.stack([dropped, (share * probable).sum(1), whole_z, tokens], 1)
            self.tally.put(samples, torch.cat([load, seen], 1).double().sum(0))
        if not (moe.aux_loss or moe.z_loss):
            return None
        return moe.aux_loss * (share * probability).sum() + moe.z_loss * z.sum()


def routers_of(root: nn.Module) -> dict[str, Router]:
    """The routers in a module, by name."""
    return {name: module for name, module in root.named_modules() if isinstance(module, Router)}


def give_biases(root: nn.Module, device: torch.device) -> dict[str, Tensor]:
    """Biases of zero for the routers in a module that balance by them; by name."""
    given = {}
    for name, router in routers_of(root).items():
        if router.moe.bias_rate is not None:
            router.bias = given[f"{name}.bias"] = torch.zeros(router.moe.experts, device=device)
    return given


def first(scores: Tensor, number: int) -> Tensor:
    """The places of the highest scores, highest first, of equal ones the first: [..., number]."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :number]


def _load(ids: Tensor, counts: Tensor, experts: int) -> Tensor:
    """How often each expert was chosen in a sample, [batch, experts], tokens counting as `counts` [batch, seq] says."""
    each = counts[..., None].expand(ids.shape).flatten(1)
    return counts.new_zeros(len(ids), experts).scatter_add_(1, ids.flatten(1), each)
