"""FLOPs of what is computed again."""

from __future__ import annotations

from typing import Any

from hpctrain.config.schema import ModelConfig, TrainConfig
from hpctrain.layout.forward_flops import again, forward, of_layer
from hpctrain.layout.parameters import matmul_weights

SMALL: dict[str, Any] = dict(layers=3, hidden=8, heads=2, ffn=16, vocab=32)
MOE: dict[str, Any] = dict(experts=4, top_k=2, ffn=4, shared_ffn=8, dense_layers=1)


def train(*operations: str, every: int = 1) -> TrainConfig:
    settings = {"recompute": "selective", "recompute_ops": operations, "recompute_every": every}
    return TrainConfig.model_validate(settings)


def test_a_dense_layer_by_hand() -> None:
    """In a sequence of 10: half of 10 scores and of 10 values for each of 8 columns, 4 a number of each norm, 5 a
    column of the MLP."""
    found = of_layer(ModelConfig(**SMALL), 10, False)
    attention, mlp = 2 * 4 * 8 * 8, 2 * 3 * 8 * 16
    scores, norms, activation = 2 * 2 * 8 * 10 // 2, 2 * 4 * 8, 5 * 16
    assert found["core_attn"] == scores and found["layernorm"] == norms and found["activation"] == activation
    assert found["mlp"] == mlp + activation
    assert found[None] == attention + mlp + scores + norms + activation
    gpt = of_layer(ModelConfig(**SMALL, activation="gelu", norm="layernorm"), 10, False)
    assert gpt["mlp"] == 2 * 2 * 8 * 16 + 5 * 16 and gpt["layernorm"] == 2 * 7 * 8


def test_experts_by_hand() -> None:
    """2 of 4 experts 4 wide, a shared one of 8, a router."""
    found = of_layer(ModelConfig(**SMALL, moe=MOE), 10, True)
    of_experts, shared, router = 2 * 3 * 8 * 4 * 2, 2 * 3 * 8 * 8, 2 * 4 * 8
    assert found["activation"] == 5 * (2 * 4 + 8) and found["shared_experts"] == shared + 5 * 8
    assert found["moe"] == router + of_experts + shared + found["activation"] and "mlp" not in found


def test_products_of_a_forward_are_those_of_the_counter() -> None:
    """A third of 6 a weight; the rest is attention and what is done element by element."""
    for moe in (None, MOE):
        model = ModelConfig(**SMALL, moe=moe)
        each = [of_layer(model, 10, model.routed(layer)) for layer in range(3)]
        rest = sum(layer[name] for layer in each for name in ("core_attn", "layernorm", "activation"))
        assert forward(model, 10) - rest == 2 * matmul_weights(model)


def test_what_is_in_something_larger_counts_once() -> None:
    model = ModelConfig(**SMALL, moe=MOE)
    dense, routed = (of_layer(model, 10, kind) for kind in (False, True))
    assert again(model, train("mlp", "activation"), 10, range(2)) == dense["mlp"] + routed["activation"]
    some = train("activation", "shared_experts")
    assert again(model, some, 10, range(1, 2)) == routed["activation"] + routed["shared_experts"] - 5 * 8
    assert again(model, train("activation", "moe"), 10, range(2)) == dense["activation"] + routed["moe"]
    assert again(model, train("layernorm", every=2), 10, range(3)) == 2 * dense["layernorm"]
    full = TrainConfig(recompute="full")
    assert again(model, full, 10, range(3)) == dense[None] + 2 * routed[None]
    assert again(model, TrainConfig(), 10, range(3)) == 0
