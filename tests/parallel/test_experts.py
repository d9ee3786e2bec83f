"""Models with experts under the layouts of dense ones, held against the plain model in float64."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hpctrain.layout.layout import Layout
from hpctrain.layout.parameters import bias_specs
from hpctrain.layout.placement import placements
from hpctrain.model.router import routers_of
from hpctrain.model.transformer import Transformer
from hpctrain.train.generate import load_weights
from hpctrain.verify.samples import global_batch
from tests.training import Trace, assemble, compare, make_config, make_mesh, reference, run, train_step

MOE: dict[str, Any] = dict(experts=5, top_k=2, ffn=16, shared_ffn=10, aux_loss=0.3, z_loss=0.05, bias_rate=0.05)
MODELS: dict[str, dict[str, Any]] = {
    "softmax": dict(dense_layers=1),
    "drop": dict(capacity=0.8, router="sigmoid", scale=1.7),
    "pad": dict(capacity=0.8, overflow="pad", bias_rate=None),
    "some get none": dict(experts=48, top_k=1, normalize=False),
    "all get all": dict(experts=2, shared_ffn=0, bias_rate=None),
}
LAYOUTS: list[tuple[str, int, dict[str, dict[str, Any]]]] = [
    ("softmax", 1, dict(train=dict(micro_batch=2))),
    ("drop", 1, dict(train=dict(micro_batch=1, recompute="full"))),
    ("drop", 2, dict(train=dict(micro_batch=2, recompute="selective"))),
    ("pad", 4, dict(train=dict(micro_batch=1))),
    ("some get none", 4, dict(train=dict(micro_batch=2))),
    ("all get all", 2, dict(train=dict(micro_batch=4))),
    ("softmax", 2, dict(parallel=dict(pp=2), train=dict(micro_batch=2))),
    ("drop", 2, dict(parallel=dict(pp=2, schedule="zb-v", chunks=2), train=dict(micro_batch=2))),
    ("pad", 2, dict(parallel=dict(pp=2, schedule="interleaved", chunks=2), train=dict(micro_batch=4))),
    ("softmax", 4, dict(parallel=dict(pp=2), train=dict(micro_batch=1, recompute="full"))),
]


def config_of(name: str, **sections: dict[str, Any]) -> Any:
    return make_config(model=dict(layers=4, tied=name == "softmax", moe={**MOE, **MODELS[name]}), **sections)


@functools.cache
def expected(name: str) -> Trace:
    return reference(config_of(name))


@pytest.mark.parametrize(("name", "world", "sections"), LAYOUTS)
def test_equals_one_process(ranks: Any, name: str, world: int, sections: dict[str, Any]) -> None:
    config, want = config_of(name, **sections), expected(name)
    assert all(want.weights[spec.name].unique().numel() > 1 for spec in bias_specs(config.model)), "a bias has moved"
    compare(assemble(config, ranks(world, run, config, world)), want, 1e-9)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("parallel", [{}, dict(pp=2)])
def test_zero_equals_one_process(ranks: Any, stage: int, parallel: dict[str, int]) -> None:
    config = config_of("drop", train=dict(precision="float32", micro_batch=2), parallel=parallel,
                       sharding=dict(stage=stage, bucket_mib=0.005))  # fmt: skip
    world = 2 * parallel.get("pp", 1)
    compare(assemble(config, ranks(world, run, config, world)), expected("drop"), 1e-4)


def report(world: int, sections: dict[str, Any]) -> dict[str, float]:
    """Of the second step."""
    from hpctrain.parallel.parallelize import build_chunks
    from hpctrain.parallel.pipeline import Pipeline
    from hpctrain.sharding.build import build_engine

    config = config_of("drop", **sections)
    mesh = make_mesh(config, world)
    engine = build_engine(*build_chunks(config, mesh), mesh, config)
    pipeline = Pipeline(engine, mesh, config)
    for step in range(2):
        train_step(engine, mesh, config, step, pipeline)
    return engine.routers.report()


def test_the_report_is_of_all_ranks_layers_and_samples(ranks: Any) -> None:
    (want,) = ranks(1, report, 1, dict(train=dict(micro_batch=8)))
    assert want["moe/dropped_tokens"] > 0 and want["moe/load_imbalance"] > 1 and 0.5 < want["moe/aux_loss"] < 5
    assert [k for k in want if "layer" in k] == [f"moe/load_imbalance_layer_{i}" for i in range(4)]
    for world, sections in (
        (2, dict(train=dict(micro_batch=1, recompute="full"))),
        (4, dict(train=dict(micro_batch=2), parallel=dict(pp=2))),
    ):
        for got in ranks(world, report, world, sections):
            assert got == pytest.approx(want, rel=1e-9)


def lives(run_folder: Any, world: int, parallel: dict[str, Any], stage: int, first: int, last: int) -> Any:
    """Steps `first` to `last`, after which all is saved; and what is there then."""
    from hpctrain.checkpoint.collective import find, save
    from hpctrain.layout.parameters import saved_shapes
    from hpctrain.parallel.parallelize import build_chunks
    from hpctrain.parallel.pipeline import Pipeline
    from hpctrain.sharding.build import build_engine

    train = dict(precision="float32", micro_batch=2)
    config = config_of("drop", train=train, parallel=parallel, sharding=dict(stage=stage))
    mesh = make_mesh(config, world)
    engine = build_engine(*build_chunks(config, mesh), mesh, config)
    found = find(run_folder, mesh.world)
    if found is not None:
        found.reader.expect(saved_shapes(config.model))
        engine.load(found.reader)
    pipeline = Pipeline(engine, mesh, config)
    for step in range(first, last):
        train_step(engine, mesh, config, step, pipeline)
    save(run_folder, last, engine, {}, mesh.world)
    return [(p.name, p.start, p.fetch()) for p in engine.pieces() if p.kind == "weight"]


@pytest.mark.parametrize(("world", "parallel", "stage"), [(1, {}, 0), (2, {}, 1), (4, dict(pp=2), 0)])
def test_checkpoints_keep_the_biases(
    tmp_path: Any, ranks: Any, world: int, parallel: dict[str, Any], stage: int
) -> None:
    """Written by two ranks and read by others, which write each once and go on as one process would."""
    saved = [piece for of_rank in ranks(2, lives, tmp_path, 2, {}, 0, 0, 1) for piece in of_rank]
    assert all(values.any() for name, _, values in saved if name.endswith("router.bias"))
    pieces = [piece for of_rank in ranks(world, lives, tmp_path, world, parallel, stage, 1, 3) for piece in of_rank]
    want = expected("drop").weights
    names = [name for name, *_ in pieces if name.endswith("router.bias")]
    assert sorted(names) == [f"layers.{i}.moe.router.bias" for i in range(4)]
    for name, _, values in pieces:
        if name in names:
            torch.testing.assert_close(values, want[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("finite", [True, False])
def test_a_skipped_step_moves_no_bias(finite: bool) -> None:
    from hpctrain.parallel.parallelize import build_chunks
    from hpctrain.sharding.build import build_engine

    config = config_of("drop")
    mesh = make_mesh(config, 1)
    engine = build_engine(*build_chunks(config, mesh), mesh, config)
    batch = global_batch(config, 0)
    engine.begin_step(batch.valid_tokens, 1)
    engine.backward(engine.forward(0, batch))
    assert engine.step(1e-3, loss_finite=finite).skipped != finite
    biases = [router.bias for router in routers_of(engine.chunks[0]).values()]
    assert len(biases) == 4 and all(bool(bias.any()) == finite for bias in biases)


def test_generate_takes_the_biases() -> None:
    config = config_of("drop")
    model = Transformer(config.model)
    reader: Any = SimpleNamespace(read=lambda name, kind, start, shape: torch.full(shape, len(name) / 100))
    load_weights(model, placements(config.model, Layout(), 0), reader)
    for name, router in routers_of(model).items():
        assert router.bias is not None and (router.bias == len(f"{name}.bias") / 100).all()
