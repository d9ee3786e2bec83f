"""Engine `fsdp` is the training of one plain process: in float64 to 1e-9, beside every axis and under every setting.

In float32 it equals engine `none` of the same layout. Tolerances there as for ZeRO: losses and norms are sums in
float32, equal to 2e-6; what AdamW makes of rounding stays under 1e-4 of a tensor's largest value.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from hpctrain.config.schema import RunConfig
from tests.sharding.fsdp_case import MODELS, as_none, fsdp_config
from tests.training import Trace, assemble, compare, make_config, reference, run

CASES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "dp2": (2, "gqa", {}),
    "dp4": (4, "tied", {}),
    "dp2-recomputed": (2, "gpt", dict(recompute="full", micro_batch=2)),
    "dp2-kept": (2, "tied", dict(reshard_after_forward=False)),
    "dp2-once": (2, "gqa", dict(reduce_every="step")),
    "dp2-kept-once": (2, "gpt", dict(reduce_every="step", reshard_after_forward=False, recompute="selective")),
    "dp2-one-micro-batch": (2, "tied", dict(micro_batch=4, prefetch=0)),
    "dp2-far-ahead": (2, "gpt", dict(prefetch=7)),
    "dp2-in-turn": (2, "gqa", dict(overlap=False)),
    "dp2-offloaded": (2, "tied", dict(offload=dict(params="cpu", optimizer="cpu"))),
    "tp2-dp2-offloaded": (4, "gqa", dict(tp=2, offload=dict(params="cpu", optimizer="cpu"))),
    "1f1b-dp2-offloaded": (4, "deep", dict(pp=2, offload=dict(params="cpu", optimizer="cpu"))),
    "1f1b-tp2-dp2-offloaded": (8, "deep", dict(pp=2, tp=2, offload=dict(params="cpu", optimizer="cpu"))),
    "hsdp": (4, "tied", dict(replicas=2)),
    "hsdp-once": (4, "gpt", dict(replicas=2, reduce_every="step", reshard_after_forward=False)),
    "hsdp-of-one": (4, "gqa", dict(replicas=4)),
    "tp2": (2, "gqa", dict(tp=2)),
    "tp2-dp2": (4, "tied", dict(tp=2)),
    "tp4-dp2": (8, "gqa", dict(tp=4)),
    "sp2-dp2": (4, "gpt", dict(tp=2, sp=True, recompute="full")),
    "cp2": (2, "gqa", dict(cp=2)),
    "cp2-dp2-hsdp": (4, "gqa", dict(cp=2, cp_method="ulysses", replicas=2)),
    "gpipe-dp2": (4, "deep", dict(pp=2, schedule="gpipe")),
    "1f1b-dp2": (4, "deep", dict(pp=2)),
    "1f1b-dp2-once": (4, "deep", dict(pp=2, reduce_every="step")),
    "1f1b-dp2-kept": (4, "deep", dict(pp=2, reshard_after_forward=False, recompute="full")),
    "1f1b-tp2-dp2": (8, "deep", dict(pp=2, tp=2)),
    "interleaved-dp2": (4, "deep", dict(pp=2, schedule="interleaved", chunks=2, prefetch=2)),
    "interleaved-hsdp": (8, "deep", dict(pp=2, schedule="interleaved", chunks=2, replicas=2)),
    "dp2-experts": (2, "moe", {}),
    "ep2": (2, "moe", dict(ep=2)),
    "ep2-edp2": (4, "moe", dict(ep=2, recompute="full")),
    "ep2-edp2-hsdp": (4, "moe", dict(ep=2, replicas=2)),
    "edp4-of-six": (4, "six", dict(prefetch=2)),
    "tp2-ep4": (4, "moe", dict(tp=2, ep=4)),
    "sp2-etp2-ep2": (4, "moe", dict(tp=2, sp=True, etp=2, ep=2)),
    "cp2-ep2": (4, "moe", dict(cp=2, ep=2)),
    "pp2-ep2-edp2": (8, "moe", dict(pp=2, ep=2)),
}


def config_of(name: str, **more: Any) -> RunConfig:
    world, model, settings = CASES[name]
    return fsdp_config(world, model, **(settings | more))


@functools.cache
def expected(model: str) -> Trace:
    return reference(make_config(model=MODELS[model], data={"seq": 12}))


@pytest.mark.parametrize("name", CASES)
def test_float64_equals_one_process(ranks: Any, name: str) -> None:
    world, model, _ = CASES[name]
    config = config_of(name)
    got, want = assemble(config, ranks(world, run, config, world)), expected(model)
    assert min(want.norms) > 2 * config.optimizer.clip, "clipping bites"
    assert got.gradients.keys() <= want.weights.keys() and got.weights.keys() == want.weights.keys()
    compare(got, want, 1e-9)


@pytest.mark.parametrize("name", ["dp4", "hsdp", "sp2-dp2", "1f1b-tp2-dp2", "ep2-edp2", "cp2-dp2-hsdp"])
def test_float32_equals_engine_none(ranks: Any, name: str) -> None:
    world, _, _ = CASES[name]
    config = config_of(name, precision="float32")
    got, want = (assemble(c, ranks(world, run, c, world)) for c in (config, as_none(config)))
    assert np.allclose(got.losses, want.losses, rtol=2e-6, atol=0)
    assert np.allclose(got.norms, want.norms, rtol=2e-6, atol=0)
    compare(got, want, 1e-4)


@pytest.mark.parametrize(
    ("name", "precision"), [("dp4", "bf16"), ("hsdp", "float32"), ("interleaved-dp2", "bf16"), ("ep2-edp2", "float32")]
)
def test_twice_is_bit_equal(ranks: Any, name: str, precision: str) -> None:
    world, _, _ = CASES[name]
    config = config_of(name, precision=precision)
    first, second = (assemble(config, ranks(world, run, config, world)) for _ in range(2))
    assert first.losses == second.losses and first.norms == second.norms
    assert all((first.weights[name] == second.weights[name]).all() for name in first.weights)


@pytest.mark.parametrize(
    ("name", "settings", "tolerance"),
    [
        ("dp2", dict(precision="bf16"), 2e-3),
        ("dp2", dict(precision="bf16", reduce_dtype="bf16"), 4e-3),
        ("hsdp", dict(precision="bf16", reduce_dtype="bf16"), 4e-3),
        ("interleaved-dp2", dict(precision="bf16"), 2e-3),
        ("dp2-once", dict(precision="fp16", loss_scale=1024.0), 1e-3),
        ("1f1b-dp2", dict(precision="fp16", loss_scale=1024.0), 1e-3),
    ],
)
def test_low_precisions_train_as_engine_none_does(
    ranks: Any, name: str, settings: dict[str, Any], tolerance: float
) -> None:
    """The first loss to the bit: both compute it with the same rounded weights. The rest as rounding moves it."""
    world, _, _ = CASES[name]
    config = config_of(name, **settings)
    got, want = (assemble(c, ranks(world, run, c, world)) for c in (config, as_none(config)))
    assert got.losses[0] == pytest.approx(want.losses[0], rel=1e-12)
    assert np.allclose(got.losses, want.losses, rtol=tolerance, atol=0), (got.losses, want.losses)
    assert np.allclose(got.norms, want.norms, rtol=10 * tolerance, atol=0), (got.norms, want.norms)
