"""Which layers backward computes again, and what of them. Plain arithmetic, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from hpctrain.config.schema import TrainConfig

Again = Literal["none", "selective", "full"]
"""Of a layer: nothing, its attention, or all of it."""


def recomputed(train: TrainConfig, layers: Sequence[int]) -> dict[int, Again]:
    """What of each layer of a chunk is computed again: `train.recompute` of its first and of every
    `train.recompute_every`-th after that, and of the others nothing."""
    every = train.recompute_every
    return {layer: "none" if place % every else train.recompute for place, layer in enumerate(layers)}


def forwards(train: TrainConfig, layers: Sequence[int], attention: bool = False) -> dict[int, int]:
    """How often a micro-batch goes forward through each layer of a chunk, or through the attention of each."""
    again = ("selective", "full") if attention else ("full",)
    return {layer: 1 + (what in again) for layer, what in recomputed(train, layers).items()}
