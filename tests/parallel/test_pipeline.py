"""A pipeline in float64 under engine `none` equals one plain process to 1e-9, whatever its schedule."""

from __future__ import annotations

import functools

import pytest

from tests.training import assemble, compare, make_config, reference, run

MODELS = {
    "plain": dict(layers=5),
    "tied": dict(layers=5, tied=True),
    "gpt": dict(
        layers=5, kv_heads=4, norm="layernorm", position="learned", activation="gelu", bias=True, dropout=0.2, tied=True
    ),
    "long": dict(layers=9),
    "long-tied": dict(layers=9, tied=True),
}

# Model, size of a micro-batch out of 8 samples, ranks, parallel. Those with sp also compute activations again.
CASES = {
    "gpipe": ("plain", 2, 2, dict(pp=2, schedule="gpipe")),
    "gpipe-one": ("plain", 8, 2, dict(pp=2, schedule="gpipe")),
    "1f1b-one": ("tied", 8, 4, dict(pp=4)),
    "1f1b-two": ("plain", 4, 3, dict(pp=3)),
    "1f1b-eight": ("tied", 1, 2, dict(pp=2)),
    "1f1b-uneven": ("plain", 1, 3, dict(pp=3, stage_layers=(1, 3, 1))),
    "1f1b-bare-ends": ("tied", 2, 3, dict(pp=3, stage_layers=(0, 5, 0))),
    "1f1b-tp": ("gpt", 2, 4, dict(pp=2, tp=2)),
    "1f1b-dp": ("gpt", 1, 4, dict(pp=2)),
    "1f1b-tp-dp": ("plain", 2, 8, dict(pp=2, tp=2)),
    "1f1b-four-tp": ("tied", 1, 8, dict(pp=4, tp=2)),
    "interleaved": ("tied", 1, 2, dict(pp=2, schedule="interleaved", chunks=2)),
    "interleaved-three": ("long-tied", 1, 3, dict(pp=3, schedule="interleaved", chunks=3)),
    "interleaved-odd": ("long", 2, 6, dict(pp=3, schedule="interleaved", chunks=2)),
    "interleaved-one": ("plain", 8, 2, dict(pp=2, schedule="interleaved", chunks=2)),
    "zb-h1": ("plain", 1, 2, dict(pp=2, schedule="zb-h1")),
    "zb-h1-one": ("tied", 8, 3, dict(pp=3, schedule="zb-h1")),
    "zb-h1-four": ("gpt", 1, 4, dict(pp=4, schedule="zb-h1")),
    "zb-h1-tp-dp": ("gpt", 1, 8, dict(pp=2, tp=2, schedule="zb-h1")),
    "zb-h1-chunks": ("tied", 2, 2, dict(pp=2, schedule="zb-h1", chunks=2)),
    "zb-v": ("plain", 1, 2, dict(pp=2, schedule="zb-v", chunks=2)),
    "zb-v-three": ("long-tied", 1, 3, dict(pp=3, schedule="zb-v", chunks=2)),
    "zb-v-tp": ("gpt", 2, 4, dict(pp=2, tp=2, schedule="zb-v", chunks=2)),
    "zb-v-dp": ("long-tied", 2, 4, dict(pp=2, schedule="zb-v", chunks=2)),
    "1f1b-sp": ("gpt", 2, 4, dict(pp=2, tp=2, sp=True)),
    "interleaved-sp-dp": ("tied", 1, 8, dict(pp=2, tp=2, sp=True, schedule="interleaved", chunks=2)),
    "zb-v-sp": ("gpt", 1, 4, dict(pp=2, tp=2, sp=True, schedule="zb-v", chunks=2)),
    "interleaved-tp": ("gpt", 2, 4, dict(pp=2, tp=2, schedule="interleaved", chunks=2, stage_layers=(2, 1, 2, 0))),
}


@functools.cache
def expected(model, seq):
    return reference(make_config(model=MODELS[model], data=dict(seq=seq)))


@pytest.mark.parametrize("name", CASES)
def test_equals_one_process(ranks, name):
    """Traps D10, D4 ("gpt" drops) and D12 ("tied", "gpt"): both parts of the tied gradient, once, counted once."""
    model, micro_batch, world, parallel = CASES[name]
    seq, recompute = (12, "full") if parallel.get("sp") else (13, "none")
    train = dict(micro_batch=micro_batch, recompute=recompute)
    config = make_config(model=MODELS[model], parallel=parallel, data=dict(seq=seq), train=train)
    got, want = assemble(config, ranks(world, run, config, world)), expected(model, seq)
    assert got.gradients.keys() == got.weights.keys() == want.weights.keys()
    compare(got, want, 1e-9)
