"""Context parallelism: it equals one plain process, for every way to split a sequence and beside every other axis."""

from __future__ import annotations

import functools

import pytest
import torch

from hpctrain.layout.context import spans
from hpctrain.model.batch import Batch
from hpctrain.model.random import Dropout
from hpctrain.parallel.comm import Axis
from hpctrain.parallel.context import ContextDropout
from hpctrain.telemetry.meter import Meter
from tests.training import assemble, compare, make_config, make_mesh, reference, run

GPT = dict(kv_heads=4, norm="layernorm", position="learned", activation="gelu", bias=True, dropout=0.2)
MODELS = {
    "gqa": {},
    "mqa": dict(model=dict(kv_heads=1, dropout=0.1), train=dict(micro_batch=2)),
    "gpt": dict(model=GPT, train=dict(label_smoothing=0.1, z_loss=1e-3)),
    "one document": dict(data=dict(document_mask=False), model=dict(tied=True)),
    "eight": dict(model=dict(heads=8, kv_heads=2, dropout=0.2, layers=1)),
    "deep": dict(model=dict(layers=4, tied=True), train=dict(micro_batch=2)),
}


def config_of(name, **changes):
    sections = {key: dict(values) for key, values in MODELS[name].items()}
    for key, values in {"data": {}, **changes}.items():
        sections[key] = {**sections.get(key, {}), **values}
    return make_config(**{**sections, "data": {"seq": 16, **sections["data"]}})


@functools.cache
def expected(name):
    return reference(config_of(name))


CASES = [
    ("gqa", 2, dict(cp=2)),
    ("gqa", 4, dict(cp=4)),
    ("gqa", 8, dict(cp=8)),
    ("mqa", 4, dict(cp=4)),
    ("gpt", 2, dict(cp=2)),
    ("gpt", 4, dict(cp=2, tp=2)),
    ("gpt", 4, dict(cp=2, tp=2, sp=True)),
    ("gqa", 8, dict(cp=4, tp=2, sp=True)),
    ("one document", 4, dict(cp=4)),
    ("one document", 4, dict(cp=2)),
    ("mqa", 8, dict(cp=2, tp=2)),
    ("deep", 4, dict(cp=2, pp=2)),
    ("deep", 8, dict(cp=2, pp=2, tp=2, sp=True, schedule="zb-h1")),
    ("deep", 8, dict(cp=2, pp=2, schedule="zb-v", chunks=2)),
    ("gqa", 2, dict(cp=2, cp_method="ulysses")),
    ("mqa", 4, dict(cp=4, cp_method="ulysses")),
    ("gpt", 4, dict(cp=2, tp=2, sp=True, cp_method="ulysses")),
    ("eight", 8, dict(cp=8, cp_method="ulysses")),
    ("eight", 8, dict(cp=4, tp=2, cp_method="ulysses")),
    ("one document", 4, dict(cp=2, cp_method="ulysses")),
    ("deep", 8, dict(cp=2, pp=2, schedule="interleaved", chunks=2, cp_method="ulysses")),
]


@pytest.mark.parametrize("name,world,parallel", CASES, ids=str)
def test_equals_one_process(ranks, name, world, parallel):
    """Traps D19 (tokens, labels and documents are cut alike) and D20 (rotations at global positions)."""
    config = config_of(name, parallel=parallel)
    got = assemble(config, ranks(world, run, config, world))
    assert got.gradients.keys() == got.weights.keys() == expected(name).weights.keys()
    compare(got, expected(name), 1e-9)


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("method,sp", [("ring", True), ("ulysses", False)])
def test_recomputation_changes_no_bit(ranks, method, sp, recompute):
    first, second = (
        assemble(config, ranks(4, run, config, 4))
        for config in (
            config_of("mqa", parallel=dict(cp=2, tp=2, sp=sp, cp_method=method), train=dict(recompute=what))
            for what in ("none", recompute)
        )
    )
    compare(first, expected("mqa"), 1e-9)
    assert first.losses == second.losses and first.norms == second.norms
    for mine, other in ((first.gradients, second.gradients), (first.weights, second.weights)):
        assert all(torch.equal(mine[name], other[name]) for name in mine)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    "name,world,parallel",
    [
        ("gqa", 4, dict(cp=2)),
        ("mqa", 4, dict(cp=2, tp=2, sp=True)),
        ("deep", 4, dict(cp=2, pp=2)),
        ("gpt", 4, dict(cp=4, cp_method="ulysses")),
    ],
    ids=str,
)
def test_zero_equals_one_process_in_float32(ranks, stage, name, world, parallel):
    """Tolerances as in `tests/sharding/test_deepspeed_equivalence.py`."""
    config = config_of(name, parallel=parallel, sharding=dict(stage=stage), train=dict(precision="float32"))
    got = assemble(config, ranks(world, run, config, world))
    assert got.losses == pytest.approx(expected(name).losses, rel=1e-5)
    assert got.norms == pytest.approx(expected(name).norms, rel=1e-5)
    compare(got, expected(name), 1e-4)


