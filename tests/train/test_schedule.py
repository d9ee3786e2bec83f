"""The learning rate by hand values and by its shape."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.config.schema import OptimizerConfig, TrainConfig
from hpctrain.train.schedule import learning_rate, peak_lr

Name = Literal["cosine", "wsd", "constant"]
NAMES: tuple[Name, ...] = ("cosine", "wsd", "constant")


def rates(steps: int, **settings: Any) -> list[float]:
    optimizer, train = OptimizerConfig(**{"lr": 1.0, **settings}), TrainConfig(steps=steps)
    return [learning_rate(optimizer, train, step) for step in range(steps)]


def test_cosine_by_hand() -> None:
    # Peak at index 3, 8 steps down to 0.2 at index 11; a quarter, half and three quarters of the way by hand.
    got = rates(12, schedule="cosine", warmup_steps=4, min_ratio=0.2)
    assert got[:4] == [0.25, 0.5, 0.75, 1.0]
    assert got[5] == pytest.approx(0.2 + 0.8 * (1 + math.sqrt(0.5)) / 2)
    assert got[7] == pytest.approx(0.6)
    assert got[9] == pytest.approx(0.2 + 0.8 * (1 - math.sqrt(0.5)) / 2)
    assert got[11] == 0.2


def test_wsd_by_hand() -> None:
    got = rates(10, schedule="wsd", warmup_steps=2, decay_steps=4, min_ratio=0.0)
    assert got == [0.5, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0.0]


def test_wsd_decays_over_a_tenth_by_default() -> None:
    got = rates(100, schedule="wsd", min_ratio=0.5)
    assert got[:90] == [1.0] * 90
    assert got[90:] == pytest.approx([1 - 0.05 * k for k in range(1, 11)])
    assert rates(5, schedule="wsd", min_ratio=0.5) == [1, 1, 1, 1, 0.5]


def test_constant_by_hand() -> None:
    assert rates(5, schedule="constant", warmup_steps=2, min_ratio=0.0) == [0.5, 1, 1, 1, 1]


def test_wsd_longer_than_what_warmup_leaves_is_cut_to_it() -> None:
    assert rates(6, schedule="wsd", warmup_steps=2, decay_steps=100, min_ratio=0.0) == [0.5, 1, 0.75, 0.5, 0.25, 0]


@pytest.mark.parametrize("schedule", NAMES)
def test_edges(schedule: Name) -> None:
    assert rates(1, schedule=schedule) == [1.0]
    assert rates(4, schedule=schedule, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0]
    assert rates(2, schedule=schedule, warmup_steps=8) == [0.125, 0.25]
    optimizer, train = OptimizerConfig(lr=1.0, schedule=schedule, min_ratio=0.3), TrainConfig(steps=7)
    assert learning_rate(optimizer, train, 700) == learning_rate(optimizer, train, 6)


@pytest.mark.parametrize(
    "rule, base, expected", [("none", 64, 1.0), ("linear", 64, 4.0), ("sqrt", 64, 2.0), ("linear", 0, 1.0)]
)
def test_rule_for_another_global_batch(rule: Literal["none", "linear", "sqrt"], base: int, expected: float) -> None:
    optimizer = OptimizerConfig(lr=1.0, batch_rule=rule, base_global_batch=base, warmup_steps=2, min_ratio=0.5)
    train = TrainConfig(steps=9, global_batch=256)
    assert peak_lr(optimizer, train) == expected
    assert learning_rate(optimizer, train, 0) == expected / 2
    assert learning_rate(optimizer, train, 1) == expected
    assert learning_rate(optimizer, train, 8) == expected / 2


@given(
    schedule=st.sampled_from(NAMES),
    steps=st.integers(1, 300),
    warmup=st.integers(0, 320),
    decay=st.integers(0, 320),
    ratio=st.floats(0, 1),
    lr=st.floats(1e-6, 10),
)
def test_shape(schedule: Name, steps: int, warmup: int, decay: int, ratio: float, lr: float) -> None:
    optimizer = OptimizerConfig(lr=lr, schedule=schedule, warmup_steps=warmup, decay_steps=decay, min_ratio=ratio)
    train = TrainConfig(steps=steps)
    got = [learning_rate(optimizer, train, step) for step in range(steps)]
    top, slack = max(warmup - 1, 0), lr * 1e-12
    assert got[0] > 0
    assert all(a <= b for a, b in pairwise(got[: top + 1])), "rises during warm-up"
    assert all(b <= a + slack for a, b in pairwise(got[top:])), "never rises after it"
    assert max(got) <= lr and all(r >= lr * ratio - slack for r in got[top:])
    if top < steps:
        assert got[top] == lr
    if top < steps - 1 and schedule != "constant":
        assert got[-1] == lr * ratio
    # No jumps: no step changes more than the steepest piece of its length allows.
    span = steps - 1 - top if schedule == "cosine" else min(decay or max(steps // 10, 1), max(steps - 1 - top, 1))
    steepest = lr * max(1 / warmup if warmup else 0, (1 - ratio) * math.pi / 2 / max(span, 1))
    assert all(abs(a - b) <= steepest + slack for a, b in pairwise(got))
