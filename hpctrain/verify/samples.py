"""Batches that hide nothing: random tokens, documents of random lengths, masks that leave between all and none."""

from __future__ import annotations

import numpy as np
import torch

from hpctrain.config.schema import RunConfig
from hpctrain.model.batch import IGNORED, Batch

END_OF_DOCUMENT = 0.15
"""Chance that a document ends at a position."""


def global_batch(config: RunConfig, step: int) -> Batch:
    """The global batch of a step, a pure function of seed and step; labels [batch, seq] as in training.

    Sample i of n counts in the loss at about i / (n - 1) of its positions: the first at none, the last at all.
    """
    rng = np.random.default_rng((config.train.seed, step))
    size, seq = config.train.global_batch, config.data.seq
    tokens = torch.from_numpy(rng.integers(0, config.model.vocab, (size, seq + 1)))
    documents = torch.from_numpy(np.cumsum(rng.random((size, seq)) < END_OF_DOCUMENT, axis=1, dtype=np.int32))
    share = np.linspace(0.0, 1.0, size)[:, None] if size > 1 else np.ones((1, 1))
    labels = tokens[:, 1:].clone()
    labels[torch.from_numpy(rng.random((size, seq)) > share)] = IGNORED
    samples = torch.arange(step * size, (step + 1) * size)
    return Batch(tokens[:, :-1].contiguous(), labels, documents if config.data.document_mask else None, samples)
