"""ZeRO with experts is the training of one plain process, with clipping that bites; tolerances as without experts."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch

from hpctrain.config.schema import RunConfig
from hpctrain.config.validate import validate
from tests.training import Trace, assemble, compare, make_config, reference, run

MODEL: dict[str, Any] = dict(
    layers=2,
    init_std=0.1,
    moe=dict(experts=8, top_k=2, ffn=12, shared_ffn=16, router="sigmoid", aux_loss=0.03, z_loss=0.002, bias_rate=0.02),
)
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ep2": (2, dict(ep=2)),
    "ep2-edp2": (4, dict(ep=2)),
    "tp2-ep1": (2, dict(tp=2)),
    "tp2-ep4": (4, dict(tp=2, ep=4)),
    "sp2-etp2-ep2": (4, dict(tp=2, sp=True, etp=2, ep=2)),
    "pp2-ep2-edp2": (8, dict(pp=2, ep=2)),
    "cp2-ep2": (4, dict(cp=2, ep=2)),
    "cp2-tp2-ep4": (4, dict(cp=2, tp=2, ep=4, cp_method="ulysses")),
}
APART = dict(ep1=(2, {}), **{"tp2-ep2": (4, dict(tp=2, ep=2)), "sp2-etp2": (4, dict(tp=2, sp=True, etp=2))})
"""Layouts in which experts lie on the same ranks as dense parameters do."""


def zero_config(stage: int, world: int, parallel: dict[str, Any], **train: Any) -> RunConfig:
    config = make_config(
        model=MODEL,
        data=dict(seq=12),
        parallel=parallel,
        train={"precision": "float32", "micro_batch": 1, **train},
        sharding={"stage": stage, "bucket_mib": 0.005},
    )
    validate(config, world)
    return config


@functools.cache
def expected() -> Trace:
    return reference(make_config(model=MODEL, data=dict(seq=12)))


def check(ranks: Any, config: RunConfig, world: int) -> None:
    got, want = assemble(config, ranks(world, run, config, world)), expected()
    assert min(want.norms) > 2 * config.optimizer.clip, "clipping bites"
    assert np.allclose(got.losses, want.losses, rtol=1e-5, atol=0)
    assert np.allclose(got.norms, want.norms, rtol=1e-5, atol=0)
    compare(got, want, 1e-4)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_one_process(ranks: Any, layout: str, stage: int) -> None:
    world, parallel = LAYOUTS[layout]
    check(ranks, zero_config(stage, world, parallel), world)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize(("layout", "recompute"), [("ep2-edp2", "none"), ("sp2-etp2-ep2", "full")])
def test_equals_engine_none(ranks: Any, layout: str, stage: int, recompute: str) -> None:
    """Trap D14. Both in float32, of the same layout."""
    world, parallel = LAYOUTS[layout]
    config = zero_config(stage, world, parallel, recompute=recompute)
    plain = config.model_copy(update={"sharding": make_config().sharding})
    got, want = (assemble(c, ranks(world, run, c, world)) for c in (config, plain))
    want.gradients.clear()
    compare(got, want, 1e-4)


def overflown(config: RunConfig, world: int, rank: int) -> tuple[list[bool], list[bool]]:
    """Whether each of two steps was skipped, in the first of which one expert of one rank overflows, and whether
    weights and biases were then those from before."""
    from hpctrain.parallel.parallelize import build_chunks
    from hpctrain.parallel.pipeline import Pipeline
    from hpctrain.sharding.build import build_engine
    from tests.training import make_mesh, train_batch

    mesh = make_mesh(config, world)
    engine = build_engine(*build_chunks(config, mesh), mesh, config)
    name = next(n for chunk in engine.chunks for n, _ in chunk.named_parameters() if "experts" in n)
    spoilt = (
        engine.parameter(name).register_hook(lambda g: torch.full_like(g, torch.inf)) if mesh.rank == rank else None
    )
    pipeline, skipped, stayed = Pipeline(engine, mesh, config), [], []
    for step in range(2):
        before = [p.fetch().clone() for p in engine.pieces() if p.kind == "weight"]
        skipped.append(train_batch(engine, mesh, config, step, pipeline)[1].skipped)
        after = [p.fetch() for p in engine.pieces() if p.kind == "weight"]
        stayed.append(all(torch.equal(a, b) for a, b in zip(before, after)))
        if spoilt is not None:
            spoilt.remove()
            spoilt = None
    return skipped, stayed


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("rank", [0, 3])
def test_all_ranks_skip_a_step_in_which_one_expert_overflows(ranks: Any, stage: int, rank: int) -> None:
    """Trap D28, where no other rank holds that expert."""
    config = zero_config(stage, 4, dict(ep=4))
    assert ranks(4, overflown, config, 4, rank) == [([True, False], [True, False])] * 4


@pytest.mark.parametrize("layout", APART)
def test_stage_3_where_experts_lie_as_dense_parameters_do(ranks: Any, layout: str) -> None:
    world, parallel = APART[layout]
    check(ranks, zero_config(3, world, parallel), world)
