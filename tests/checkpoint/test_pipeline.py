"""State saved by one pipeline and continued by another: pp, chunks, uneven stages, tied parameters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hpctrain.checkpoint.collective import find, save
from hpctrain.checkpoint.read import CheckpointReader
from hpctrain.layout.parameters import parameter_specs
from tests.training import make_config, make_mesh, train_step

# parallel, ranks
LAYOUTS: dict[str, tuple[dict[str, Any], int]] = {
    "one": ({}, 1),
    "pp2": ({"pp": 2}, 2),
    "pp3-uneven": ({"pp": 3, "stage_layers": (0, 4, 0)}, 3),
    "pp2-tp2": ({"pp": 2, "tp": 2}, 4),
    "interleaved-dp2": ({"pp": 2, "schedule": "interleaved", "chunks": 2}, 4),
    "zb-v": ({"pp": 2, "schedule": "zb-v", "chunks": 2}, 2),
}


def life(before: Path | None, after: Path, name: str, tied: bool, first: int, last: int, stage: int = 0) -> list[Any]:
    """Steps `first` to `last` from the checkpoint in `before`, if any, saved into `after`; losses and norms."""
    from hpctrain.parallel.parallelize import build_chunks
    from hpctrain.parallel.pipeline import Pipeline
    from hpctrain.sharding.build import build_engine, takes_values

    parallel, world = LAYOUTS[name]
    config = make_config(
        model={"layers": 4, "tied": tied},
        parallel=parallel,
        train={"micro_batch": 2, "precision": "float32" if stage else "float64"},
        sharding={"stage": stage},
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


@pytest.mark.parametrize("tied", [False, True])
def test_every_bit_comes_through_pipelines(tmp_path: Path, ranks: Callable[..., list[Any]], tied: bool) -> None:
    """Two steps under pp=2, then saved under every other layout in turn: weights and moments stay what they were."""
    before, readers = None, []
    for name in ("pp2", "interleaved-dp2", "one", "zb-v", "pp2-tp2", "pp3-uneven"):
        after = tmp_path / name
        ranks(LAYOUTS[name][1], life, before, after, name, tied, 2 if before else 0, 2)
        readers.append(CheckpointReader(after / "checkpoints" / "step-00000002"))
        before = after
    first = readers[0]
    names = {s.name for s in parameter_specs(make_config(model={"layers": 4, "tied": tied}).model)}
    assert first.tensors().keys() == {(n, kind) for n in names for kind in ("weight", "exp_avg", "exp_avg_sq")}
    assert ("head.weight" in names) != tied
    for later in readers[1:]:
        assert later.tensors().keys() == first.tensors().keys() and later.scalars() == first.scalars()
        for (name, kind), pieces in first.tensors().items():
            whole = ((0,) * len(pieces[0].global_shape), pieces[0].global_shape)
            a, b = first.array(name, kind, *whole), later.array(name, kind, *whole)
            assert a.dtype == b.dtype and a.tobytes() == b.tobytes() and a.any(), (name, kind)


@pytest.mark.parametrize("after", ["one", "pp2-tp2", "interleaved-dp2", "zb-v"])
def test_another_pipeline_continues(tmp_path: Path, ranks: Callable[..., list[Any]], after: str) -> None:
    whole = ranks(1, life, None, tmp_path / "whole", "one", True, 0, 3)[0]
    ranks(2, life, None, tmp_path / "run", "pp2", True, 0, 2)
    for rest in ranks(LAYOUTS[after][1], life, tmp_path / "run", tmp_path / "rest", after, True, 2, 3):
        assert torch.allclose(torch.tensor(rest), torch.tensor(whole[2:]), rtol=1e-9, atol=0)


def test_the_same_pipeline_continues_to_the_bit(tmp_path: Path, ranks: Callable[..., list[Any]]) -> None:
    """Trap D5: nothing of a rank's own is lost, on any stage."""
    whole = ranks(4, life, None, tmp_path / "whole", "interleaved-dp2", True, 0, 3)
    ranks(4, life, None, tmp_path / "run", "interleaved-dp2", True, 0, 2)
    rest = ranks(4, life, tmp_path / "run", tmp_path / "rest", "interleaved-dp2", True, 2, 3)
    assert [steps[2:] for steps in whole] == rest


@pytest.mark.parametrize("stage", [1, 3])
def test_zero_continues_what_engine_none_began(tmp_path: Path, ranks: Callable[..., list[Any]], stage: int) -> None:
    whole = ranks(1, life, None, tmp_path / "whole", "one", True, 0, 3)[0]
    ranks(2, life, None, tmp_path / "run", "zb-v", True, 0, 2)
    for rest in ranks(4, life, tmp_path / "run", tmp_path / "rest", "interleaved-dp2", True, 2, 3, stage):
        assert torch.allclose(torch.tensor(rest), torch.tensor(whole[2:]), rtol=1e-5, atol=0)
