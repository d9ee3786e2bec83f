"""ZeRO with experts is the training of one plain process, with clipping that bites; tolerances as without experts."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from hpctrain.config.schema import RunConfig
from hpctrain.config.validate import validate
from tests.training import Trace, assemble, compare, make_config, reference, run

MODEL: dict[str, Any] = dict(
    layers=2,
    init_std=0.1,
    moe=dict(experts=8, top_k=2, ffn=12, shared_ffn=16, router="sigmoid", aux_loss=0.03, z_loss=0.002, bias_rate=0.02),
)
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ep2": (2, dict(ep=2)),
    "ep2-edp2": (4, dict(ep=2)),
    "tp2-ep1": (2, dict(tp=2)),
    "tp2-ep4": (4, dict(tp=2, ep=4)),
    "sp2-etp2-ep2": (4, dict(tp=2, sp=True, etp=2, ep=2)),
    "pp2-ep2-edp2": (8, dict(pp=2, ep=2)),
}
APART = dict(ep1=(2, {}), **{"tp2-ep2": (4, dict(tp=2, ep=2)), "sp2-etp2": (4, dict(tp=2, sp=True, etp=2))})
"""Layouts in which experts lie on the same ranks as dense parameters do."""


def zero_config(stage: int, world: int, parallel: dict[str, Any], **train: Any) -> RunConfig:
    config = make_config(
        model=MODEL,
        data=dict(seq=12),
        parallel=parallel,
        train={"precision": "float32", "micro_batch": 1, **train},
        sharding={"stage": stage, "bucket_mib": 0.005},
    )
    validate(config, world)
    return config


@functools.cache
def expected() -> Trace:
    return reference(make_config(model=MODEL, data=dict(seq=12)))


def check(ranks: Any, config: RunConfig, world: int) -> None:
    got, want = assemble(config, ranks(world, run, config, world)), expected()
    assert min(want.norms) > 2 * config.optimizer.clip, "clipping bites"
    assert np.allclose(got.losses, want.losses, rtol=1e-5, atol=0)
    assert np.allclose(got.norms, want.norms, rtol=1e-5, atol=0)
    compare(got, want, 1e-4)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_one_process(ranks: Any, layout: str, stage: int) -> None:
    world, parallel = LAYOUTS[layout]
    check(ranks, zero_config(stage, world, parallel), world)


@pytest.mark.parametrize("layout", APART)
def test_stage_3_where_experts_lie_as_dense_parameters_do(ranks: Any, layout: str) -> None:
    world, parallel = APART[layout]
    check(ranks, zero_config(3, world, parallel), world)
