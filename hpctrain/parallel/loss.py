"""Cross-entropy of logits sharded over the vocabulary, without ever gathering them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hpctrain.model.batch import IGNORED
from hpctrain.model.loss import CrossEntropy
from hpctrain.parallel.comm import Axis, all_gather


class _VocabParallelLoss(torch.autograd.Function):
    """One gather of four numbers a token forward, nothing backward.

    With x the logits, m their maximum and lse = m + log(sum exp(x - m)), every rank gathers each rank's own
    maximum, sum of exponentials, target logit and sum of logits, and merges them alike, so that the loss has
    the same bits everywhere. The sums are taken in float32, or float64 for float64 logits.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, start: int, vocab: int, axis: Axis, smoothing: float, z_loss: float
    ) -> Tensor:
        wide = logits if logits.dtype == torch.float64 else logits.float()
        local = labels - start
        mine = (local >= 0) & (local < wide.shape[-1])
        index = local.masked_fill(~mine, 0)
        top = wide.amax(-1)
        exps = (wide - top[..., None]).exp_()
        target = wide.gather(-1, index[..., None])[..., 0].masked_fill(~mine, 0.0)
        parts = [top, exps.sum(-1), target, wide.sum(-1) if smoothing else torch.zeros_like(top)]
        tops, sums, targets, totals = torch.stack(all_gather(torch.stack(parts), axis)).unbind(1)
        peak = tops.amax(0)
        lse = peak + (sums * (tops - peak).exp()).sum(0).log()
        loss = lse - (1 - smoothing) * targets.sum(0) - smoothing / vocab * totals.sum(0) + z_loss * lse.square()
        valid = labels != IGNORED
        probabilities = exps.mul_((top - lse).exp()[..., None])
        ctx.save_for_backward(probabilities, index, mine, valid, lse)
        ctx.dtype, ctx.vocab, ctx.smoothing, ctx.z_loss = logits.dtype, vocab, smoothing, z_loss
        return loss.masked_fill(~valid, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        probabilities, index, mine, valid, lse = ctx.saved_tensors
        grad = probabilities * (1 + 2 * ctx.z_loss * lse)[..., None] - ctx.smoothing / ctx.vocab
        hit = mine.to(grad.dtype) * (1 - ctx.smoothing)
        grad.scatter_add_(-1, index[..., None], -hit[..., None])
        grad *= (valid * grads[0])[..., None]
        return grad.to(ctx.dtype), None, None, None, None, None, None


class VocabParallelCrossEntropy(CrossEntropy):
    """`CrossEntropy` for logits [batch, seq, local vocab]; the same scalar on every rank of tp.

    Args:
        plain: the loss replaced.
        start: first token id of this rank.
        vocab: size of the whole vocabulary, over which smoothing spreads.
        axis: tp.
    """

    def __init__(self, plain: CrossEntropy, start: int, vocab: int, axis: Axis) -> None:
        super().__init__(plain.smoothing, plain.z_loss)
        self.start, self.vocab, self.axis = start, vocab, axis

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        extras = (self.smoothing, self.z_loss) if self.training else (0.0, 0.0)
        return _VocabParallelLoss.apply(  # type: ignore[no-any-return, no-untyped-call]
            logits, labels, self.start, self.vocab, self.axis, *extras
        )
