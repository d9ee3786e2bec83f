"""Models with experts under the layouts of dense ones, held against the plain model in float64."""

from __future__ import annotations

from typing import Any

import pytest

from tests.training import assemble, compare, make_config, reference, run

MOE: dict[str, Any] = dict(
    experts=5, top_k=2, ffn=16, shared_ffn=10, aux_loss=0.3, z_loss=0.05, bias_rate=0.05, dense_layers=1
)
LAYOUTS: list[tuple[int, dict[str, dict[str, Any]]]] = [
    (1, dict(train=dict(micro_batch=2))),
    (1, dict(train=dict(micro_batch=8, recompute="full"))),
    (2, dict(train=dict(micro_batch=2, recompute="selective"))),
    (4, dict(train=dict(micro_batch=1))),
    (2, dict(parallel=dict(pp=2), train=dict(micro_batch=2))),
    (2, dict(parallel=dict(pp=2, schedule="zb-v", chunks=2), train=dict(micro_batch=2))),
    (4, dict(parallel=dict(pp=2), train=dict(micro_batch=1, recompute="full"))),
]


@pytest.mark.parametrize(("world", "sections"), LAYOUTS)
@pytest.mark.parametrize("moe", [{}, dict(capacity=0.8), dict(capacity=0.8, overflow="pad", router="sigmoid")])
def test_every_layout_equals_the_reference(ranks, world: int, sections: dict[str, Any], moe: dict[str, Any]) -> None:
    config = make_config(model=dict(layers=4, moe={**MOE, **moe}), **sections)
    compare(assemble(config, ranks(world, run, config, world)), reference(config), 1e-9)
