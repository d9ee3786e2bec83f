"""The plain model: its table of parameters, isolation of documents, dropout, initial values."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from hpctrain.config.schema import ModelConfig
from hpctrain.layout.parameters import parameter_specs
from hpctrain.layout.placement import Box
from hpctrain.model.batch import IGNORED, Batch
from hpctrain.model.loss import CrossEntropy
from hpctrain.model.random import BLOCK, Dropout, initial_values
from hpctrain.model.transformer import Transformer

TINY = dict(layers=2, hidden=24, heads=4, kv_heads=2, head_dim=6, ffn=40, vocab=53, max_seq=32)
SHAPES = [
    {},
    {"tied": True, "bias": True, "activation": "gelu"},
    {"norm": "layernorm", "position": "learned", "kv_heads": 1},
]


def initialised(model: ModelConfig) -> Transformer:
    out = Transformer(model)
    specs = {s.name: s for s in parameter_specs(model)}
    for name, p in out.named_parameters():
        p.data = initial_values(specs[name], 0, Box((0,) * p.ndim, (0,) * p.ndim, tuple(p.shape))).double()
    return out


@pytest.mark.parametrize("change", SHAPES)
def test_the_model_holds_exactly_the_declared_parameters(change):
    model = ModelConfig(**{**TINY, **change})
    held = [(name, tuple(p.shape)) for name, p in Transformer(model).named_parameters()]
    assert held == [(s.name, s.shape) for s in parameter_specs(model)]


@pytest.mark.parametrize("change", SHAPES)
def test_documents_do_not_see_each_other(change):
    model = initialised(ModelConfig(**{**TINY, **change}))
    tokens = torch.randint(0, 53, (1, 20), generator=torch.Generator().manual_seed(0))
    documents = torch.tensor([[0] * 7 + [1] * 13])
    before = model.logits(tokens, documents)
    changed = tokens.clone()
    changed[0, 3] = (tokens[0, 3] + 1) % 53
    after = model.logits(changed, documents)
    assert torch.equal(before[0, 7:], after[0, 7:]) and torch.equal(before[0, :3], after[0, :3])
    assert (before[0, 3:7] != after[0, 3:7]).any(-1).all()
    assert (model.logits(changed) != model.logits(tokens))[0, 7:].any(), "without boundaries they do"


def test_loss_at_the_start_is_the_log_of_the_vocabulary():
    model = initialised(ModelConfig(**{**TINY, "vocab": 5023}))
    tokens = torch.randint(0, 5023, (2, 20), generator=torch.Generator().manual_seed(0))
    batch = Batch(tokens, tokens.roll(1, 1), None, torch.arange(2))
    assert model(batch)[0].item() / 40 == pytest.approx(math.log(5023), rel=1e-3)


def test_a_batch_without_labels_is_exactly_zero():
    model = initialised(ModelConfig(**TINY))
    model.loss = CrossEntropy(0.1, 1e-3)
    tokens = torch.zeros(2, 5, dtype=torch.long)
    total, _ = model(Batch(tokens, torch.full_like(tokens, IGNORED), None, torch.arange(2)))
    total.backward()
    assert total.item() == 0.0
    assert all((p.grad == 0).all() for p in model.parameters())


def test_smoothing_and_z_loss_are_for_training_only():
    loss = CrossEntropy(0.1, 1e-2)
    logits, labels = torch.randn(1, 4, 9), torch.tensor([[1, 2, IGNORED, 8]])
    plain = torch.nn.functional.cross_entropy(logits[0], labels[0], reduction="sum")
    smooth = torch.nn.functional.cross_entropy(logits[0], labels[0], reduction="sum", label_smoothing=0.1)
    squares = logits[0, [0, 1, 3]].logsumexp(-1).square().sum()
    torch.testing.assert_close(loss(logits, labels), smooth + 1e-2 * squares)
    torch.testing.assert_close(loss.eval()(logits, labels), plain)


def test_dropout_is_a_function_of_sample_and_place():
    x, drop = torch.ones(3, 50, 40), Dropout(0.5, seed=7, site="here")
    one = drop(x, [4, 5, 6])
    assert torch.equal(one[1:], drop(x[:2], [5, 6])), "not of the place in the batch"
    assert not torch.equal(one[0], one[1]), "samples differ"
    for other in (Dropout(0.5, 8, "here"), Dropout(0.5, 7, "there")):
        assert not torch.equal(one, other(x, [4, 5, 6]))
    assert set(one.unique().tolist()) == {0.0, 2.0}
    assert abs(one.mean().item() - 1.0) < 0.05
    assert torch.equal(drop.eval()(x, [0, 1, 2]), x)


def test_recompute_drops_what_the_first_forward_dropped():
    model = initialised(ModelConfig(**TINY, dropout=0.5))
    tokens = torch.randint(0, 53, (2, 20), generator=torch.Generator().manual_seed(0))
    batch = Batch(tokens, tokens.roll(1, 1), None, torch.tensor([11, 12]))

    def gradients(run):
        model.zero_grad()
        run().backward()
        return [p.grad.clone() for p in model.parameters()]

    plain = gradients(lambda: model(batch)[0])
    again = gradients(lambda: checkpoint(model, batch, use_reentrant=False, preserve_rng_state=False)[0])
    assert all(torch.equal(a, b) for a, b in zip(plain, again))


def test_initial_values_of_any_box_are_the_slice_of_the_whole():
    model = ModelConfig(**{**TINY, "vocab": 3 * BLOCK // 24 + 11})
    spec = parameter_specs(model)[0]
    whole = initial_values(spec, 5, Box((0, 0), (0, 0), spec.shape))
    assert whole.std().item() == pytest.approx(0.02, rel=0.01) and abs(whole.mean()) < 1e-4
    for start, shape in (((0, 3), (7, 5)), ((2700, 0), (60, 24)), ((8000, 20), (203, 4))):
        part = initial_values(spec, 5, Box(start, (0, 0), shape))
        assert torch.equal(part, whole[tuple(slice(a, a + n) for a, n in zip(start, shape))])
    assert not torch.equal(whole, initial_values(spec, 6, Box((0, 0), (0, 0), spec.shape)))
