"""Building the engine: the values it begins with, and the memory that takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hpctrain.config.schema import RunConfig
from hpctrain.layout.memory import estimate
from hpctrain.layout.parameters import parameter_specs
from hpctrain.sharding.deepspeed.initial import make_hollow
from hpctrain.telemetry.live import LiveBytes
from tests.sharding.deepspeed_case import Checkpoint, start, zero_config
from tests.training import global_batch

DEEP: dict[str, Any] = {"layers": 12, "hidden": 48, "heads": 4, "kv_heads": 4, "head_dim": 12, "ffn": 192, "vocab": 192}
"""Many layers, of which none, nor the vocabulary, is much of the whole."""


def deep(stage: int, precision: str, tp: int = 1) -> RunConfig:
    return zero_config(stage, tp, DEEP, precision=precision)


def test_hollow_parameters_take_no_memory() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(300, 200, device="meta"), torch.nn.LayerNorm(200))
    make_hollow(model, torch.bfloat16, torch.device("cpu"), sharded=False)
    assert [tuple(p.shape) for p in model.parameters()] == [(200, 300), (200,), (200,), (200,)]
    for p in model.parameters():
        assert p.dtype == torch.bfloat16 and p.device.type == "cpu" and p.requires_grad and not p.any()
        assert p.untyped_storage().nbytes() == 2


def _initial_masters(stage: int, precision: str, tp: int) -> Any:
    config = zero_config(stage, tp, precision=precision)
    engine, mesh = start(config)
    dtypes = {p.dtype for p in engine.chunks[0].parameters()}
    weights = {k: values.numpy() for k, values in Checkpoint(config, engine, mesh).tensors.items()}
    return weights, dtypes, float(engine.evaluate(0, global_batch(config, 0)))


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("tp", [1, 2])
def test_begins_where_engine_none_does(ranks: Any, stage: int, tp: int) -> None:
    """Master weights unrounded, and the weights that compute are their rounding."""
    expected, dtypes, loss = ranks(2 * tp, _initial_masters, 0, "bf16", tp)[0]
    for found, types, same in ranks(2 * tp, _initial_masters, stage, "bf16", tp):
        assert types == dtypes == {torch.bfloat16}
        assert same == pytest.approx(loss, rel=1e-6)
        assert all((found[key] == expected[key]).all() for key in expected)


def _peak(stage: int, precision: str, tp: int) -> Any:
    """Most bytes alive while model and engine are made, bytes that stay, the estimate, and bytes of buckets."""
    config = deep(stage, precision, tp)
    with LiveBytes() as live:
        _, mesh = start(config)
    return live.peak, live.now(), estimate(config, mesh.layout), int(config.sharding.bucket_mib * 2**20)


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize(("world", "tp"), [(8, 1), (4, 2)])
def test_stage_three_never_holds_the_model(ranks: Any, precision: str, world: int, tp: int) -> None:
    """No more than what stays, and a layer; at most 2 + 4 + 4 + 8 bytes of an eighth (or 4) of it, and no 4 of all."""
    specs = parameter_specs(deep(3, precision).model)
    whole = 4 * sum(spec.numel for spec in specs) // tp
    layer = 4 * sum(spec.numel for spec in specs if spec.layer == 0) // tp
    for peak, after, _, _ in ranks(world, _peak, 3, precision, tp):
        assert peak - after < layer < whole / 10
        assert tp > 1 or peak < 0.7 * whole


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_building_needs_what_is_estimated(ranks: Any, stage: int, precision: str) -> None:
    for peak, _, memory, buckets in ranks(4, _peak, stage, precision, 1):
        assert memory.building <= peak <= 1.01 * memory.building + 2 * buckets


@pytest.mark.parametrize("precision", ["float32", "bf16", "fp16"])
def test_engine_none_needs_more_for_a_step(ranks: Any, precision: str) -> None:
    for peak, _, memory, _ in ranks(2, _peak, 0, precision, 1):
        assert memory.building == 0 and peak < memory.training - memory.activations
