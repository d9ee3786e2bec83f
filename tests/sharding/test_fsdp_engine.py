"""How engine `fsdp` skips, scales, evaluates, holds and hands on state."""

from __future__ import annotations

import math
import os
import sys
import tempfile
import warnings
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hpctrain.config.schema import RunConfig
from hpctrain.errors import ConfigError
from hpctrain.layout.memory import estimate
from hpctrain.sharding.state import KINDS
from tests.sharding.deepspeed_case import Checkpoint
from tests.sharding.fsdp_case import as_none, fsdp_config, started
from tests.training import LR, global_batch, train_batch, train_step


def poisoned(config: RunConfig, world: int, name: str, rank: int) -> Any:
    """Three steps, in the second of which one rank's gradient of a parameter is infinite: whether each was skipped, and
    whether state stayed and moved on."""
    engine, mesh, pipeline = started(config, world)
    results, states = [], []
    for step in range(3):
        spoilt = None
        if step == 1 and mesh.rank == rank:
            spoilt = engine.parameter(name).register_hook(lambda g: g * math.inf)
        results.append(train_batch(engine, mesh, config, step, pipeline)[1])
        if spoilt is not None:
            spoilt.remove()
        states.append({(p.name, p.kind, p.start): p.fetch().clone() for p in engine.pieces()})
    same = all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    moved = any(not torch.equal(states[1][key], states[2][key]) for key in states[1])
    return [(r.skipped, r.backed_off) for r in results], same, moved, engine.scalars()


@pytest.mark.parametrize(
    ("world", "model", "settings", "name", "rank"),
    [
        (4, "gqa", dict(tp=2), "layers.0.mlp_norm.weight", 3),
        (4, "gqa", dict(replicas=2), "head.weight", 1),
        (4, "moe", dict(ep=4), "layers.0.moe.experts.up", 2),
        (4, "deep", dict(pp=2), "norm.weight", 3),
    ],
    ids=str,
)
@pytest.mark.parametrize("precision", ["float32", "fp16"])
def test_all_ranks_skip_what_is_not_finite_on_one(
    ranks: Any, world: int, model: str, settings: dict[str, Any], name: str, rank: int, precision: str
) -> None:
    """Trap D28: also in a parameter that another rank counts in the norm, or of which no other rank has the expert."""
    config = fsdp_config(world, model, precision=precision, loss_scale=256.0, **settings)
    scaled = precision == "fp16"
    for skipped, same, moved, scalars in ranks(world, poisoned, config, world, name, rank):
        assert skipped == [(False, False), (True, scaled), (False, False)]
        assert same and moved and scalars["step"] == 2.0
        assert scalars.get("loss_scale") == (128.0 if scaled else None)


def overflowing(world: int) -> Any:
    config = fsdp_config(world, precision="fp16", loss_scale=3.0 * 2.0**40)
    engine, mesh, pipeline = started(config, world)
    return [train_batch(engine, mesh, config, 0, pipeline)[1].backed_off for _ in range(2)], engine.scalars()


def test_fp16_overflow_halves_the_scale(ranks: Any) -> None:
    for backed_off, scalars in ranks(2, overflowing, 2):
        assert backed_off == [True, True] and scalars["loss_scale"] == 3.0 * 2.0**38


def evaluated(config: RunConfig, world: int, evaluate: bool) -> Any:
    """Two steps, with evaluations before, between and after or without; those are of the weights as they are then."""
    engine, mesh, pipeline = started(config, world)
    steps, seen = [], []
    for step in range(3):
        if evaluate:
            mine = global_batch(config, step).split(2)
            seen.append([float(pipeline.evaluate(mine[:1])) for _ in range(2)])
        if step < 2:
            steps.append(train_step(engine, mesh, config, step, pipeline))
    return steps, seen


@pytest.mark.parametrize("keep", [False, True])
def test_evaluation_sees_the_weights_and_leaves_training_as_it_was(ranks: Any, keep: bool) -> None:
    """Gathered weights of an evaluation are let go: after an update they would be old."""
    config = fsdp_config(2, "gpt", reshard_after_forward=not keep)
    plain = ranks(2, evaluated, as_none(config), 2, True)[0]
    for (steps, seen), (quiet, _) in zip(ranks(2, evaluated, config, 2, True), ranks(2, evaluated, config, 2, False)):
        assert steps == quiet
        assert torch.tensor(seen).allclose(torch.tensor(plain[1]), rtol=1e-12, atol=0)
        assert all(first == second for first, second in seen)


def journey(legs: list[tuple[dict[str, Any], str]], world: int, precision: str) -> list[Any]:
    """Two steps under each of some settings, state handed on in memory; losses and norms of all."""
    out, checkpoint = [], None
    for leg, (settings, model) in enumerate(legs):
        config = fsdp_config(world, model, precision=precision, micro_batch=2, **settings)
        engine, mesh, pipeline = started(config, world)
        if leg == 2:
            train_step(engine, mesh, config, 0, pipeline)  # loading also works over state that is there
        if checkpoint is not None:
            engine.load(checkpoint)
        for step in range(2 * leg, 2 * leg + 2):
            out.append(train_step(engine, mesh, config, step, pipeline))
        checkpoint = Checkpoint(config, engine, mesh)
        assert all((writes == 1).all() for writes in checkpoint.writes.values())
        engine.close()
    assert checkpoint is not None and checkpoint.scalars()["step"] == 2 * len(legs)
    return out


