"""Which layers are computed again, and how often each then runs forward."""

from __future__ import annotations

from typing import Any

from hpctrain.config.schema import ModelConfig, TrainConfig
from hpctrain.layout.recompute import forwards, in_model, recomputed, without_effect


def train(**settings: Any) -> TrainConfig:
    return TrainConfig.model_validate(settings)


def model(**moe: Any) -> ModelConfig:
    return ModelConfig.model_validate({"moe": moe})


def test_places_count_from_the_first_layer_of_a_chunk() -> None:
    again = recomputed(train(recompute="selective", recompute_every=2), range(3, 8))
    assert again == {3: "selective", 4: "none", 5: "selective", 6: "none", 7: "selective"}
    assert recomputed(train(recompute="full", recompute_every=9), range(3, 6)) == {3: "full", 4: "none", 5: "none"}
    assert set(recomputed(train(recompute="full"), range(4)).values()) == {"full"}
    assert set(recomputed(train(), range(4)).values()) == {"none"} and not recomputed(train(), range(0))


def test_attention_runs_again_alone_or_with_its_layer() -> None:
    some, every = (train(recompute=what, recompute_every=2) for what in ("selective", "full"))
    assert forwards(some, range(3)) == {0: 1, 1: 1, 2: 1}
    assert forwards(some, range(3), ("core_attn",)) == forwards(every, range(3)) == {0: 2, 1: 1, 2: 2}
    assert forwards(every, range(3), ("core_attn",)) == forwards(every, range(3))


def test_a_part_runs_again_with_any_operation_that_has_it() -> None:
    some = train(recompute="selective", recompute_ops=["mlp", "moe"])
    assert forwards(some, range(2), ("moe", "shared_experts")) == forwards(some, range(2), ("mlp",)) == {0: 2, 1: 2}
    assert forwards(some, range(2)) == forwards(some, range(2), ("core_attn",)) == {0: 1, 1: 1}


def test_operations_are_those_that_the_model_has() -> None:
    dense, some, all_routed = ModelConfig(), model(dense_layers=1, shared_ffn=8), model()
    assert in_model(dense) == ("core_attn", "layernorm", "activation", "mlp")
    assert in_model(some) == (*in_model(dense), "moe", "shared_experts")
    assert in_model(all_routed) == ("core_attn", "layernorm", "activation", "moe")
    for of, operations, operation, words in (
        (dense, ["moe"], "moe", "there are no experts"),
        (dense, ["activation", "mlp"], "activation", "which is in mlp"),
        (all_routed, ["mlp"], "mlp", "all layers have experts"),
        (all_routed, ["moe", "activation"], "activation", "which is in moe"),
        (some, ["moe", "shared_experts"], "shared_experts", "which is in moe"),
        (some, ["mlp", "moe", "activation"], "activation", "which is in mlp and moe"),
        (some, ["mlp", "mlp"], "mlp", "twice"),
    ):
        assert words in without_effect(of, operations, operation)
    for operations in (["moe", "activation"], ["mlp", "activation", "shared_experts"]):
        assert not any(without_effect(some, operations, operation) for operation in operations)
