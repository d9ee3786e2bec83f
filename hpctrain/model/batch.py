"""What a model is fed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

IGNORED = -100
"""Label of a position that does not count in the loss."""


@dataclass(frozen=True)
class Batch:
    """Samples of equal length. Labels are shifted already: `labels[i, t]` is what follows `tokens[i, t]`.

    Attributes:
        tokens: [batch, seq] int64.
        labels: [batch, seq] int64, `IGNORED` where nothing is to be predicted.
        documents: [batch, seq] int64, equal within a document and different between neighbours; None where
            attention may cross document boundaries.
        samples: [batch] int64, global count of each sample in the run's stream; it keys the dropout masks, and stays
            on the host.
    """

    tokens: Tensor
    labels: Tensor
    documents: Tensor | None
    samples: Tensor

    @property
    def valid_tokens(self) -> int:
        """Positions that count in the loss."""
        return int((self.labels != IGNORED).sum())

    def to(self, device: torch.device) -> Batch:
        """The same samples on a device."""
        if device.type == "cpu":
            return self

        def move(t: Tensor) -> Tensor:
            return t.pin_memory().to(device, non_blocking=True)

        documents = None if self.documents is None else move(self.documents)
        return Batch(move(self.tokens), move(self.labels), documents, self.samples)

    def split(self, size: int) -> list[Batch]:
        """Micro-batches of `size` samples; those in which no document ends do without a mask."""
        out = []
        for i in range(0, len(self.samples), size):
            rows = slice(i, i + size)
            documents = None if self.documents is None else self.documents[rows]
            if documents is not None and torch.equal(documents[:, 0], documents[:, -1]):
                documents = None  # they ascend, so all between are equal too
            out.append(Batch(self.tokens[rows], self.labels[rows], documents, self.samples[rows]))
        return out
