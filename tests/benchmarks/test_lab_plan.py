"""The pure parts of the planner's benchmark on the lab."""

from __future__ import annotations

import pytest

from benchmarks import lab_plan
from hpctrain.config.load import load
from hpctrain.layout.layout import Layout
from hpctrain.plan.constants import Profile, constants
from hpctrain.plan.hardware import hardware
from hpctrain.plan.links import Machine
from hpctrain.plan.played import price
from hpctrain.plan.work import Points, Work
from hpctrain.scale import study


def test_order_is_a_correlation_of_ranks() -> None:
    assert lab_plan.spearman([1.0, 2.0, 30.0], [0.1, 5.0, 6.0]) == pytest.approx(1)
    assert lab_plan.spearman([1.0, 2.0, 3.0], [3.0, 2.0, 1.0]) == pytest.approx(-1)
    assert lab_plan.spearman([1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 4.0, 3.0]) == pytest.approx(0.8)


def test_a_summary_says_both_gates() -> None:
    rows = [
        {"layout": str(i), "measured_s": s, "predicted_s": p} for i, (s, p) in enumerate([(1, 1.1), (2, 1), (4, 4)])
    ]
    made = lab_plan.summary(rows)
    assert (made["median_error"], made["largest_error"]) == (pytest.approx(0.1), 0.5)
    assert made["rank_correlation"] == pytest.approx(0.5)
    assert [row[1:3] for row in made["rows"]] == [
        ["median error 10.0%", "at most 15%"],
        ["rank correlation 0.50", "at least 0.90"],
    ]


def test_a_calibrated_machine_computes_so_many_times_slower() -> None:
    model = load("gpt-tiny").model
    profile = Profile(cluster="cpu-lab", matmul={"float32": 6e10}, memory_bandwidth=1e10)
    machine = Machine(hardware("cpu-lab").part(1), constants(), profile)
    work, layout = Work(model, 64, 8, "float32"), Layout(dp=4)
    fast, slow = (
        price(made, work, layout, Points.one(layout, 2)) for made in (machine, lab_plan.calibrated(machine, 3.0))
    )
    assert slow.parts["compute"] == pytest.approx(3 * fast.parts["compute"])


@pytest.mark.parametrize("name", [*lab_plan.LAYOUTS, "alone"])
def test_every_layout_can_run_and_is_bound_by_its_rails(name: str) -> None:
    """By the hardware file with rails as slow as the lab's."""
    settings = lab_plan.LAYOUTS.get(name, lab_plan.ALONE)
    made = study.make("strong", "gpt-tiny", [*lab_plan.SETTINGS, *settings], (lab_plan.NODES,), 8, 2, 1, False)
    size, whole = made.size(lab_plan.NODES), hardware("cpu-lab").part(1)
    rail = whole.host.nic_bandwidth.model_copy(update={"value": lab_plan.RAIL_MBIT * 1e6 / 8})
    slow = whole.model_copy(update={"host": whole.host.model_copy(update={"nic_bandwidth": rail})})
    plan = lab_plan.predict.point(Machine(slow, constants()), made, lab_plan.NODES)[1]
    parts = plan.price.at(0)
    assert size.cluster.nodes == 4 and len(lab_plan.LAYOUTS) >= 10
    if name != "alone":
        assert parts["compute"] < plan.seconds / 2
