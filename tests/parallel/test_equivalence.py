"""Engine `none` in float64 equals one plain process to 1e-9, whatever the layout."""

from __future__ import annotations

import functools

import pytest

from tests.training import assemble, compare, make_config, reference, run

MODELS = {
    "gqa": {},
    "mqa": dict(model=dict(kv_heads=1, qk_norm=True)),
    "tied": dict(model=dict(tied=True)),
    "gpt": dict(
        model=dict(kv_heads=4, norm="layernorm", position="learned", activation="gelu", bias=True, dropout=0.2),
        train=dict(label_smoothing=0.1, z_loss=1e-3),
    ),
    "gqa-bias": dict(model=dict(bias=True, activation="gelu_tanh", tied=True, vocab=51)),
    "accumulation": dict(train=dict(micro_batch=1)),
    "no-clip": dict(optimizer=dict(clip=0.0), train=dict(micro_batch=2, z_loss=1e-2)),
    "no-overlap": dict(train=dict(micro_batch=2, overlap=False)),
}
LAYOUTS = [(tp, dp) for tp in (1, 2, 4) for dp in (1, 2)]


@functools.cache
def expected(name):
    return reference(make_config(**MODELS[name]))


@pytest.mark.parametrize("tp,dp", LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
def test_equals_one_process(ranks, name, tp, dp):
    """Traps D4 ("gpt" drops), D9 (every sample has another number of valid tokens) and D24 ("mqa", "gqa")."""
    config = make_config(**MODELS[name], parallel=dict(tp=tp))
    got = assemble(config, ranks(tp * dp, run, config, tp * dp))
    assert got.gradients.keys() == got.weights.keys() == expected(name).weights.keys()
    compare(got, expected(name), 1e-9)


def test_what_tp_ranks_hold_alike_stays_equal_to_the_bit(ranks):
    """Their vocabularies are uneven, and over more than two ranks gloo adds in an order that depends on the place."""
    config = make_config(parallel=dict(tp=2), train=dict(micro_batch=2))
    compare(assemble(config, ranks(8, run, config, 8)), expected("gqa"), 1e-9)
