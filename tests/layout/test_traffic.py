"""Bytes over tp: the formula is what a run counts, for every shape of model, precision and recomputation."""

from __future__ import annotations

from typing import Any

import pytest

from hpctrain.config.load import load
from hpctrain.layout.layout import Layout
from hpctrain.layout.stages import stages_of
from hpctrain.layout.traffic import Payload, context_traffic, data_bytes, tensor_traffic, wire
from tests.training import make_config, make_mesh, train_step

CASES: list[dict[str, Any]] = [
    dict(tp=2, world=2),
    dict(tp=4, world=4, train=dict(precision="bf16", micro_batch=2)),  # two ranks share each key/value head
    dict(tp=4, world=4, model=dict(kv_heads=1, bias=True), train=dict(precision="float32")),
    dict(tp=2, world=4, model=dict(norm="layernorm", position="learned", bias=True, tied=True, layers=3)),
    dict(tp=2, world=2, model=dict(layers=3), train=dict(recompute="full", recompute_every=2, micro_batch=1)),
    dict(tp=2, world=2, train=dict(recompute="selective"), model=dict(dropout=0.1)),
    dict(
        tp=2,
        world=2,
        train=dict(recompute="selective", recompute_ops=["layernorm", "mlp"], recompute_every=2),
        model=dict(layers=3),
    ),
    dict(
        tp=2,
        world=2,
        model=dict(adapter=dict(kind="dora", rank=3, dropout=0.1), layers=3),
        train=dict(recompute="selective", recompute_ops=["core_attn", "layernorm", "mlp"], recompute_every=2),
    ),
    dict(tp=2, world=2, train=dict(recompute="selective", recompute_ops=["layernorm", "activation"])),
    dict(
        tp=4,
        world=4,
        model=dict(adapter=dict(kind="dora", rank=3, dropout=0.1), bias=True, layers=3),
        train=dict(recompute="full", recompute_every=2),
    ),
    dict(tp=2, world=2, model=dict(adapter=dict(targets=["q", "down"], dropout=0.1), position="learned")),
    dict(tp=2, world=2, model=dict(adapter=dict(kind="qlora", block=2)), train=dict(recompute="full", micro_batch=2)),
]


def counted(config: Any, world: int, over: tuple[str, ...] = ("tp",)) -> Any:
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
        steps.append({op: Payload(t.calls, t.bytes) for (op, axis), t in mesh.meter.traffic.items() if axis in over})
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
    dict(pp=2, schedule="zb-h1", adapter=dict(kind="dora", targets=["attention", "up"])),
    dict(pp=3, stage_layers=(0, 3, 1), adapter=dict(rank=2)),
]


@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("parallel", PIPELINES, ids=str)
def test_formula_of_every_stage_of_a_pipeline(ranks: Any, parallel: dict[str, Any], sp: bool) -> None:
    model, world = dict(layers=4, norm="layernorm", position="learned", tied=True, kv_heads=1), 2 * parallel["pp"]
    axes = {key: value for key, value in parallel.items() if key != "adapter"}
    model["adapter"] = parallel.get("adapter")
    config = make_config(model=model, data=dict(seq=12), parallel=dict(tp=2, sp=sp, **axes))
    layout = Layout.of(config.parallel, world)
    for rank, steps in enumerate(ranks(world, counted, config, world)):
        assert steps == [tensor_traffic(config, layout, rank)] * 2


@pytest.mark.parametrize("parallel", [dict(), dict(tp=2), dict(pp=2), dict(adapter=dict(kind="dora"))], ids=str)
def test_gradients_are_summed_once_a_step(ranks: Any, parallel: dict[str, Any]) -> None:
    """Whatever else is sent over dp is objects, which are not counted, and the loss, over pp too."""
    parallel = dict(parallel)
    model = dict(tied=True, adapter=parallel.pop("adapter", None))
    config = make_config(model=model, parallel=parallel, train=dict(precision="bf16", micro_batch=1))
    layout = Layout.of(config.parallel, 4)
    for rank, steps in enumerate(ranks(4, counted, config, 4, ("dp+cp",))):
        assert [{op: payload.bytes for op, payload in step.items()} for step in steps] == [
            data_bytes(config, layout, rank)
        ] * 2


RINGS: list[dict[str, Any]] = [
    dict(parallel=dict(cp=2), world=2),
    dict(
        parallel=dict(cp=4),
        world=4,
        train=dict(precision="bf16", recompute="selective", recompute_every=2, micro_batch=2),
    ),
    dict(parallel=dict(cp=2, tp=2, sp=True), world=4, train=dict(recompute="full")),
    dict(parallel=dict(cp=2, tp=2, sp=True), world=4, model=dict(position="learned", kv_heads=1)),
    dict(parallel=dict(cp=4, cp_method="ulysses"), world=4, train=dict(precision="bf16")),
    dict(parallel=dict(cp=2, tp=2, cp_method="ulysses"), world=4, train=dict(recompute="full", micro_batch=2)),
    dict(parallel=dict(cp=2, pp=3, stage_layers=(0, 3, 1)), world=6, model=dict(layers=4)),
    dict(parallel=dict(cp=2, tp=2, sp=True, pp=2, schedule="zb-v", chunks=2), world=8, model=dict(layers=5)),
    dict(parallel=dict(cp=2, cp_method="ulysses", pp=2), world=8, model=dict(layers=3), train=dict(recompute="full")),
]


@pytest.mark.parametrize("case", RINGS, ids=str)
def test_formula_over_cp_is_what_is_counted(ranks: Any, case: dict[str, Any]) -> None:
    config = make_config(**{k: v for k, v in case.items() if k != "world"}, data=dict(seq=16))
    layout, world = Layout.of(config.parallel, case["world"]), case["world"]
    for rank, steps in enumerate(ranks(world, counted, config, world, ("tp", "cp"))):
        over_tp, over_cp = tensor_traffic(config, layout, rank), context_traffic(config, layout, rank)
        assert not over_tp.keys() & over_cp.keys()
        assert bool(over_cp) == any(stage.layers for stage in stages_of(config.model, layout, rank))
        assert steps == [over_tp | over_cp] * 2


def test_one_rank_sends_nothing() -> None:
    config, one = make_config(), Layout()
    assert tensor_traffic(config, one) == context_traffic(config, one) == data_bytes(config, one) == {}


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
