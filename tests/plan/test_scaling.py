"""Scaling curves as arithmetic: intervals, efficiency, laws, latency and bandwidth."""

from __future__ import annotations

import csv
import math
import random
from pathlib import Path

import numpy as np
import pytest

from hpctrain.plan.published import curves
from hpctrain.plan.scaling import (
    T95,
    Law,
    Mean,
    Point,
    blocks,
    efficiency,
    growth,
    law,
    mean_of,
    not_negative,
    student,
    wire_of,
)

TABLES = Path(__file__).parents[2] / "benchmarks" / "published"


def point(devices: int, seconds: float, tokens: int = 1000, half: float | None = None, **parts: float) -> Point:
    waits = parts.get("waiting for others", 0.0)
    return Point(devices, devices, tokens, Mean(seconds, half), Mean(waits), parts or {"compute": seconds})


@pytest.mark.parametrize("freedom", [1, 2, 5, 30, 40, 200])
def test_students_t_leaves_a_fortieth_on_either_side(freedom: int) -> None:
    """The density integrated numerically from -t to t."""
    x = np.linspace(-student(freedom), student(freedom), 200_001)
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)
    density = scale * (1 + x * x / freedom) ** (-(freedom + 1) / 2)
    assert float(np.sum((density[1:] + density[:-1]) / 2 * np.diff(x))) == pytest.approx(0.95, abs=5e-4)
    assert list(T95) == sorted(T95, reverse=True)


def test_an_interval_covers_the_mean_in_nineteen_of_twenty() -> None:
    dice = random.Random(1)
    inside = 0
    for _ in range(2000):
        found = mean_of([dice.gauss(10, 2) for _ in range(5)])
        assert found.low is not None and found.high is not None
        inside += found.low <= 10 <= found.high
    assert inside / 2000 == pytest.approx(0.95, abs=0.015)
    assert mean_of([3.0]) == Mean(3.0, None)


def test_blocks_cover_all_steps_once_and_have_two_at_least() -> None:
    assert blocks([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], 5) == [1.5, 3.5, 5.5, 7.5, 9.5]
    assert blocks([1, 2, 3, 4, 5]) == [1.5, 4.0] and blocks([7.0]) == [7.0]
    values = [random.Random(2).random() for _ in range(23)]
    lengths = np.diff([round(i * 23 / 5) for i in range(6)])
    assert float(np.dot(blocks(values), lengths)) == pytest.approx(sum(values))


def test_efficiency_is_tokens_a_device_over_those_of_the_smallest() -> None:
    weak = efficiency([point(2, 1.0, 1000, 0.03), point(8, 1.25, 4000, 0.05)])
    assert [e.value for e in weak] == pytest.approx([1, 0.8]) and weak[0].half is None
    assert weak[1].half == pytest.approx(0.8 * math.hypot(0.03, 0.04))
    strong = efficiency([point(2, 1.0), point(8, 0.4)])
    assert [e.value for e in strong] == pytest.approx([1, 0.625])


@pytest.mark.parametrize(("contention", "coherence"), [(0.05, 0.0), (0.05, 0.002), (0.0, 0.01), (0.3, 1e-5)])
def test_the_law_that_made_a_curve_is_found_again(contention: float, coherence: float) -> None:
    made = Law(contention, coherence, 0.0)
    points = [point(4 * n, 1 / made.rate(n)) for n in (1, 2, 4, 8, 16)]
    found = law(points)
    assert found is not None and found.error < 1e-9
    assert (found.contention, found.coherence) == pytest.approx((contention, coherence), abs=1e-9)
    peak = max(range(1, 3000), key=made.rate)
    if coherence:
        assert found.peak == pytest.approx(peak, abs=1)
    else:
        assert found.peak is None


def test_two_sizes_give_amdahl_and_one_gives_nothing() -> None:
    points = [point(1, 1.0), point(4, 1 / 2.5)]
    found = law(points)
    assert found is not None and found.coherence == 0 and found.rate(4) == pytest.approx(2.5)
    assert law(points[:1]) is None


def test_no_coefficient_is_negative() -> None:
    """A curve better than ideal has no serial share; the best that is not negative is 0."""
    found = law([point(1, 1.0), point(2, 0.45), point(4, 0.2)])
    assert found is not None and found.contention == found.coherence == 0
    rng = np.random.default_rng(0)
    for _ in range(50):
        matrix, target = rng.normal(size=(5, 2)), rng.normal(size=5)
        mine = np.array(not_negative(matrix, target))
        grid = np.stack(np.meshgrid(np.linspace(0, 3, 121), np.linspace(0, 3, 121)), -1).reshape(-1, 2)
        least = (((grid @ matrix.T) - target) ** 2).sum(axis=1).min()
        assert (mine >= 0).all() and ((matrix @ mine - target) ** 2).sum() <= least + 1e-9


def test_latency_and_bandwidth_of_waiting() -> None:
    messages, sizes = [10, 30, 70, 150], [1e6, 1.5e6, 1.75e6, 1.9e6]
    exposed = [m * 2e-4 + b / 5e8 for m, b in zip(messages, sizes)]
    found = wire_of(exposed, messages, sizes)
    assert found is not None and (found.latency, found.rate) == pytest.approx((2e-4, 5e8))
    assert wire_of([0.0, 0.1], [0, 3], [0, 10.0]) is None


def test_growth_is_over_the_ideal_curve() -> None:
    first = point(1, 1.0, compute=0.9, **{"waiting for others": 0.1})
    last = point(4, 0.45, compute=0.225, **{"waiting for others": 0.225})
    assert growth(first, last, strong=True) == pytest.approx({"waiting for others": 0.2, "compute": 0.0})
    assert list(growth(first, last, strong=False)) == ["waiting for others", "compute"]


def test_published_curves_are_those_of_the_tables() -> None:
    def read(name: str) -> list[dict[str, str]]:
        with (TABLES / f"{name}.csv").open() as lines:
            return list(csv.DictReader(line for line in lines if not line.startswith("#")))

    weak = {c.name.partition(",")[0]: list(zip(c.devices, c.tflops)) for c in curves("weak")}
    for name, table in (("Megatron-LM 2021", "megatron_sc21_table1_weak_scaling"),
                        ("Megatron-Core", "megatron_core_h100_weak_scaling")):  # fmt: skip
        assert weak[name] == [(int(r["n_gpus"]), float(r["tflops_per_gpu"])) for r in read(table)]
    rows = [r for r in read("megatron_sc21_table2_ptdp_vs_zero3") if r["model"] == "GPT-174.6B"]
    for name, kind in (("ZeRO-3", True), ("Megatron", False)):
        made = next(c for c in curves("strong") if c.name.startswith(name))
        mine = [r for r in rows if (r["zero_fsdp"] == "ZeRO-3") == kind]
        assert list(zip(made.devices, made.tflops)) == [(int(r["n_gpus"]), float(r["tflops_per_gpu"])) for r in mine]
        assert made.efficiency()[0] == 1
