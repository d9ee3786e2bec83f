"""FLOPs of a layer's forward by operation: what computing it again costs. Plain arithmetic, no torch.

A multiply-add is 2, attention is causal and sees half of the pairs, and what is done element by element counts each
addition, product and exponential once. Rotations and residuals are left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from hpctrain.config.schema import ModelConfig, Operation, TrainConfig
from hpctrain.layout.parameters import active, parameter_specs
from hpctrain.layout.recompute import recomputed

OF_NORM = {"rmsnorm": 4, "layernorm": 7}
"""Of an element: its square, the sum, the scale and the weight; of LayerNorm the mean, twice, and the bias too."""

OF_ACTIVATION = {"swiglu": 5, "gelu": 5, "gelu_tanh": 9}
"""Of an element of what an MLP's last linear takes."""


def attention(model: ModelConfig, seq: int) -> int:
    """Of a token of a layer: products with the keys it may see and with their values, half of `seq` each."""
    return 2 * seq * model.heads * model.head_width


@cache
def of_layer(model: ModelConfig, seq: int, routed: bool) -> dict[Operation | None, int]:
    """Of a token in a sequence of `seq`, by operation that is computed again alone; None is all of the layer."""
    layer = next(i for i in range(model.layers) if model.routed(i) == routed)
    weights: dict[str, int] = dict.fromkeys(("mlp", "experts", "shared", "rest"), 0)
    for spec in parameter_specs(model):
        if spec.layer == layer and spec.decay:
            weights[_part(spec.cuts, routed)] += active(spec, model)
    rows, width = (model.moe.top_k, model.expert_width) if model.moe and routed else (1, model.ffn_width)
    shared = model.moe.shared_ffn if model.moe and routed else 0
    activation = OF_ACTIVATION[model.activation]
    out: dict[Operation | None, int] = {
        "core_attn": attention(model, seq),
        "layernorm": 2 * OF_NORM[model.norm] * model.hidden,
        "activation": activation * (rows * width + shared),
    }
    if routed:
        assert model.moe is not None
        router = 2 * model.moe.experts * model.hidden
        out["moe"] = router + 2 * (weights["experts"] + weights["shared"]) + out["activation"]
        out["shared_experts"] = 2 * weights["shared"] + activation * shared
    else:
        out["mlp"] = 2 * weights["mlp"] + out["activation"]
    out[None] = 2 * sum(weights.values()) + sum(out[name] for name in ("core_attn", "layernorm", "activation"))
    return out


def _part(cuts: Iterable[str | None], routed: bool) -> str:
    named = set(cuts)
    if not routed:
        return "mlp" if "ffn" in named else "rest"
    return "experts" if "experts" in named else "shared" if "shared_ffn" in named else "rest"


def again(model: ModelConfig, train: TrainConfig, seq: int, layers: Iterable[int]) -> int:
    """Of a token, what the backward of a chunk's layers computes again."""
    total = 0
    for layer, what in recomputed(train, list(layers)).items():
        if what != "none":
            each = of_layer(model, seq, model.routed(layer))
            total += each[None] if what == "full" else _of_operations(model, each, set(train.recompute_ops))
    return total


def _of_operations(model: ModelConfig, each: dict[Operation | None, int], operations: set[Operation]) -> int:
    """Of named operations of a layer; what is in a larger one is counted there."""
    there = operations & {operation for operation in each if operation is not None}
    if "activation" in there and there & {"mlp", "moe"}:
        there -= {"activation"}
    total = sum(each[operation] for operation in there)
    if {"activation", "shared_experts"} <= there and model.moe is not None:
        total -= OF_ACTIVATION[model.activation] * model.moe.shared_ffn
    return total


def forward(model: ModelConfig, seq: int) -> int:
    """Of a token, the forward of all layers and of the head."""
    layers = sum(of_layer(model, seq, model.routed(layer))[None] for layer in range(model.layers))
    return layers + 2 * model.vocab * model.hidden
