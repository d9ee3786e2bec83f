"""Which layers backward computes again, and what of them. Plain arithmetic, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from hpctrain.config.schema import ModelConfig, Operation, TrainConfig

Again = Literal["none", "selective", "full"]
"""Of a layer: nothing, operations of it, or all of it."""

INSIDE: dict[Operation, tuple[Operation, ...]] = {
    "core_attn": (),
    "layernorm": (),
    "activation": ("mlp", "moe"),
    "mlp": (),
    "moe": (),
    "shared_experts": ("moe",),
}
"""What there is to compute again, and what all of it is in, where a model has that."""


def recomputed(train: TrainConfig, layers: Sequence[int]) -> dict[int, Again]:
    """What of each layer of a chunk is computed again: `train.recompute` of its first and of every
    `train.recompute_every`-th after that, and of the others nothing."""
    every = train.recompute_every
    return {layer: "none" if place % every else train.recompute for place, layer in enumerate(layers)}


def forwards(train: TrainConfig, layers: Sequence[int], part: tuple[Operation, ...] = ()) -> dict[int, int]:
    """How often a micro-batch goes forward through each layer of a chunk, or through a part of each.

    Args:
        part: the operations with any of which it is computed again; none: with the layer alone.
    """
    named = not set(part).isdisjoint(train.recompute_ops)
    runs = {"none": 1, "selective": 1 + named, "full": 2}
    return {layer: runs[what] for layer, what in recomputed(train, layers).items()}


def in_model(model: ModelConfig) -> tuple[Operation, ...]:
    """The operations that some layer of a model has."""
    moe = model.moe
    dense = moe is None or moe.dense_layers > 0
    there: dict[Operation, bool] = {
        "core_attn": True,
        "layernorm": True,
        "activation": True,
        "mlp": dense,
        "moe": moe is not None,
        "shared_experts": moe is not None and moe.shared_ffn > 0,
    }
    return tuple(operation for operation, has in there.items() if has)


def without_effect(model: ModelConfig, operations: Sequence[Operation], operation: Operation) -> str:
    """Why one of some named operations changes nothing, in words; empty where it does."""
    there = in_model(model)
    if operations.count(operation) > 1:
        return f"names {operation} twice"
    if operation not in there:
        lacks = {"mlp": "all layers have experts", "moe": "there are no experts", "shared_experts": "there are none"}
        return f"names {operation}, and {lacks[operation]}"
    around = [whole for whole in INSIDE[operation] if whole in there]
    if around and all(whole in operations for whole in around):
        return f"names {operation}, which is in {' and '.join(around)}"
    return ""
