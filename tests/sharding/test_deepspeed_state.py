"""ZeRO fragments as boxes of logical tensors: complete, disjoint, and readable under any other layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.layout.placement import Box, Placement
from hpctrain.sharding.deepspeed.state import sections
from tests.sharding.deepspeed_case import Checkpoint, start, zero_config
from tests.training import train_step


@given(st.data())
def test_sections_are_the_range(data: Any) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    whole = tuple(n + data.draw(st.integers(0, 3)) for n in shape)
    at = tuple(data.draw(st.integers(0, w - n)) for w, n in zip(whole, shape))
    cut = data.draw(st.integers(0, shape[0]))
    # Two boxes that lie the other way round in the logical tensor.
    boxes = (Box(at, (0,) * len(shape), shape),)
    if 0 < cut < shape[0]:
        upper, lower = (cut, *shape[1:]), (shape[0] - cut, *shape[1:])
        boxes = (
            Box((at[0] + shape[0] - cut, *at[1:]), (0,) * len(shape), upper),
            Box(at, (cut, *(0,) * (len(shape) - 1)), lower),
        )
    placement = Placement("p", whole, boxes, (0,))
    logical = torch.arange(torch.Size(whole).numel()).view(whole)
    local = torch.empty(shape, dtype=torch.int64)
    for box in boxes:
        window = logical[tuple(slice(a, a + n) for a, n in zip(box.start, box.shape))]
        local[tuple(slice(a, a + n) for a, n in zip(box.local, box.shape))] = window
    first = data.draw(st.integers(0, local.numel()))
    numel = data.draw(st.integers(0, local.numel() - first))
    fragment = local.flatten()[first : first + numel]
    found = []
    for section in sections(placement, first, numel):
        window = logical[tuple(slice(a, a + n) for a, n in zip(section.start, section.shape))]
        assert (section.view(fragment) == window).all()
        found += window.flatten().tolist()
    assert sorted(found) == sorted(fragment.tolist())


def _written(stage: int, tp: int, steps: int) -> Any:
    config = zero_config(stage, tp)
    engine, mesh = start(config)
    for step in range(steps):
        train_step(engine, mesh, config, step)
    checkpoint = Checkpoint(config, engine, mesh)
    once = all((writes == 1).all() for writes in checkpoint.writes.values())
    finite = all(values.isfinite().all() for values in checkpoint.tensors.values())
    moved = all(values.any() for (_, kind), values in checkpoint.tensors.items() if kind != "weight")
    return once, finite, moved, checkpoint.scalars()


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_every_element_is_written_once(ranks: Any, stage: int, tp: int) -> None:
    """With tp=4 each key/value head lies on two ranks, of which one writes."""
    for once, finite, moved, scalars in ranks(4, _written, stage, tp, 1):
        assert once and finite and moved
        assert scalars == {"step": 1.0}


@pytest.mark.parametrize("stage", [1, 3])
def test_state_exists_before_the_first_step(ranks: Any, stage: int) -> None:
    for once, finite, moved, scalars in ranks(2, _written, stage, 1, 0):
        assert once and finite and not moved
        assert scalars["step"] == 0.0


def _journey(legs: list[tuple[int, int]], precision: str) -> list[Any]:
    """Two steps under each (stage, tp), state handed on in memory; losses and norms of all."""
    out, checkpoint = [], None
    for leg, (stage, tp) in enumerate(legs):
        config = zero_config(stage, tp, precision=precision)
        engine, mesh = start(config)
        if leg == 2:
            train_step(engine, mesh, config, 0)  # loading also works over state that is already there
        if checkpoint is not None:
            engine.load(checkpoint)
        for step in range(2 * leg, 2 * leg + 2):
            out.append(train_step(engine, mesh, config, step))
        checkpoint = Checkpoint(config, engine, mesh)
        engine.close()
    assert checkpoint is not None and checkpoint.scalars()["step"] == 2 * len(legs)
    return out


@pytest.mark.parametrize(
    "legs", [[(3, 2), (1, 1), (2, 4)], [(1, 1), (3, 4), (3, 1)], [(2, 2), (0, 1), (3, 2)]], ids=str
)
def test_resumes_under_another_layout(ranks: Any, legs: list[tuple[int, int]]) -> None:
    expected = ranks(4, _journey, [(0, 1)] * 3, "float32")[0]
    for got in ranks(4, _journey, legs, "float32"):
        assert torch.tensor(got).allclose(torch.tensor(expected), rtol=2e-5, atol=0)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_resumes_to_the_bit_under_the_same_layout(ranks: Any, stage: int) -> None:
    """The master weights of bf16 are saved, not the weights that compute."""
    straight = ranks(2, _straight, stage)
    assert ranks(2, _journey, [(stage, 1)] * 2, "bf16") == straight


def _straight(stage: int) -> list[Any]:
    config = zero_config(stage, precision="bf16")
    engine, mesh = start(config)
    return [train_step(engine, mesh, config, step) for step in range(4)]
