"""What a model is fed."""

from __future__ import annotations

from collections.abc import Sequence
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
        documents: [batch, seq] int32, equal within a document and different between neighbours; None where
            attention may cross document boundaries. In a part of the samples, still of the whole ones.
        samples: [batch] int64, global count of each sample in the run's stream; it keys the dropout masks, and stays
            on the host.
        positions: [seq] int64, ascending places in the samples that the tokens have; None: 0, 1, 2, ...
    """

    tokens: Tensor
    labels: Tensor
    documents: Tensor | None
    samples: Tensor
    positions: Tensor | None = None

    @property
    def valid_tokens(self) -> int:
        """Positions that count in the loss."""
        return int((self.labels != IGNORED).sum())

    def to(self, device: torch.device) -> Batch:
        """The same samples on a device."""
        if device.type == "cpu":
            return self

        def move(t: Tensor) -> Tensor:
            return (t if t.is_pinned() else t.pin_memory()).to(device, non_blocking=True)

        documents, positions = (None if t is None else move(t) for t in (self.documents, self.positions))
        return Batch(move(self.tokens), move(self.labels), documents, self.samples, positions)

    def pinned(self) -> Batch:
        """The same samples in memory that a GPU copies from by itself."""
        documents, positions = (None if t is None else t.pin_memory() for t in (self.documents, self.positions))
        return Batch(self.tokens.pin_memory(), self.labels.pin_memory(), documents, self.samples, positions)

    def part(self, spans: Sequence[tuple[int, int]]) -> Batch:
        """These stretches of whole samples, (start, end) each, one after the other; labels stay those of the tokens."""
        assert self.positions is None, "a part is taken of whole samples"
        if sum(end - start for start, end in spans) == self.tokens.shape[1]:
            return self
        positions = torch.cat([torch.arange(start, end) for start, end in spans])
        tokens, labels = self.tokens[:, positions], self.labels[:, positions]
        return Batch(tokens, labels, self.documents, self.samples, positions)

    def split(self, size: int) -> list[Batch]:
        """Micro-batches of `size` samples; those in which no document ends do without a mask."""
        out = []
        for i in range(0, len(self.samples), size):
            rows = slice(i, i + size)
            documents = None if self.documents is None else self.documents[rows]
            if documents is not None and torch.equal(documents[:, 0], documents[:, -1]):
                documents = None  # they ascend, so all between are equal too
            out.append(Batch(self.tokens[rows], self.labels[rows], documents, self.samples[rows], self.positions))
        return out