NONE, ZERO1, ZERO3 = dict(engine="none"), dict(engine="auto", stage=1), dict(engine="auto", stage=3)


@pytest.mark.parametrize(
    "legs",
    [
        [dict(tp=2), NONE, dict(replicas=2)],
        [ZERO3, dict(tp=4), ZERO1],
        [dict(cp=2, replicas=2), ZERO3 | dict(tp=2), {}],
        [dict(pp=2), dict(tp=2, reduce_every="step"), NONE | dict(pp=2)],
    ],
    ids=str,
)
def test_resumes_under_other_layouts_and_engines(ranks: Any, legs: list[dict[str, Any]]) -> None:
    """Every element is written once, moments too."""
    straight = ranks(4, journey, [(NONE, "gqa")] * 3, 4, "float32")[0]
    for got in ranks(4, journey, [(leg, "gqa") for leg in legs], 4, "float32"):
        assert torch.tensor(got).allclose(torch.tensor(straight), rtol=2e-5, atol=0)


def test_experts_resume_under_other_layouts_and_engines(ranks: Any) -> None:
    legs = [dict(ep=4), ZERO1 | dict(ep=2), dict(ep=2, replicas=2)]
    straight = ranks(4, journey, [(NONE, "moe")] * 3, 4, "float32")[0]
    for got in ranks(4, journey, [(leg, "moe") for leg in legs], 4, "float32"):
        assert torch.tensor(got).allclose(torch.tensor(straight), rtol=2e-5, atol=0)


def whole(settings: dict[str, Any], world: int) -> list[Any]:
    config = fsdp_config(world, precision="bf16", micro_batch=2, **settings)
    engine, mesh, pipeline = started(config, world)
    return [train_step(engine, mesh, config, step, pipeline) for step in range(4)]


@pytest.mark.parametrize("settings", [{}, dict(replicas=2), dict(tp=2)], ids=str)
def test_resumes_to_the_bit_under_the_same_layout(ranks: Any, settings: dict[str, Any]) -> None:
    """The master weights of bf16 are saved, not the weights that compute."""
    assert ranks(4, journey, [(settings, "gqa")] * 2, 4, "bf16") == ranks(4, whole, settings, 4)


DEEP = dict(layers=12, hidden=48, heads=4, kv_heads=4, head_dim=12, ffn=192, vocab=192)
"""Many layers, of which none, nor the vocabulary, is much of the whole."""


def held(config: RunConfig, world: int) -> Any:
    """At rest after two steps: bytes of master weights and moments, and of gathered weights; and most weights gathered
    at once in a third, as a share of all. The estimate."""
    engine, mesh, pipeline = started(config, world)
    names = [name for chunk in engine.chunks for name, _ in chunk.named_parameters()]
    gathered, most = {name: engine.parameter(name) for name in names}, 0
    for step in range(2):
        train_step(engine, mesh, config, step, pipeline)
    state = [engine.optimizer.state(name, kind) for name in names for kind in KINDS]  # type: ignore[attr-defined]
    rest = sum(t.untyped_storage().size() for t in state), sum(p.untyped_storage().size() for p in gathered.values())

    def sample(*_: Any) -> None:
        nonlocal most
        most = max(most, sum(p.numel() for p in gathered.values() if p.untyped_storage().size()))

    for module in (m for chunk in engine.chunks for m in chunk.modules()):
        module.register_forward_pre_hook(sample)
        module.register_forward_hook(sample)
    for p in gathered.values():
        p.register_hook(sample)
    train_step(engine, mesh, config, 2, pipeline)
    return rest, most / sum(p.numel() for p in gathered.values()), estimate(config, mesh.layout)


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_state_is_sharded_and_a_few_layers_are_gathered_at_a_time(ranks: Any, precision: str) -> None:
    """Of twelve one, and another under way in a buffer. State is what the estimate says, to the padding of dims that
    three does not divide."""
    config = fsdp_config(3, more=DEEP, precision=precision, global_batch=6)
    for (state, gathered), most, memory in ranks(3, held, config, 3):
        assert 1 <= state / (memory.weights + memory.optimizer) < 1.02 and gathered == 0
        assert memory.gradients == memory.weights == memory.optimizer / 2
        assert 0.9 / 13 < most < 2.2 / 13
    kept = fsdp_config(3, more=DEEP, precision=precision, global_batch=6, reshard_after_forward=False)
    for (_, gathered), most, memory in ranks(3, held, kept, 3):
        assert gathered == 0 and most == 1.0
        whole = memory.gradients * 3 // (2 if precision == "bf16" else 1)
        assert 0.98 < (memory.weights - memory.gradients) / whole <= 1


