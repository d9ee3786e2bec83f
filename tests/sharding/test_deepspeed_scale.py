"""Skipped steps, and the loss scale of fp16: when it changes, and how it travels between engines and precisions."""

from __future__ import annotations

import math
from typing import Any

import pytest

from hpctrain.sharding import scaler
from tests.sharding.deepspeed_case import Checkpoint, start, zero_config
from tests.training import LR, global_batch, train_step

STAGES = [1, 2, 3]


def _overflowing(stage: int, scale: float) -> Any:
    config = zero_config(stage, precision="fp16", loss_scale=scale)
    engine, mesh = start(config)
    out = []
    for _ in range(3):
        batch = global_batch(config, 0)
        engine.begin_step(batch.valid_tokens, 1)
        engine.backward(engine.forward(0, batch.split(4)[mesh.rank]))
        result = engine.step(LR[0])
        out.append((result.skipped, result.backed_off, engine.scalars()["loss_scale"]))
    return out


@pytest.mark.parametrize("stage", STAGES)
def test_fp16_overflow_halves_the_scale(ranks: Any, stage: int) -> None:
    scale = 3.0 * 2.0**40
    for out in ranks(2, _overflowing, stage, scale):
        assert out == [(True, True, scale / 2), (True, True, scale / 4), (True, True, scale / 8)]


def _at_smallest_scale(stage: int) -> Any:
    config = zero_config(stage, precision="fp16", loss_scale=1.0)
    engine, mesh = start(config)
    out = []
    for factor in (math.inf, math.inf, 1.0):
        batch = global_batch(config, 0)
        engine.begin_step(batch.valid_tokens, 1)
        ticket = engine.forward(0, batch.split(4)[mesh.rank])
        ticket.output = ticket.output * factor
        engine.backward(ticket)
        result = engine.step(LR[0])
        out.append((result.skipped, result.backed_off, engine.scalars()["loss_scale"]))
    return out


@pytest.mark.parametrize("stage", STAGES)
def test_smallest_loss_scale_is_endured(ranks: Any, stage: int) -> None:
    for out in ranks(2, _at_smallest_scale, stage):
        assert out == [(True, False, 1.0), (True, False, 1.0), (False, False, 1.0)]


def _refusing(stage: int, precision: str, factors: list[float]) -> Any:
    """Steps on batches 0, 1, ...; one is refused for each factor, by which its own loss is multiplied, after the
    first. Outcomes of the refused steps, and the state in the end."""
    config = zero_config(stage, precision=precision, loss_scale=64.0)
    engine, mesh = start(config)
    outcomes = []
    train_step(engine, mesh, config, 0)
    for factor in factors:
        batch = global_batch(config, 5)
        engine.begin_step(batch.valid_tokens, 1)
        ticket = engine.forward(0, batch.split(4)[mesh.rank])
        ticket.output = ticket.output * factor
        engine.backward(ticket)
        result = engine.step(LR[0], loss_finite=False)
        outcomes.append((result.skipped, result.backed_off, math.isnan(result.grad_norm)))
    traces = [train_step(engine, mesh, config, step) for step in (1, 2)]
    checkpoint = Checkpoint(config, engine, mesh)
    return outcomes, traces, {k: t.numpy() for k, t in checkpoint.tensors.items()}, checkpoint.scalars()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("precision", ["float32", "bf16", "fp16"])
def test_a_loss_that_is_not_finite_leaves_no_trace(ranks: Any, stage: int, precision: str) -> None:
    """The refused steps have a fine gradient, one that overflows, and one that is NaN."""
    factors = [1.0, math.inf, math.nan]
    disturbed, plain = ranks(2, _refusing, stage, precision, factors), ranks(2, _refusing, stage, precision, [])
    for (outcomes, traces, tensors, scalars), (_, expected, wanted, numbers) in zip(disturbed, plain):
        assert outcomes == [(True, False, True)] * 3
        assert traces == expected and scalars == numbers
        assert all((tensors[key] == wanted[key]).all() for key in wanted)
        assert scalars["step"] == 3.0 and ("loss_scale" in scalars) == (precision == "fp16")


Leg = tuple[int, str, int]


def _legs(legs: list[Leg]) -> Any:
    """Steps under each (stage, precision, steps), state handed on in memory: loss, norm and numbers of each."""
    scaler.GROWTH_INTERVAL = 3
    out: list[Any] = []
    checkpoint: Checkpoint | None = None
    for stage, precision, steps in legs:
        config = zero_config(stage, precision=precision, loss_scale=64.0)
        engine, mesh = start(config)
        if checkpoint is not None:
            engine.load(checkpoint)
        for _ in range(steps):
            trace = train_step(engine, mesh, config, len(out))
            out.append((*trace, engine.scalars()))
        checkpoint = Checkpoint(config, engine, mesh)
        engine.close()
    return out


def numbers(out: Any) -> list[tuple[float, float]]:
    return [(scalars["loss_scale"], scalars["loss_scale_good_steps"]) for *_, scalars in out]


GROWING = [(64.0, 1.0), (64.0, 2.0), (128.0, 0.0), (128.0, 1.0), (128.0, 2.0), (256.0, 0.0), (256.0, 1.0)]


@pytest.mark.parametrize("stage", STAGES)
def test_the_history_of_the_scale_survives_a_resume(ranks: Any, stage: int) -> None:
    straight, resumed = ranks(2, _legs, [(stage, "fp16", 7)]), ranks(2, _legs, [(stage, "fp16", 4), (stage, "fp16", 3)])
    assert straight == resumed
    assert numbers(straight[0]) == GROWING


@pytest.mark.parametrize("stages", [(1, 0), (0, 2), (3, 0)], ids=str)
def test_the_scale_is_handed_on_between_engines(ranks: Any, stages: tuple[int, int]) -> None:
    """And a step after which it grows is one like any other: its gradient is divided by the scale it was taken at."""
    plain = ranks(2, _legs, [(0, "fp16", 7)])[0]
    for out in ranks(2, _legs, [(stages[0], "fp16", 4), (stages[1], "fp16", 3)]):
        assert numbers(out) == GROWING
        for (loss, norm, _), (expected_loss, expected_norm, _) in zip(out, plain):
            assert loss == pytest.approx(expected_loss, rel=2e-3)
            assert norm == pytest.approx(expected_norm, rel=2e-2)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("precision", ["bf16", "float32"])
def test_a_precision_without_a_scale_hands_none_on(ranks: Any, stage: int, precision: str) -> None:
    for out in ranks(2, _legs, [(stage, precision, 2), (stage, "fp16", 1), (stage, precision, 1)]):
        assert out[1][-1] == {"step": 2.0}
        assert out[2][-1] == {"step": 3.0, "loss_scale": 64.0, "loss_scale_good_steps": 1.0}
        assert out[3][-1] == {"step": 4.0}
