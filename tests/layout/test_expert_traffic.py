"""Bytes over ep, etp and tp of a model with experts: the formula is what a run counts."""

from __future__ import annotations

from typing import Any

import pytest

from hpctrain.layout.layout import Layout
from hpctrain.layout.placement import DENSE, EXPERT
from hpctrain.layout.traffic import Payload, context_traffic, data_bytes, expert_traffic, tensor_traffic
from tests.training import make_config, make_mesh, train_step

MOE: dict[str, Any] = dict(experts=8, top_k=2, ffn=12, aux_loss=0.03)
CASES: list[dict[str, Any]] = [
    dict(world=4, parallel=dict(ep=2), train=dict(precision="bf16", micro_batch=2)),
    dict(world=4, parallel=dict(tp=2, ep=4), train=dict(recompute="full")),
    dict(world=4, parallel=dict(tp=2, ep=2, etp=2), moe=dict(shared_ffn=16)),
    dict(
        world=4,
        parallel=dict(tp=2, ep=2, etp=2, sp=True),
        moe=dict(shared_ffn=16, dense_layers=1, capacity=4.0),
        train=dict(recompute="selective", recompute_ops=["layernorm", "moe"]),
    ),
    dict(
        world=4,
        parallel=dict(tp=2, ep=4),
        moe=dict(shared_ffn=16, dense_layers=1),
        train=dict(recompute="selective", recompute_ops=["mlp", "shared_experts", "activation"]),
    ),
    dict(world=4, parallel=dict(cp=2, ep=4), train=dict(recompute="selective", recompute_ops=["moe"])),
    dict(world=4, parallel=dict(tp=2, ep=2, etp=2, sp=True), train=dict(recompute="full", recompute_every=2)),
    dict(world=4, parallel=dict(tp=2, ep=4, sp=True), moe=dict(shared_ffn=16, dense_layers=1)),
    dict(world=2, parallel=dict(tp=2, sp=True), moe=dict(capacity=1.0)),
    dict(world=4, parallel=dict(tp=2, ep=2, etp=2), moe=dict(capacity=1.0, overflow="pad"), data=dict(seq=13)),
    dict(world=4, parallel=dict(tp=2, ep=4, sp=True), moe=dict(capacity=2.0, overflow="pad")),
    dict(world=4, parallel=dict(cp=2, tp=2, ep=4)),
    dict(
        world=4,
        parallel=dict(cp=2, tp=2, sp=True, ep=4),
        moe=dict(capacity=4.0),
        train=dict(recompute="full", recompute_every=2),
    ),
    dict(world=4, parallel=dict(pp=2, ep=2, stage_layers=(2, 1)), moe=dict(dense_layers=1)),
    dict(world=4, parallel=dict(pp=2, cp=2, ep=2, stage_layers=(1, 2)), moe=dict(dense_layers=1, capacity=4.0)),
]


def counted(config: Any, world: int) -> dict[str, dict[str, Payload]]:
    from hpctrain.parallel.parallelize import build_chunks
    from hpctrain.parallel.pipeline import Pipeline
    from hpctrain.sharding.build import build_engine, takes_values

    mesh = make_mesh(config, world)
    chunks, records = build_chunks(config, mesh, materialize=takes_values(config))
    engine = build_engine(chunks, records, mesh, config)
    pipeline = Pipeline(engine, mesh, config)
    mesh.meter.reset()
    train_step(engine, mesh, config, 0, pipeline)
    found: dict[str, dict[str, Payload]] = {}
    for (operation, axis), traffic in mesh.meter.traffic.items():
        found.setdefault(axis, {})[operation] = Payload(traffic.calls, traffic.bytes)
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_formula_is_what_is_counted(ranks: Any, case: dict[str, Any]) -> None:
    sections = {"data": dict(seq=12), "parallel": case["parallel"], "train": case.get("train", {})}
    sections |= {"data": case.get("data", sections["data"]), "model": dict(layers=3, moe=MOE | case.get("moe", {}))}
    config, world = make_config(**sections), case["world"]
    layout, found = Layout.of(config.parallel, world), ranks(world, counted, config, world)
    over = {axis for of_rank in found for axis in of_rank}
    assert over & {"ep", "etp"} == {axis for axis in ("ep", "etp") if getattr(layout, axis) > 1}
    for rank in range(world):
        assert found[rank].get("tp", {}) == tensor_traffic(config, layout, rank)
        assert found[rank].get("cp", {}) == context_traffic(config, layout, rank)
        want, stage = expert_traffic(config, layout, rank), layout.group_of(rank, "edp", "ep", "etp")
        for axis in ("ep", "etp"):
            every = [found[other].get(axis, {}) for other in stage]
            assert found[rank].get(axis, {}).keys() == want.get(axis, {}).keys()
            for operation, payload in want.get(axis, {}).items():
                assert {one[operation].calls for one in every} == {payload.calls}
                assert sum(one[operation].bytes for one in every) == payload.bytes * len(stage)
                if config.model.moe.overflow == "pad":
                    assert found[rank][axis][operation] == payload, "the same on every rank"


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("parallel", [dict(ep=2), dict(tp=2)], ids=str)
def test_gradients_of_experts_are_summed_over_edp(ranks: Any, stage: int, parallel: dict[str, Any]) -> None:
    """By ZeRO with the norm of the experts, a float, averaged over edp though it is the same there."""
    model, train = dict(layers=2, moe=MOE), dict(precision="float32", micro_batch=1, global_batch=4)
    config = make_config(
        model=model, data=dict(seq=12), parallel=parallel, train=train, sharding=dict(stage=stage, bucket_mib=0.05)
    )
    layout = Layout.of(config.parallel, 4)
    for rank, found in enumerate(ranks(4, counted, config, 4)):
        for axis, over, norms in (("edp", EXPERT, 4), ("dp+cp", DENSE, 1 + 3 * 4)):
            want = data_bytes(config, layout, rank, over)
            if stage:
                want["all_reduce"] += norms
            assert {op: payload.bytes for op, payload in found[axis].items()} == want


def test_a_model_without_experts_sends_nothing_for_them() -> None:
    assert expert_traffic(make_config(), Layout(dp=2)) == {}
