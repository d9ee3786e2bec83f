"""Which layers are computed again, and how often each then runs forward."""

from __future__ import annotations

from typing import Any

from hpctrain.config.schema import TrainConfig
from hpctrain.layout.recompute import forwards, recomputed


def train(**settings: Any) -> TrainConfig:
    return TrainConfig.model_validate(settings)


def test_places_count_from_the_first_layer_of_a_chunk() -> None:
    again = recomputed(train(recompute="selective", recompute_every=2), range(3, 8))
    assert again == {3: "selective", 4: "none", 5: "selective", 6: "none", 7: "selective"}
    assert recomputed(train(recompute="full", recompute_every=9), range(3, 6)) == {3: "full", 4: "none", 5: "none"}
    assert set(recomputed(train(recompute="full"), range(4)).values()) == {"full"}
    assert set(recomputed(train(), range(4)).values()) == {"none"} and not recomputed(train(), range(0))


def test_attention_runs_again_alone_or_with_its_layer() -> None:
    some, every = (train(recompute=what, recompute_every=2) for what in ("selective", "full"))
    assert forwards(some, range(3)) == {0: 1, 1: 1, 2: 1}
    assert forwards(some, range(3), attention=True) == forwards(every, range(3)) == {0: 2, 1: 1, 2: 2}
    assert forwards(every, range(3), attention=True) == forwards(every, range(3))
