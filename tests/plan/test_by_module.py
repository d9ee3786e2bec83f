"""Weights that come and go module by module: times by hand, and what is gathered how often."""

from __future__ import annotations

from collections import Counter

import pytest

from hpctrain.config.load import load
from hpctrain.layout.parameters import parameter_specs
from hpctrain.plan.by_module import Use, Way, of_layer, seconds
from hpctrain.plan.work import ByModule, Phase, Work

ALL = ByModule(reuse=0.0, live=1e99, prefetch=1.0, bucket=1e99)
"""One module is gathered ahead, and let go when it has computed."""


def end(trace: list[Use], rules: ByModule) -> tuple[float, Counter[float]]:
    """When it is over, with a second an element, and what was gathered."""
    seen: Counter[float] = Counter()

    def gather(numel: float) -> float:
        seen[numel] += 1
        return numel

    return float(Way(trace, rules, gather, lambda numel: 10 * numel).end()), seen


def test_a_module_is_gathered_beside_the_one_before() -> None:
    trace = [Use(0, 2, 3.0), Use(1, 5, 1.0), Use(2, 1, 7.0)]
    assert end(trace, ALL)[0] == 2 + max(3, 5) + max(1, 1) + 7
    none = ByModule(reuse=0.0, live=0.0, prefetch=1.0)
    assert end(trace, none)[0] == (2 + 3) + (5 + 1) + (1 + 7)


def test_nothing_is_gathered_ahead_while_much_is_there() -> None:
    """The first has 2 elements and is there while it computes; with 3 there would still be room."""
    trace = [Use(0, 2, 3.0), Use(1, 5, 1.0)]
    assert end(trace, ByModule(reuse=0.0, live=2.0))[0] == 2 + 3 + 5 + 1
    assert end(trace, ByModule(reuse=0.0, live=3.0))[0] == 2 + 5 + 1


def test_a_gather_waits_for_the_device() -> None:
    """The third is sent for when the second computes, which is after the first has: beside what has no weights, too."""
    trace = [Use(0, 2, 1.0), Use(9, 0, 4.0), Use(1, 3, 1.0), Use(2, 6, 0.0)]
    assert end(trace, ALL)[0] == 2 + max(1 + 4, 3) + max(1, 6)


def test_as_many_modules_are_gathered_ahead_as_are_wanted() -> None:
    trace = [Use(0, 1, 100.0), Use(1, 2, 0.0), Use(2, 3, 0.0), Use(3, 4, 0.0)]
    assert end(trace, ALL)[0] == 1 + 100 + 3 + 4
    assert end(trace, ByModule(reuse=0.0, live=1e99, prefetch=5.0, bucket=1e99))[0] == 1 + 100 + 4


@pytest.mark.parametrize(("reuse", "times"), [(0.0, 2), (10.0, 2), (10.5, 1)])
def test_what_is_used_soon_again_stays(reuse: float, times: int) -> None:
    """Of 1, 2 and 3 elements, forward and backward: between the uses of the first there are 2 + 3 + 3 + 2."""
    there = [Use(i, i + 1, 1.0) for i in range(3)]
    _, seen = end([*there, *reversed(there)], ByModule(reuse=reuse, live=1e99, prefetch=1.0))
    assert seen[1] == times
    assert seen[3] == (1 if reuse else 2)  # nothing is used between


def test_gradients_are_reduced_when_the_next_would_not_go_into_the_bucket() -> None:
    """Of 2, 2 and 3 elements and a bucket of 4: two together beside the third, and that at the end."""
    still = ByModule(reuse=1e99, live=0.0, bucket=4.0)
    trace = [Use(0, 2, 1.0, True), Use(1, 2, 1.0, True), Use(2, 3, 5.0, True)]
    computed = (2 + 1) + (2 + 1) + (3 + 5)
    assert end(trace, still)[0] == computed + 40 + 30
    more = [*trace, Use(3, 0, 100.0, True)]
    assert end(more, still)[0] == computed + 100 + 30  # the end is alone, and 40 was hidden


def test_without_waiting_a_layer_takes_what_it_computes() -> None:
    forward, backward = [(3.0, 1.0), (4.0, 2.0)], [(3.0, 2.0), (4.0, 4.0)]
    got = seconds(forward, backward, ALL, lambda numel: 0.0, lambda numel: 0.0, again=True)
    assert got == pytest.approx((3.0, 9.0))


def test_recomputation_gathers_what_does_not_stay() -> None:
    """Nothing is hidden, a second an element: forward 7; backward 7 for computing again, 7 for what does not stay."""
    forward = [(3.0, 0.0), (4.0, 0.0)]
    for reuse, gathered in ((0.0, 14.0), (1.0, 10.0), (4.5, 10.0), (9.0, 7.0)):
        rules = ByModule(reuse=reuse, live=0.0)
        got = seconds(forward, forward, rules, lambda numel: numel, lambda numel: 0.0, again=True)
        assert got == pytest.approx((7.0, gathered)), reuse


@pytest.mark.parametrize("recipe", ["gpt-175b", "llama-8b"])
def test_modules_are_those_of_a_layer(recipe: str) -> None:
    """All its matrices, and all its time."""
    model = load(recipe).model
    parts = of_layer(model, 2, Phase(matmul=5.0, attention=3.0, pointwise=2.0))
    matrices = sum(spec.numel for spec in parameter_specs(model) if spec.layer == 1 and len(spec.shape) > 1)
    assert sum(numel for numel, _ in parts) == matrices / 2
    assert sum(time for _, time in parts) == pytest.approx(10.0)


def test_gathers_of_a_layer_are_those_of_the_engine() -> None:
    assert Work.of(load("llama-8b", ["sharding.engine=fsdp"])).runtime.gathers == 1
    assert Work.of(load("llama-8b", ["sharding.engine=deepspeed", "sharding.stage=3"])).runtime.gathers == 4
