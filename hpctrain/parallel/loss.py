"""Cross-entropy of logits sharded over the vocabulary, without ever gathering them."""

from __future__ import annotations

import torch
from torch import Tensor

from hpctrain.model.loss import CrossEntropy, loss_in_chunks
from hpctrain.parallel.comm import Axis, all_gather


class VocabParallelCrossEntropy(CrossEntropy):
    """`CrossEntropy` for logits [batch, seq, local vocab]; the same scalar on every rank of tp.

    One gather of four numbers a token forward, nothing backward.

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
        return loss_in_chunks(logits, labels, self.start, self.vocab, self._merge, *extras)

    def _merge(self, parts: Tensor) -> Tensor:
        return torch.stack(all_gather(parts, self.axis))
