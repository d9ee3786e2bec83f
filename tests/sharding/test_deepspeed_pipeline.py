"""ZeRO 1, 2 and 3 in a pipeline are the training of one plain process, and that of engine `none` in the same precision.

Tolerances as in `test_deepspeed_equivalence.py`; losses and norms are those of `none` to 2e-6.
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
    "sp-dp-tied": ("tied", 8, {"pp": 2, "tp": 2, "sp": True}),
}
"""The one with sp also computes activations again."""


def zero_config(name: str, stage: int, **train: Any) -> RunConfig:
    model, _, parallel = CASES[name]
    seq, recompute = (12, "full") if parallel.get("sp") else (13, "none")
    return make_config(
        model=MODELS[model],
        parallel=parallel,
        data={"seq": seq},
        train={"precision": "float32", "micro_batch": 1, "recompute": recompute, **train},
        sharding={"stage": stage, "bucket_mib": 0.005},
    )


@functools.cache
def expected(model: str, seq: int) -> Trace:
    return reference(make_config(model=MODELS[model], data={"seq": seq}))


OF_NONE: dict[str, Trace] = {}


def of_none(ranks: Any, name: str) -> Trace:
    """The same layout under engine `none`, in the same precision."""
    if name not in OF_NONE:
        config, world = zero_config(name, 0), CASES[name][1]
        OF_NONE[name] = assemble(config, ranks(world, run, config, world))
    return OF_NONE[name]


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
    got = assemble(config, ranks(world, run, config, world))
    for want, tolerance in ((expected(model, config.data.seq), 1e-5), (of_none(ranks, name), 2e-6)):
        assert got.weights.keys() == want.weights.keys()
        assert np.allclose(got.losses, want.losses, rtol=tolerance, atol=0)
        assert np.allclose(got.norms, want.norms, rtol=tolerance, atol=0)
        compare(got, want, 1e-4)
