"""Bytes over tp: the formula is what a run counts, for every shape of model, precision and recomputation."""

from __future__ import annotations

from typing import Any

import pytest

from hpctrain.config.load import load
from hpctrain.layout.layout import Layout
from hpctrain.layout.traffic import Payload, data_bytes, tensor_traffic, wire
from tests.training import make_config, make_mesh, train_step

CASES: list[dict[str, Any]] = [
    dict(tp=2, world=2),
    dict(tp=4, world=4, train=dict(precision="bf16", micro_batch=2)),  # two ranks share each key/value head
    dict(tp=4, world=4, model=dict(kv_heads=1, bias=True), train=dict(precision="float32")),
    dict(tp=2, world=4, model=dict(norm="layernorm", position="learned", bias=True, tied=True, layers=3)),
    dict(tp=2, world=2, train=dict(recompute="full", micro_batch=1)),
    dict(tp=2, world=2, train=dict(recompute="selective"), model=dict(dropout=0.1)),
]


def counted(config: Any, world: int, axis: str = "tp") -> Any:
    from hpctrain.parallel.parallelize import build_chunks
    from hpctrain.parallel.pipeline import Pipeline
    from hpctrain.sharding.build import build_engine

    mesh = make_mesh(config, world)
    chunks, records = build_chunks(config, mesh)
    engine = build_engine(chunks, records, mesh, config)
    pipeline, steps = Pipeline(engine, mesh, config), []
    for step in range(2):
        mesh.meter.reset()
        train_step(engine, mesh, config, step, pipeline)
        steps.append({op: Payload(t.calls, t.bytes) for (op, a), t in mesh.meter.traffic.items() if a == axis})
    return steps


@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_formula_is_what_is_counted(ranks: Any, case: dict[str, Any], sp: bool) -> None:
    sections = {k: v for k, v in case.items() if k not in ("tp", "world")}
    config = make_config(**sections, data=dict(seq=12), parallel=dict(tp=case["tp"], sp=sp))
    want = tensor_traffic(config, Layout.of(config.parallel, case["world"]))
    assert want.keys() == ({"all_reduce", "all_gather", "reduce_scatter"} if sp else {"all_reduce", "all_gather"})
    for steps in ranks(case["world"], counted, config, case["world"]):
        assert steps == [want] * 2


PIPELINES: list[dict[str, Any]] = [
    dict(pp=2),
    dict(pp=3, stage_layers=(0, 3, 1)),
    dict(pp=2, schedule="interleaved", chunks=2),
    dict(pp=2, schedule="zb-h1"),
]


@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("parallel", PIPELINES, ids=str)
def test_formula_of_every_stage_of_a_pipeline(ranks: Any, parallel: dict[str, Any], sp: bool) -> None:
    model, world = dict(layers=4, norm="layernorm", position="learned", tied=True, kv_heads=1), 2 * parallel["pp"]
    config = make_config(model=model, data=dict(seq=12), parallel=dict(tp=2, sp=sp, **parallel))
    layout = Layout.of(config.parallel, world)
    for rank, steps in enumerate(ranks(world, counted, config, world)):
        assert steps == [tensor_traffic(config, layout, rank)] * 2


@pytest.mark.parametrize("parallel", [dict(), dict(tp=2), dict(pp=2)], ids=str)
def test_gradients_are_summed_once_a_step(ranks: Any, parallel: dict[str, Any]) -> None:
    """Whatever else is sent over dp is objects, which are not counted, and the loss, over pp too."""
    config = make_config(model=dict(tied=True), parallel=parallel, train=dict(precision="bf16", micro_batch=1))
    layout = Layout.of(config.parallel, 4)
    for rank, steps in enumerate(ranks(4, counted, config, 4, "dp+cp")):
        assert [{op: payload.bytes for op, payload in step.items()} for step in steps] == [
            data_bytes(config, layout, rank)
        ] * 2


def test_one_rank_sends_nothing() -> None:
    assert tensor_traffic(make_config(), Layout()) == {} == data_bytes(make_config(), Layout())


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_a_gather_and_a_scatter_are_an_all_reduce(tp: int) -> None:
    """With A bytes of activation: a layer sends 8 (tp-1)/tp A either way, and 2 more for inputs that were not kept."""
    sent = {}
    for sp in (False, True):
        layers = {}
        for n in (1, 2):
            overrides = f"parallel.tp={tp} parallel.sp={str(sp).lower()} model.layers={n} train.micro_batch=1"
            config = load("llama-8b", overrides.split())
            layers[n] = tensor_traffic(config, Layout(tp=tp, sp=sp))
        times = config.train.global_batch
        norms = 2 * 4 * config.model.hidden * times if sp else 0
        sent[sp] = sum(
            wire(op, layers[2][op].bytes - layers[1][op].bytes - norms * (op == "all_reduce"), tp) for op in layers[2]
        )
        activation = config.data.seq * config.model.hidden * 2 * times
    assert sent[False] == pytest.approx(8 * (tp - 1) / tp * activation)
    assert sent[True] == pytest.approx(10 * (tp - 1) / tp * activation)