def test_samples_and_positions_are_split_alike(ranks):
    """Trap D11. 4 ranks: data parallelism alone, both, context parallelism alone. No loss or gradient counts a rank
    twice."""
    traces = []
    for cp in (1, 2, 4):
        config = config_of("gqa", parallel=dict(cp=cp), train=dict(micro_batch=2))
        traces.append(assemble(config, ranks(4, run, config, 4)))
    for trace in traces[1:]:
        compare(trace, traces[0], 1e-11)


def logits(method, change):
    """What a token does to the logits of each position, [seq of this rank], and the positions."""
    from hpctrain.parallel.context import own_part
    from hpctrain.parallel.parallelize import build_model

    config = config_of("gqa", parallel=dict(cp=4, cp_method=method))
    mesh = make_mesh(config, 4)
    model, _ = build_model(config, mesh)
    tokens = torch.arange(16)[None] % 53
    documents = torch.tensor([[0] * 6 + [1] * 7 + [2] * 3]) if change is not None else None
    out = []
    for at in (None, change or 3):
        changed = tokens.clone()
        if at is not None:
            changed[0, at] += 1
        part = own_part(Batch(changed, changed, documents, torch.tensor([0])), config, mesh)
        states, _ = model.eval().states(part.tokens, part.documents, positions=part.positions)
        out.append(model.predict(states).detach()[0])
    return part.positions.tolist(), (out[0] != out[1]).any(-1).tolist()


@pytest.mark.parametrize("method", ["ring", "ulysses"])
@pytest.mark.parametrize(
    "change,reaches", [(3, range(3, 6)), (8, range(8, 13)), (13, range(13, 16)), (None, range(3, 16))]
)
def test_documents_do_not_see_each_other(ranks, method, change, reaches):
    """To the bit: a token of one document changes what comes after it there, and nothing else, on whatever rank."""
    touched = [p for positions, changed in ranks(4, logits, method, change) for p, c in zip(positions, changed) if c]
    assert sorted(touched) == list(reaches)


@pytest.mark.parametrize("method,tp", [("ring", 1), ("ulysses", 1), ("ring", 2)])
def test_masks_are_parts_of_the_whole(method, tp):
    plain = Dropout(0.5, 3, "layers.0.mlp")
    whole = plain.mask([7, 9], torch.Size((16, 5)), torch.device("cpu"))
    for i in range(4):
        cp = Axis("cp", tuple(range(4)), i, None, Meter())
        part = torch.cat([whole[:, start:end] for start, end in spans(method, 16, 4, i)], 1)
        for j in range(tp):
            inner = Axis("tp", tuple(range(tp)), j, None, Meter())
            mine = ContextDropout(plain, method, cp, inner).mask([7, 9], torch.Size((4 // tp, 5)), torch.device("cpu"))
            assert torch.equal(mine, part.chunk(tp, 1)[j])


def test_twice_is_bit_equal(ranks):
    config = config_of("gpt", parallel=dict(cp=4), train=dict(precision="bf16"))
    first, second = (assemble(config, ranks(4, run, config, 4)) for _ in range(2))
    assert first.losses == second.losses and first.norms == second.norms
    assert all(torch.equal(first.weights[name], second.weights[name]) for name in first.weights)