def frozen(config: RunConfig, world: int) -> Any:
    """Two steps in which all but the norms stands still: gradients and weights that moved, and what was sent."""
    from hpctrain.parallel.parallelize import build_chunks
    from hpctrain.parallel.pipeline import Pipeline
    from hpctrain.sharding.build import build_engine, takes_values
    from tests.training import make_mesh

    mesh = make_mesh(config, world)
    chunks, records = build_chunks(config, mesh, takes_values(config))
    for name, p in chunks[0].named_parameters():
        p.requires_grad_("norm" in name)
    engine = build_engine(chunks, records, mesh, config)
    pipeline = Pipeline(engine, mesh, config)
    before = {(p.name, p.start): p.fetch().clone() for p in engine.pieces() if p.kind == "weight"}
    steps = [train_step(engine, mesh, config, step, pipeline) for step in range(2)]
    after = {(p.name, p.start): p.fetch() for p in engine.pieces() if p.kind == "weight"}
    moved = {name for (name, start), values in after.items() if not torch.equal(values, before[name, start])}
    return steps, moved


@pytest.mark.parametrize("settings", [{}, dict(recompute="full"), dict(replicas=2, reduce_every="step")], ids=str)
def test_frozen_parameters(ranks: Any, settings: dict[str, Any]) -> None:
    config = fsdp_config(2, **settings)
    want, moved = ranks(2, frozen, as_none(config), 2)[0]
    assert moved == set() or all("norm" in name for name in moved)
    found = ranks(2, frozen, config, 2)
    for steps, _ in found:
        assert torch.tensor(steps).allclose(torch.tensor(want), rtol=1e-9, atol=0)
    everywhere = set().union(*(names for _, names in found))
    assert len(everywhere) == 5 and all("norm" in name for name in everywhere)


def overheard() -> Any:
    """What runs write to the descriptors and to Python's streams, and what they warn of."""
    with tempfile.TemporaryFile("w+") as heard:
        saved = os.dup(1), os.dup(2), sys.stdout, sys.stderr
        os.dup2(heard.fileno(), 1), os.dup2(heard.fileno(), 2)
        sys.stdout = sys.stderr = heard
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("default")
                for settings in (dict(recompute="full"), dict(precision="bf16", replicas=2), dict(ep=2, model="moe")):
                    model = settings.pop("model", "tied")
                    config = fsdp_config(2, str(model), **settings)
                    engine, mesh, pipeline = started(config, 2)
                    for step in range(2):
                        train_step(engine, mesh, config, step, pipeline)
                    pipeline.evaluate(global_batch(config, 0).split(4))
                    engine.load(Checkpoint(config, engine, mesh)) if model == "tied" else None
                    engine.close()
        finally:
            heard.flush()
            os.dup2(saved[0], 1), os.dup2(saved[1], 2)
            sys.stdout, sys.stderr = saved[2:]
        heard.seek(0)
        return heard.read(), [str(warning.message) for warning in caught]


def test_nothing_is_printed(ranks: Any) -> None:
    assert ranks(2, overheard) == [("", [])] * 2


def at_rest() -> Any:
    """Types of parameters between steps, and of those that compute."""
    config = fsdp_config(1)
    engine, mesh, pipeline = started(config, 1)
    train_step(engine, mesh, config, 0, pipeline)
    (chunk,) = engine.chunks
    kinds = {type(p) for p in chunk.parameters()}, {isinstance(m, FSDPModule) for m in chunk.layers.values()}
    return kinds, {engine.parameter(name).is_leaf for name, _ in chunk.named_parameters()}


def test_one_process_without_a_group_is_enough(ranks: Any) -> None:
    (kinds, modules), leaves = ranks(0, at_rest)[0]
    assert all(issubclass(kind, DTensor) for kind in kinds) and modules == {True} and leaves == {True}


def old_torch() -> str:
    from hpctrain.sharding.fsdp import engine

    engine.NEEDED = (*engine.NEEDED, "set_what_comes_next")
    try:
        started(fsdp_config(1), 1)
    except ConfigError as error:
        return str(error)
    return ""


def test_an_older_fsdp2_is_refused(ranks: Any) -> None:
    (said,) = ranks(1, old_torch)
    assert said.startswith("sharding.engine='fsdp': needs FSDP2 with set_what_comes_next") and "use torch" in said


def judged(config: RunConfig, world: int) -> Any:
    """A step whose loss was not finite somewhere, and one whose loss was: whether weights moved in each."""
    engine, mesh, pipeline = started(config, world)
    out = []
    for finite in (False, True):
        before = [p.fetch().clone() for p in engine.pieces() if p.kind == "weight"]
        batch = global_batch(config, 0)
        mine = batch.split(config.train.global_batch // mesh.dp.size)[mesh.dp.index].split(config.train.micro_batch)
        engine.begin_step(batch.valid_tokens, len(mine))
        pipeline.train(mine)
        assert engine.step(LR[0], finite).skipped is not finite
        after = [p.fetch() for p in engine.pieces() if p.kind == "weight"]
        out.append(any(not torch.equal(a, b) for a, b in zip(before, after)))
    return out


def test_a_loss_that_is_not_finite_skips(ranks: Any) -> None:
    assert ranks(2, judged, fsdp_config(2), 2) == [[False, True]] * 2
