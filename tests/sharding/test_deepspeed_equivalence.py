"""ZeRO 1, 2 and 3 with tensor parallelism are the training of one plain process.

Tolerances: losses and norms are sums in float32, equal to 1e-5. AdamW divides by the root of the second moment,
so a gradient near zero turns a rounding of 1e-7 into a visible part of an update; `eps=1e-6` and three steps
keep that under 1e-4 of a tensor's largest value.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from hpctrain.config.schema import RunConfig
from tests.training import Trace, assemble, compare, make_config, reference, run

MODELS: dict[str, dict[str, Any]] = {
    "gqa": {},
    "tied": {"model": {"tied": True, "bias": True, "activation": "gelu"}},
    "gpt": {"model": {"kv_heads": 4, "norm": "layernorm", "position": "learned", "dropout": 0.1}},
}


def zero_config(stage: int, tp: int, name: str = "gqa", sp: bool = False, **train: Any) -> RunConfig:
    sections = {k: dict(v) for k, v in MODELS[name].items()}
    return make_config(
        **sections,
        data={"seq": 12},
        parallel={"tp": tp, "sp": sp},
        train={"precision": "float32", "micro_batch": 2, **train},
        sharding={"stage": stage, "bucket_mib": 0.005},
    )


@functools.cache
def expected(name: str) -> Trace:
    return reference(make_config(**MODELS[name], data={"seq": 12}, train={"micro_batch": 2}))


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    ("tp", "dp", "name", "sp"),
    [
        (1, 2, "tied", False),
        (2, 2, "gqa", False),
        (4, 1, "gqa", False),
        (2, 1, "gpt", False),
        (2, 2, "gpt", True),
        (4, 1, "tied", True),
    ],
)
def test_equals_one_process(ranks: Any, stage: int, tp: int, dp: int, name: str, sp: bool) -> None:
    config = zero_config(stage, tp, name, sp)
    got = assemble(config, ranks(tp * dp, run, config, tp * dp))
    assert np.allclose(got.losses, expected(name).losses, rtol=1e-5, atol=0)
    assert np.allclose(got.norms, expected(name).norms, rtol=1e-5, atol=0)
    compare(got, expected(name), 1e-4)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("sp", [False, True])
def test_equals_engine_none(ranks: Any, stage: int, sp: bool) -> None:
    config = zero_config(stage, tp=2, sp=sp)
    plain = config.model_copy(update={"sharding": make_config().sharding})
    got, want = (assemble(c, ranks(4, run, c, 4)) for c in (config, plain))
    want.gradients.clear()
    compare(got, want, 1e-4)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_twice_is_bit_equal(ranks: Any, stage: int, precision: str) -> None:
    config = zero_config(stage, tp=2, precision=precision)
    first, second = (assemble(config, ranks(4, run, config, 4)) for _ in range(2))
    assert first.losses == second.losses and first.norms == second.norms
    assert all((first.weights[name] == second.weights[name]).all() for name in first.weights)
