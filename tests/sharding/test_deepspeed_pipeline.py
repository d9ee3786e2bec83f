"""ZeRO 1, 2 and 3 in a pipeline are the training of one plain process.

Tolerances as in `test_deepspeed_equivalence.py`.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from hpctrain.config.schema import RunConfig
from tests.training import Trace, assemble, compare, make_config, reference, run

MODELS: dict[str, dict[str, Any]] = {
    "plain": {"layers": 4, "hidden": 21},
    "tied": {"layers": 4, "hidden": 21, "tied": True, "bias": True, "activation": "gelu"},
    "gpt": {"layers": 4, "kv_heads": 4, "norm": "layernorm", "position": "learned", "dropout": 0.1},
}

# model, ranks, parallel
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "gpipe-dp": ("plain", 4, {"pp": 2, "schedule": "gpipe"}),
    "1f1b-dp-tied": ("tied", 4, {"pp": 2}),
    "1f1b-tp-tied": ("tied", 4, {"pp": 2, "tp": 2}),
    "1f1b-three": ("gpt", 3, {"pp": 3, "stage_layers": (1, 2, 1)}),
    "interleaved-dp": ("tied", 4, {"pp": 2, "schedule": "interleaved", "chunks": 2}),
    "interleaved-tp-dp": ("plain", 8, {"pp": 2, "tp": 2, "schedule": "interleaved", "chunks": 2}),
}


def zero_config(name: str, stage: int, **train: Any) -> RunConfig:
    model, _, parallel = CASES[name]
    return make_config(
        model=MODELS[model],
        parallel=parallel,
        train={"precision": "float32", "micro_batch": 1, **train},
        sharding={"stage": stage, "bucket_mib": 0.005},
    )


@functools.cache
def expected(model: str) -> Trace:
    return reference(make_config(model=MODELS[model]))


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("name", CASES)
def test_equals_one_process(ranks: Any, name: str, stage: int) -> None:
    check(ranks, name, zero_config(name, stage))


@pytest.mark.parametrize("name", ["gpipe-dp", "1f1b-dp-tied", "interleaved-tp-dp"])
def test_keeping_weights_for_backward_changes_nothing(ranks: Any, name: str) -> None:
    config = zero_config(name, 3)
    sharding = config.sharding.model_copy(update={"reshard_after_forward": False})
    check(ranks, name, config.model_copy(update={"sharding": sharding}))


def check(ranks: Any, name: str, config: RunConfig) -> None:
    model, world, _ = CASES[name]
    got, want = assemble(config, ranks(world, run, config, world)), expected(model)
    assert got.weights.keys() == want.weights.keys()
    assert np.allclose(got.losses, want.losses, rtol=1e-5, atol=0)
    assert np.allclose(got.norms, want.norms, rtol=1e-5, atol=0)
    compare(got, want, 1e-4)
