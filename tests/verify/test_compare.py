"""Distances, and how far is too far."""

from __future__ import annotations

import math

import pytest
import torch

from hpctrain.errors import TrainError
from hpctrain.verify.cases import base
from hpctrain.verify.compare import CEILING, EXACT, distances, findings, tolerance, without_gradient
from hpctrain.verify.trace import Share, Trace, assemble

ONES = torch.ones(2, 3, dtype=torch.float64)


def trace(loss: float = 2.0, gradient: float = 1.0, weight: float = 1.0) -> Trace:
    gradients = {"a": 4 * ONES * gradient, "b": 1e-9 * ONES}
    initial = {"a": ONES * 0.5, "b": 0 * ONES}
    return Trace([3.0, loss], [1.0, 5.0], gradients, {"a": ONES * weight, "b": 1e-5 * ONES}, [], initial)


def test_differences_are_shares_of_the_largest_value_and_of_the_way() -> None:
    found = distances(trace(2.2, 1.5, 0.75), trace(), lr=1e-3)
    assert found["loss"] == {"step 1": 0.0, "step 2": pytest.approx(0.1)}
    assert found["norm"] == {"step 1": 0.0, "step 2": 0.0}
    assert found["gradient"] == {"a": 0.5, "b": 0.0}
    assert found["weight"] == {"a": pytest.approx(0.5), "b": 0.0}, "half the way from 0.5 to 1"


def test_what_is_next_to_nothing_is_held_against_the_rest() -> None:
    got = trace()
    got.gradients["b"], got.weights["b"] = 2e-9 * ONES, 2e-5 * ONES
    found = distances(got, trace(), lr=1e-3)
    assert found["gradient"]["b"] == pytest.approx(1e-9 / 4e-6), "a millionth of the largest gradient"
    assert found["weight"]["b"] == pytest.approx(6**0.5 * 1e-5 / 1e-3), "the learning rate"


def test_in_float64_everything_has_one_limit() -> None:
    exact = findings(distances(trace(), trace(), 1e-3), tolerance("float64", None))
    assert all(f.good and f.limit == EXACT for f in exact.values())
    bad = findings(distances(trace(gradient=1 + 2e-9), trace(), 1e-3), tolerance("float64", None))
    assert [kind for kind, f in bad.items() if not f.good] == ["gradient"] and bad["gradient"].where == "a"


def test_elsewhere_each_tensor_may_be_off_as_far_as_rounding_takes_it() -> None:
    rounded = trace()
    rounded.gradients = {"a": 4 * ONES * (1 + 1e-6), "b": 1e-9 * ONES * 2}
    allowed = tolerance("float32", distances(rounded, trace(), 1e-3))
    assert allowed.limit("gradient", "b") == pytest.approx(10 * 1e-9 / 4e-6)
    usual = (1e-6 + 2.5e-4) / 2
    assert allowed.limit("gradient", "a") == pytest.approx(10 * usual, rel=1e-3), "at least what is usual"
    assert allowed.limit("loss", "step 1") == pytest.approx(10 * 2.0**-23)
    got = trace()
    got.gradients["a"] = 4 * ONES * 1.01
    worst = findings(distances(got, trace(), 1e-3), allowed)["gradient"]
    assert worst.where == "a" and not worst.good and worst.worst == pytest.approx(0.01)


def half(kind: str) -> Trace:
    """Something that is half of what it should be."""
    return trace(weight=0.75) if kind == "weight" else trace(gradient=0.5)


@pytest.mark.parametrize("kind", ["gradient", "weight"])
def test_what_is_half_wrong_never_passes(kind: str) -> None:
    """Rounding of a tenth times ten would allow everything."""
    rounded = trace(gradient=1.1, weight=1.05)
    allowed = tolerance("bf16", distances(rounded, trace(), 1e-3))
    assert allowed.limit(kind, "a") == CEILING < 0.5 and "at most 0.45" in allowed.why
    assert not findings(distances(half(kind), trace(), 1e-3), allowed)[kind].good
    assert all(f.good for f in findings(distances(rounded, trace(), 1e-3), allowed).values())


@pytest.mark.parametrize(("kind", "wrong"), [("gradient", trace(gradient=1.3)), ("weight", trace(weight=1.15)),
                                             ("loss", trace(loss=math.nan))])  # fmt: skip
def test_where_rounding_leaves_no_room_there_is_no_judgement(kind: str, wrong: Trace) -> None:
    with pytest.raises(TrainError, match=rf"bf16 cannot be judged: in {kind} one process in it is .* at (a|step 2)"):
        tolerance("bf16", distances(wrong, trace(), 1e-3))


def test_of_a_parameter_without_gradient_the_gradient_is_judged_and_the_weight_is_not() -> None:
    """AdamW makes whole steps of its rounding; float64 leaves next to none."""
    want, rounded, got = trace(), trace(), trace()
    for each, gradient, weight in ((want, 1e-17, 0.0), (rounded, 1e-3, 1e-3), (got, -1e-3, -1e-3)):
        each.gradients["b"], each.weights["b"] = gradient * ONES, weight * ONES
    idle = without_gradient(want)
    assert idle == {"b"}
    allowed = tolerance("bf16", distances(rounded, want, 1e-3), idle)
    assert allowed.why.endswith("; of b, without gradient, no weights")
    assert all(f.good for f in findings(distances(got, want, 1e-3), allowed).values())
    got.gradients["b"] = 0.5 * ONES
    found = findings(distances(got, want, 1e-3), allowed)["gradient"]
    assert (found.where, found.good, found.worst) == ("b", False, 0.125)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_never_good(value: float) -> None:
    got = trace(loss=value)
    got.weights["a"] = ONES * value
    found = findings(distances(got, trace(), 1e-3), tolerance("float64", None))
    assert [kind for kind, f in found.items() if not f.good] == ["loss", "weight"]


CONFIG = base("gpt-tiny", ["model.layers=1", "model.hidden=4", "model.heads=1", "model.vocab=3", "model.ffn=4",
                           "model.max_seq=4", "data.seq=4"], 1, "float64")  # fmt: skip


def shares(**changes: object) -> list[Share]:
    from hpctrain.layout.parameters import parameter_specs

    whole = [(s.name, (0,) * len(s.shape), torch.ones(s.shape)) for s in parameter_specs(CONFIG.model)]
    return [Share([1.0], [2.0], whole, whole), Share([1.0], [2.0], [], [])]


def test_pieces_become_whole_once() -> None:
    found = assemble(CONFIG, shares())
    assert found.losses == [1.0] and found.weights["embedding.weight"].shape == (3, 4)
    assert found.weights["embedding.weight"].dtype == torch.float64


def test_ranks_that_disagree_or_pieces_that_overlap_or_lack_are_refused() -> None:
    two = shares()
    two[1].losses = [1.5]
    with pytest.raises(TrainError, match="rank 1 and rank 0 report different losses"):
        assemble(CONFIG, two)
    two = shares()
    two[1].skipped = [1]
    with pytest.raises(TrainError, match=r"rank 1 skipped steps \[1\], and rank 0 \[\]"):
        assemble(CONFIG, two)
    two = shares()
    two[1].weights = two[0].weights[:1]
    with pytest.raises(TrainError, match=r"every value of weight embedding\.weight exactly once"):
        assemble(CONFIG, two)
    two = shares()
    two[0].gradients = two[0].gradients[1:]
    with pytest.raises(TrainError, match=r"every value of gradient embedding\.weight exactly once"):
        assemble(CONFIG, two)
