"""The training objective, of logits that one process holds or of its part of them, in chunks of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hpctrain.layout.activations import ON_CPU, OURS
from hpctrain.model.batch import IGNORED

Merge = Callable[[Tensor], Tensor]
"""Numbers [4, tokens] of a rank's part of the vocabulary to those of all ranks, [ranks, 4, tokens]."""


class CrossEntropy(nn.Module):
    """Sum over valid tokens of cross-entropy, in float32 or wider.

    While training, with label smoothing over the whole vocabulary (Szegedy et al., arXiv 1512.00567) and the
    z-loss `z_loss x log(Z)^2` (PaLM, arXiv 2204.02311); while evaluating, plain.
    """

    def __init__(self, smoothing: float = 0.0, z_loss: float = 0.0) -> None:
        super().__init__()
        self.smoothing, self.z_loss = smoothing, z_loss

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """
        Args:
            logits: [batch, seq, vocab].
            labels: [batch, seq], `IGNORED` where nothing counts.

        Returns:
            A scalar sum; exactly 0 when no label counts.
        """
        extras = (self.smoothing, self.z_loss) if self.training else (0.0, 0.0)
        return loss_in_chunks(logits, labels, 0, logits.shape[-1], lambda parts: parts[None], *extras)


def loss_in_chunks(
    logits: Tensor, labels: Tensor, start: int, vocab: int, merge: Merge, smoothing: float, z_loss: float
) -> Tensor:
    """`CrossEntropy` of a part of the vocabulary; what is wider than the logits is there for a chunk of tokens only.

    Args:
        logits: [batch, seq, local vocab]; backward needs them, and nothing else of their size.
        labels: [batch, seq], `IGNORED` where nothing counts.
        start: token of the first logit.
        vocab: size of the whole vocabulary, over which smoothing spreads.
        merge: brings together what all parts have.
    """
    apply: Callable[..., Tensor] = _Chunked.apply
    return apply(logits, labels, start, vocab, merge, smoothing, z_loss)


class _Chunked(torch.autograd.Function):
    """Of every token four numbers are merged in forward, nothing in backward.

    With x the logits, m their maximum and lse = m + log(sum exp(x - m)), these are a part's own maximum, sum of
    exponentials, target logit and sum of logits. All ranks merge them alike, so that the loss has the same bits
    everywhere. Backward makes exp(x - lse) again. Sums are of float32, or of float64 for float64 logits.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, start: int, vocab: int, merge: Merge, smoothing: float, z_loss: float
    ) -> Tensor:
        flat, wanted = logits.flatten(0, -2), labels.flatten()
        local = wanted - start
        mine = (local >= 0) & (local < flat.shape[-1])
        index, valid = local.masked_fill(~mine, 0), wanted != IGNORED
        parts = flat.new_zeros((4, len(flat)), dtype=_wide(flat))
        for rows in _chunks(flat):
            x, (top, exps, target, total) = flat[rows].to(parts.dtype), parts[:, rows].unbind()
            torch.amax(x, -1, out=top)
            target.copy_(x.gather(-1, index[rows, None])[:, 0])
            if smoothing:
                torch.sum(x, -1, out=total)
            exps.copy_((x - top[:, None]).exp_().sum(-1))
            del x
        parts[2].masked_fill_(~mine, 0.0)
        tops, sums, targets, totals = merge(parts).unbind(1)
        peak = tops.amax(0)
        lse = peak + (sums * (tops - peak).exp()).sum(0).log()
        loss = lse - (1 - smoothing) * targets.sum(0) - smoothing / vocab * totals.sum(0) + z_loss * lse.square()
        ctx.save_for_backward(logits, index, mine, valid, lse)
        ctx.vocab, ctx.smoothing, ctx.z_loss = vocab, smoothing, z_loss
        return loss.masked_fill(~valid, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        logits, index, mine, valid, lse = ctx.saved_tensors
        flat, out = logits.flatten(0, -2), torch.empty_like(logits, memory_format=torch.contiguous_format)
        hit, of_token = mine.to(lse.dtype) * (1 - ctx.smoothing), valid * grads[0]
        for rows in _chunks(flat):
            grad = (flat[rows].to(lse.dtype) - lse[rows, None]).exp_()
            if ctx.z_loss:
                grad *= (1 + 2 * ctx.z_loss * lse[rows])[:, None]
            if ctx.smoothing:
                grad -= ctx.smoothing / ctx.vocab
            grad.scatter_add_(-1, index[rows, None], -hit[rows, None])
            out.flatten(0, -2)[rows] = grad.mul_(of_token[rows, None])
            del grad  # else it is there beside the next chunk's
        return out, None, None, None, None, None, None


CHUNK, CHUNK_OF_CPU = OURS.chunk, ON_CPU.chunk
"""Logits of a chunk: so many that a GPU does not wait for the next kernel; or what a core's cache holds."""


def _chunks(flat: Tensor) -> Iterator[slice]:
    """Tokens of each chunk of logits [tokens, vocab], one at least."""
    many = max(1, (CHUNK_OF_CPU if flat.device.type == "cpu" else CHUNK) // flat.shape[-1])
    for first in range(0, len(flat), many):
        yield slice(first, first + many)


def _wide(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32
