"""The training objective of one process that holds all logits."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hpctrain.model.batch import IGNORED


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
        wide = logits.flatten(0, 1)
        wide = wide if wide.dtype == torch.float64 else wide.float()
        smoothing = self.smoothing if self.training else 0.0
        total = F.cross_entropy(
            wide, labels.flatten(), ignore_index=IGNORED, reduction="sum", label_smoothing=smoothing
        )
        if self.training and self.z_loss:
            squares = wide.logsumexp(-1).square()
            total = total + self.z_loss * squares.masked_fill(labels.flatten() == IGNORED, 0.0).sum()
        return total
