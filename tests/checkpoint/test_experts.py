"""State saved under one spread of experts and continued under another: ep, etp, tp, pp and engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hpctrain.checkpoint.collective import find, save
from hpctrain.checkpoint.read import CheckpointReader
from hpctrain.layout.parameters import bias_specs, parameter_specs
from tests.training import make_config, make_mesh, train_step

MODEL: dict[str, Any] = dict(
    layers=4,
    init_std=0.2,
    moe=dict(experts=8, top_k=2, ffn=12, shared_ffn=16, aux_loss=0.03, bias_rate=0.01, dense_layers=1),
)
LAYOUTS: dict[str, tuple[dict[str, Any], int]] = {
    "one": ({}, 1),
    "ep4-tp2": ({"ep": 4, "tp": 2}, 4),
    "ep2-edp2": ({"ep": 2}, 4),
    "ep2-tp2-etp2": ({"ep": 2, "tp": 2, "etp": 2, "sp": True}, 4),
    "pp2-ep4-tp2": ({"pp": 2, "ep": 4, "tp": 2}, 8),
}


def life(before: Path | None, after: Path, name: str, first: int, last: int, stage: int = 0) -> list[Any]:
    """Steps `first` to `last` from the checkpoint in `before`, if any, saved into `after`; losses and norms."""
    from hpctrain.parallel.parallelize import build_chunks
    from hpctrain.parallel.pipeline import Pipeline
    from hpctrain.sharding.build import build_engine, takes_values

    parallel, world = LAYOUTS[name]
    train = {"micro_batch": 1, "precision": "float32" if stage else "float64"}
    config = make_config(
        model=MODEL, data=dict(seq=12), parallel=parallel, train=train, sharding={"stage": stage, "bucket_mib": 0.005}
    )
    mesh = make_mesh(config, world)
    chunks, records = build_chunks(config, mesh, materialize=takes_values(config))
    engine = build_engine(chunks, records, mesh, config)
    if before is not None:
        found = find(before, mesh.world)
        assert found is not None and found.step == first
        engine.load(found.reader)
    pipeline = Pipeline(engine, mesh, config)
    steps = [train_step(engine, mesh, config, step, pipeline) for step in range(first, last)]
    save(after, last, engine, {}, mesh.world)
    return steps


def same(first: CheckpointReader, later: CheckpointReader) -> None:
    """Every bit of two checkpoints."""
    assert later.tensors().keys() == first.tensors().keys() and later.scalars() == first.scalars()
    for (name, kind), pieces in first.tensors().items():
        whole = ((0,) * len(pieces[0].global_shape), pieces[0].global_shape)
        a, b = first.array(name, kind, *whole), later.array(name, kind, *whole)
        assert a.dtype == b.dtype and a.tobytes() == b.tobytes() and a.any(), (name, kind)


@pytest.mark.parametrize(("stage", "chain"), [(0, LAYOUTS), (2, ["ep2-edp2", "ep4-tp2", "ep2-tp2-etp2", "ep2-edp2"])])
def test_every_bit_comes_through(tmp_path: Path, ranks: Callable[..., list[Any]], stage: int, chain: list[str]) -> None:
    """Two steps under ep=2, then saved under every other spread in turn: weights, moments, biases stay."""
    config, before, readers = make_config(model=MODEL), None, []
    for number, name in enumerate(["ep2-edp2", *chain]):
        after = tmp_path / str(number)
        ranks(LAYOUTS[name][1], life, before, after, name, 2 if before else 0, 2, stage)
        readers.append(CheckpointReader(after / "checkpoints" / "step-00000002"))
        before = after
    parameters = {(s.name, kind) for s in parameter_specs(config.model) for kind in ("weight", "exp_avg", "exp_avg_sq")}
    assert readers[0].tensors().keys() == parameters | {(s.name, "weight") for s in bias_specs(config.model)}
    for later in readers[1:]:
        same(readers[0], later)


@pytest.mark.parametrize(("after", "stage"), [("ep4-tp2", 0), ("pp2-ep4-tp2", 0), ("ep2-tp2-etp2", 1)])
def test_another_spread_continues(tmp_path: Path, ranks: Callable[..., list[Any]], after: str, stage: int) -> None:
    whole = ranks(1, life, None, tmp_path / "whole", "one", 0, 3)[0]
    ranks(4, life, None, tmp_path / "run", "ep2-edp2", 0, 2)
    for rest in ranks(LAYOUTS[after][1], life, tmp_path / "run", tmp_path / "rest", after, 2, 3, stage):
        assert torch.allclose(torch.tensor(rest), torch.tensor(whole[2:]), rtol=1e-5 if stage else 1e-9, atol=0)
