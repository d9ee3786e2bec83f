"""A real engine's state, saved under one layout and continued under another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hpctrain.layout.parameters import parameter_specs
from tests.training import make_config, make_mesh, train_step


def part(run: Path, world: int, tp: int, first: int, last: int, save_at: int | None = None) -> list[Any]:
    """Steps `first` to `last`, from the checkpoint if there is one; losses, norms and this rank's pieces."""
    from hpctrain.checkpoint.collective import find, save
    from hpctrain.parallel.parallelize import build_model
    from hpctrain.sharding.build import build_engine

    config = make_config(parallel=dict(tp=tp))
    mesh = make_mesh(config, world)
    engine = build_engine(*_chunks(build_model(config, mesh)), mesh, config)
    found = find(run, mesh.world)
    assert (found is None) == (first == 0)
    if found is not None:
        assert found.step == found.extra["consumed"] == first
        found.reader.expect({s.name: s.shape for s in parameter_specs(config.model)})
        engine.load(found.reader)
    steps = [train_step(engine, mesh, config, step) for step in range(first, last)]
    if save_at is not None:
        save(run, last, engine, {"consumed": last}, mesh.world)
    pieces = {(p.name, p.kind, p.start): p.fetch().clone() for p in engine.pieces()}
    return [steps, engine.scalars(), pieces]


def _chunks(built: tuple[Any, Any]) -> tuple[list[Any], Any]:
    return [built[0]], built[1]


@pytest.mark.parametrize("before, after", [((2, 2), (1, 1)), ((1, 1), (4, 2)), ((4, 2), (4, 2))])
def test_continues_as_if_nothing_had_happened(
    tmp_path: Path, ranks: Callable[..., list[Any]], before: tuple[int, int], after: tuple[int, int]
) -> None:
    """(world, tp) before and after. Under the same layout to the bit, under another to the rounding of sums."""
    whole = ranks(after[0], part, tmp_path / "whole", *after, 0, 3)
    ranks(before[0], part, tmp_path / "run", *before, 0, 2, 2)
    rest = ranks(after[0], part, tmp_path / "run", *after, 2, 3)
    for (steps, scalars, pieces), (all_steps, all_scalars, all_pieces) in zip(rest, whole):
        assert scalars == all_scalars and pieces.keys() == all_pieces.keys()
        if before == after:
            assert steps == all_steps[2:]
        assert torch.allclose(torch.tensor(steps), torch.tensor(all_steps[2:]), rtol=1e-9, atol=0)
        for key, values in pieces.items():
            other = all_pieces[key]
            tolerance = 0.0 if before == after else 1e-9 * max(float(other.abs().max()), 1e-12)
            assert (values - other).abs().max() <= tolerance, key


def life(before: Path | None, after: Path, world: int, kv_heads: int, tp: int) -> None:
    """Save into `after` what was read from `before`, or what two steps have made."""
    from hpctrain.checkpoint.collective import find, save
    from hpctrain.parallel.parallelize import build_model
    from hpctrain.sharding.build import build_engine

    config = make_config(model=dict(kv_heads=kv_heads), parallel=dict(tp=tp), train=dict(seed=tp))
    mesh = make_mesh(config, world)
    engine = build_engine(*_chunks(build_model(config, mesh)), mesh, config)
    if before is None:
        for step in range(2):
            train_step(engine, mesh, config, step)
    else:
        found = find(before, mesh.world)
        assert found is not None
        engine.load(found.reader)
    save(after, 2, engine, {}, mesh.world)


@pytest.mark.parametrize("kv_heads", [2, 1])
def test_every_bit_comes_through_layouts(tmp_path: Path, ranks: Callable[..., list[Any]], kv_heads: int) -> None:
    """Weights and moments of tp=4, where key/value heads are fewer than ranks, through tp=1 and tp=2."""
    from hpctrain.checkpoint.read import CheckpointReader

    before, readers = None, []
    for number, (world, tp) in enumerate(((4, 4), (1, 1), (4, 2))):
        after = tmp_path / str(number)
        ranks(world, life, before, after, world, kv_heads, tp)
        readers.append(CheckpointReader(after / "checkpoints" / "step-00000002"))
        before = after
    first = readers[0]
    names = {s.name for s in parameter_specs(make_config(model=dict(kv_heads=kv_heads)).model)}
    assert first.tensors().keys() == {(n, kind) for n in names for kind in ("weight", "exp_avg", "exp_avg_sq")}
    assert max(map(len, first.tensors().values())) == 4, "cut in four"
    for later in readers[1:]:
        assert later.tensors().keys() == first.tensors().keys() and later.scalars() == first.scalars()
        for (name, kind), pieces in first.tensors().items():
            whole = ((0,) * len(pieces[0].global_shape), pieces[0].global_shape)
            a, b = first.array(name, kind, *whole), later.array(name, kind, *whole)
            assert a.dtype == b.dtype and a.tobytes() == b.tobytes(), (name, kind)
            assert a.any() or (kind != "weight" and name.endswith("bias")), (name, kind)
