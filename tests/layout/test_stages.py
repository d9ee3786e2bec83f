"""How layers are spread over the stages of a pipeline where nobody says."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from hpctrain.config.load import load
from hpctrain.layout.layout import Layout
from hpctrain.layout.stages import balanced, head_cost, stages


@pytest.mark.parametrize(
    "homes", [(0,), (0, 1), (0, 1, 2), (0, 1, 2, 3), (0, 1, 0, 1), (0, 1, 1, 0), (0, 1, 2, 0, 1, 2), (0, 1, 2, 2, 1, 0)]
)
@pytest.mark.parametrize("head", [0.0, 0.4, 1.0, 1.3, 2.4, 9.0])
def test_the_busiest_rank_has_as_little_as_can_be(homes: tuple[int, ...], head: float) -> None:
    number = len(homes)

    def cost(sizes: Sequence[int]) -> tuple[float, float]:
        costs = [*sizes[:-1], sizes[-1] + head]
        return max(sum(c for c, h in zip(costs, homes) if h == home) for home in homes), max(costs)

    for layers in range(number, 11):
        sizes = balanced(layers, homes, head)
        cuts = itertools.combinations(range(1, layers + 1), number - 1)
        best = min(cost([b - a for a, b in itertools.pairwise((0, *cut, layers))]) for cut in cuts)
        assert sum(sizes) == layers and min(sizes[:-1], default=1) >= 1
        assert cost(sizes) == pytest.approx(best)


def test_a_free_head_leaves_an_even_split_with_the_larger_first() -> None:
    assert balanced(10, (0, 1, 2, 3), 0.0) == (3, 3, 2, 2)
    assert balanced(10, (0, 1, 0, 1), 0.0) == (3, 3, 2, 2)


def test_chunks_of_a_rank_are_weighed_together() -> None:
    """The rank that has the head has fewer layers in all, though no stage is dearer than its last."""
    assert balanced(4, (0, 1, 0, 1), 1.45) == (2, 1, 1, 0)
    assert balanced(4, (0, 1, 1, 0), 1.45) == (1, 2, 1, 0)


def test_a_large_vocabulary_takes_layers_off_the_last_stage() -> None:
    """Llama 3 8B: the head is 128,256 x 4,096, a layer 218,103,808 weights that multiply: as much as 2.4 layers."""
    model = load("llama-8b", []).model
    assert head_cost(model) == pytest.approx(128256 * 4096 / 218103808)
    assert [len(stage.layers) for stage in stages(model, Layout(pp=4))] == [9, 9, 8, 6]
    assert [len(stage.layers) for stage in stages(model, Layout(pp=4, stage_layers=(8, 8, 8, 8)))] == [8] * 4
