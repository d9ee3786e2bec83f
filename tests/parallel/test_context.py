"""Context parallelism: it equals one plain process, for every way to split a sequence and beside every other axis."""

from __future__ import annotations

import functools

import pytest

from tests.training import assemble, compare, make_config, reference, run

GPT = dict(kv_heads=4, norm="layernorm", position="learned", activation="gelu", bias=True, dropout=0.2)
MODELS = {
    "gqa": {},
    "mqa": dict(model=dict(kv_heads=1, dropout=0.1), train=dict(micro_batch=2)),
    "gpt": dict(model=GPT, train=dict(label_smoothing=0.1, z_loss=1e-3)),
    "one document": dict(data=dict(document_mask=False), model=dict(tied=True)),
    "eight": dict(model=dict(heads=8, kv_heads=2, dropout=0.2, layers=1)),
    "deep": dict(model=dict(layers=4, tied=True), train=dict(micro_batch=1)),
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
    config = config_of(name, parallel=parallel)
    got = assemble(config, ranks(world, run, config, world))
    assert got.gradients.keys() == got.weights.keys() == expected(name).weights.keys()
    compare(got, expected(name), 1e-9)
