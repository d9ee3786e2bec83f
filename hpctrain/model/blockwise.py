"""Attention of a block of queries to a block of keys, tile by tile: the scores of a block are never there as a whole.

Blocks of the same queries are merged by the logarithm of the sum of the exponentials of each query's scores (LSE). It
is kept as a pair, the largest score and the sum of the exponentials of what all are below it: where scores are 250,
float32 rounds an LSE by 1e-5, and a ring would round it again at every merge. Forward is the online softmax of Milakov
and Gimelshein (arXiv 1805.02867); backward computes scores again, as in FlashAttention (Dao et al., arXiv 2205.14135).
All results are in float32, or in float64 for float64. On CUDA, blocks in half precision without documents go to
PyTorch's flash attention.

Shapes: q and what is like it [batch, heads, queries, width]; k and v [batch, kv_heads, keys, width], not repeated to
all heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

TILE_KEYS = 256
TILE_SCORES = 1 << 18
"""Scores that are there at a time, over all samples and heads: they stay in a cache."""

_flash = torch.ops.aten._scaled_dot_product_flash_attention
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward


@dataclass(frozen=True)
class Sight:
    """Which keys of a block a query sees.

    Attributes:
        causal: those up to its own place; otherwise none of them comes after it.
        queries, keys: [batch, places] ascending numbers of documents, of which it sees its own; None: all.
    """

    causal: bool = False
    queries: Tensor | None = None
    keys: Tensor | None = None

    def hidden(self, rows: slice, keys: slice, device: torch.device) -> Tensor | bool:
        """What a tile hides, [1 or batch, rows, keys] bool; True: all of it; False: nothing."""
        if self.causal and keys.start >= rows.stop:
            return True
        out = self._others(rows, keys)
        if self.causal and keys.stop - 1 > rows.start and out is not True:
            size = (rows.stop - rows.start, keys.stop - keys.start)
            later = torch.ones(size, dtype=torch.bool, device=device).triu(rows.start - keys.start + 1)[None]
            out = out | later
        return out

    def _others(self, rows: slice, keys: slice) -> Tensor | bool:
        """Keys of other documents."""
        if self.queries is None or self.keys is None:
            return False
        mine, theirs = self.queries[:, rows], self.keys[:, keys]
        if mine.device.type == "cpu":  # elsewhere to ask is to wait
            if bool((mine[:, 0] > theirs[:, -1]).all()):
                return True
            if bool((mine[:, -1] == theirs[:, 0]).all()):
                return False
        return mine[:, :, None] != theirs[:, None, :]


class Partial(NamedTuple):
    """Attention to some of the keys.

    Attributes:
        mixed: values, each times the exponential of its score less `top`, added up: the output times `total`.
        top: [batch, heads, queries, 1] the largest score, or more; of a query that has seen nothing, the lowest number.
        total: [batch, heads, queries, 1] the exponentials added up; 0 for such a query.
    """

    mixed: Tensor
    top: Tensor
    total: Tensor

    def rows(self, at: slice) -> Partial:
        """Of some of the queries, a view."""
        return Partial(*(t[:, :, at] for t in self))

    def merge_(self, other: Partial) -> None:
        """Add attention of the same queries to other keys, in place."""
        peak = torch.maximum(self.top, other.top)
        mine, theirs = (self.top - peak).exp_(), (other.top - peak).exp_()
        self.mixed.mul_(mine).add_(other.mixed * theirs)
        self.total.mul_(mine).add_(other.total * theirs)
        self.top.copy_(peak)

    def output(self) -> Tensor:
        """What attention returns; 0 for a query that has seen nothing."""
        return self.mixed / self.divisor()

    def divisor(self) -> Tensor:
        """`total`, with which nothing divides to more than 0 where it is 0."""
        return self.total.masked_fill(self.total == 0, torch.inf)


def forward(q: Tensor, k: Tensor, v: Tensor, sight: Sight) -> Partial:
    """Attention to the keys of a block."""
    if _fused(q, sight):
        out, lse, *_ = _flash(q, k, v, 0.0, sight.causal)
        return Partial(out.to(lse.dtype), lse[..., None], torch.ones_like(lse)[..., None])
    keys, values, groups = _wide(k), _wide(v), q.shape[1] // k.shape[1]
    made = _empty(q.shape, keys), _empty((*q.shape[:-1], 1), keys), _empty((*q.shape[:-1], 1), keys)
    lowest = torch.finfo(keys.dtype).min  # finite, so that of what is hidden exp(-inf - lowest) = 0
    for at in _slices(q.shape[2], _rows(q, k)):
        rows = _gather(q, at, groups) * q.shape[-1] ** -0.5
        top, total = rows.new_full((*rows.shape[:-1], 1), lowest), rows.new_zeros((*rows.shape[:-1], 1))
        mixed = torch.zeros_like(rows)
        for there, hidden in _tiles(sight, at, keys):
            scores = _scores(rows, keys[:, :, there], hidden, groups)
            peak = torch.maximum(top, scores.amax(-1, keepdim=True))
            weights, shrink = scores.sub_(peak).exp_(), top.sub_(peak).exp_()
            total = total.mul_(shrink).add_(weights.sum(-1, keepdim=True))
            mixed = mixed.mul_(shrink).add_(weights @ values[:, :, there])
            top = peak
        for into, t in zip(made, (mixed, top, total)):
            _scatter(into, at, t, groups)
    return Partial(*made)


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, whole: Partial, sight: Sight
) -> tuple[Tensor, Tensor, Tensor]:
    """What a block adds to the gradients of q, k and v.

    Args:
        out: the output over all blocks.
        whole: attention to the keys of all blocks, of which `mixed` is not needed.
    """
    if _fused(q, sight):
        lse = (whole.top + whole.total.log())[..., 0].contiguous()
        none, seed = q.new_empty(0), torch.zeros(2, dtype=torch.uint64, device=q.device)  # of dropout
        args = (out, lse, None, None, q.shape[2], k.shape[2], 0.0, sight.causal, seed, none)
        return tuple(g.to(lse.dtype) for g in _flash_backward(grad, q, k, v, *args))  # type: ignore[return-value]
    keys, values, groups = _wide(k), _wide(v), q.shape[1] // k.shape[1]
    grad_q = torch.empty(q.shape, dtype=keys.dtype, device=q.device)
    grad_k, grad_v = torch.zeros_like(keys), torch.zeros_like(values)
    scale, divisor = q.shape[-1] ** -0.5, whole.divisor()
    for at in _slices(q.shape[2], _rows(q, k)):
        rows, top = _gather(q, at, groups) * scale, _gather(whole.top, at, groups)
        of_mixed = _gather(grad, at, groups) / _gather(divisor, at, groups)
        shift = (of_mixed * _gather(out, at, groups)).sum(-1, keepdim=True)
        of_rows = torch.zeros_like(rows)
        for there, hidden in _tiles(sight, at, keys):
            weights = _scores(rows, keys[:, :, there], hidden, groups).sub_(top).exp_()
            grad_v[:, :, there] += weights.mT @ of_mixed
            of_scores = weights.mul_((of_mixed @ values[:, :, there].mT).sub_(shift))
            of_rows += of_scores @ keys[:, :, there]
            grad_k[:, :, there] += of_scores.mT @ rows
        _scatter(grad_q, at, of_rows.mul_(scale), groups)
    return grad_q, grad_k, grad_v


def _fused(q: Tensor, sight: Sight) -> bool:
    half = q.dtype in (torch.bfloat16, torch.float16)
    return q.is_cuda and half and sight.queries is None and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256


def _wide(t: Tensor) -> Tensor:
    return t.to(torch.promote_types(t.dtype, torch.float32))


def _empty(shape: Sequence[int], like: Tensor) -> Tensor:
    """[batch, heads, queries, n], in memory as [batch, queries, heads, n], which the linear after attention takes."""
    batch, heads, queries, n = shape
    return like.new_empty(batch, queries, heads, n).transpose(1, 2)


def _rows(q: Tensor, k: Tensor) -> int:
    """Queries of a tile."""
    return max(16, TILE_SCORES // (q.shape[0] * q.shape[1] * min(TILE_KEYS, k.shape[2])))


def _slices(size: int, step: int) -> Iterator[slice]:
    return (slice(i, min(i + step, size)) for i in range(0, size, step))


def _tiles(sight: Sight, at: slice, keys: Tensor) -> Iterator[tuple[slice, Tensor | None]]:
    """The tiles of some queries in which anything is to be seen, and what they hide."""
    for there in _slices(keys.shape[2], TILE_KEYS):
        hidden = sight.hidden(at, there, keys.device)
        if hidden is not True:
            yield there, None if isinstance(hidden, bool) else hidden


def _scores(rows: Tensor, keys: Tensor, hidden: Tensor | None, groups: int) -> Tensor:
    scores = rows @ keys.mT
    if hidden is not None:
        torch.unflatten(scores, 2, (groups, -1)).masked_fill_(hidden[:, None, None], -torch.inf)
    return scores


def _gather(t: Tensor, at: slice, groups: int) -> Tensor:
    """[batch, heads, seq, n] -> [batch, kv_heads, heads of each x places, n], in float32 or wider."""
    return torch.unflatten(_wide(t[:, :, at]), 1, (-1, groups)).flatten(2, 3)


def _scatter(into: Tensor, at: slice, t: Tensor, groups: int) -> None:
    into[:, :, at] = torch.unflatten(t, 2, (groups, -1)).flatten(1, 2)
