"""How layers are spread over the stages of a pipeline where nobody says."""

from __future__ import annotations

import itertools

import pytest

from hpctrain.config.load import load
from hpctrain.layout.layout import Layout
from hpctrain.layout.stages import balanced, head_cost, stages


@pytest.mark.parametrize("number", [1, 2, 3, 4])
@pytest.mark.parametrize("head", [0.0, 0.4, 1.0, 1.3, 2.4, 9.0])
def test_the_dearest_stage_costs_as_little_as_can_be(number: int, head: float) -> None:
    for layers in range(number, 11):
        sizes = balanced(layers, number, head)
        cuts = itertools.combinations(range(1, layers), number - 1)
        splits = [[b - a for a, b in itertools.pairwise((0, *cut, layers))] for cut in cuts]
        best = min(max(*split[:-1], split[-1] + head) if number > 1 else layers for split in splits)
        assert sum(sizes) == layers and min(sizes) >= 1
        assert max(*sizes[:-1], sizes[-1] + head) == best if number > 1 else sizes == [layers]


def test_a_free_head_leaves_an_even_split_with_the_larger_first() -> None:
    assert balanced(10, 4, 0.0) == [3, 3, 2, 2]


def test_a_large_vocabulary_takes_layers_off_the_last_stage() -> None:
    """Llama 3 8B: the head is 128,256 x 4,096, a layer 218,103,808 weights that multiply: as much as 2.4 layers."""
    model = load("llama-8b", []).model
    assert head_cost(model) == pytest.approx(128256 * 4096 / 218103808)
    assert [len(stage.layers) for stage in stages(model, Layout(pp=4))] == [9, 9, 8, 6]
    assert [len(stage.layers) for stage in stages(model, Layout(pp=4, stage_layers=(8, 8, 8, 8)))] == [8] * 4
