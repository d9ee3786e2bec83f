"""Adapters under every layout are those of one plain process in float64 to 1e-9: losses, every gradient of every step,
norms and weights; and what they lie beside stays as it was, to the bit."""

from __future__ import annotations

import functools

import pytest
import torch

from hpctrain.layout.memory import packed_bytes
from hpctrain.layout.parameters import parameter_specs
from hpctrain.layout.placement import Box
from hpctrain.model.adapters import row_squares
from hpctrain.model.packed import packed_weights
from hpctrain.model.random import initial_values
from hpctrain.model.transformer import Transformer
from hpctrain.parallel.parallelize import build_chunks
from hpctrain.verify.samples import global_batch
from tests.adapting import adapted, assemble, compare, plain_model, reference, run
from tests.training import make_config, make_mesh

MODELS = {
    "lora": dict(kind="lora"),
    "dora": dict(kind="dora", model=dict(bias=True, activation="gelu")),
    "qlora": dict(kind="qlora", adapter=dict(targets=["q", "v", "mlp"])),
}
LAYOUTS = [
    ("lora", dict(tp=4, sp=True), 4),
    ("lora", dict(tp=2, pp=2, schedule="gpipe"), 4),
    ("lora", dict(cp=2), 4),
    ("dora", dict(tp=2), 2),
    ("dora", dict(tp=4, sp=True), 4),
    ("dora", dict(pp=2), 2),
    ("qlora", dict(tp=4), 4),
    ("qlora", dict(pp=2), 2),
    ("qlora", dict(cp=2), 4),
]
"""Each kind under each axis, be it here or in `SPECIAL`."""


@functools.cache
def expected(name, seq):
    return reference(adapted(**MODELS[name], data=dict(seq=seq)))


@pytest.mark.parametrize(("name", "parallel", "world"), LAYOUTS, ids=str)
def test_equals_one_process(ranks, name, parallel, world):
    """Trap D29."""
    config = adapted(**MODELS[name], data=dict(seq=12), parallel=parallel, train=dict(micro_batch=2))
    compare(assemble(config, ranks(world, run, config, world)), expected(name, 12), 1e-9)


MOE = dict(experts=4, top_k=2, ffn=16, shared_ffn=16, dense_layers=1, aux_loss=0.02, z_loss=0.01)
EVERYWHERE = dict(targets=["attention", "mlp", "experts"])
SPECIAL = {
    "dropout-cp-sp": (
        adapted("dora", adapter=dict(dropout=0.2), model=dict(bias=True), data=dict(seq=16)),
        dict(tp=2, sp=True, cp=2),
        4,
    ),
    "dropout-tp-ulysses": (
        adapted(adapter=dict(dropout=0.3), data=dict(seq=12)),
        dict(tp=2, cp=2, cp_method="ulysses"),
        4,
    ),
    "mqa-qk-norm-tied": (
        adapted("dora", model=dict(kv_heads=1, qk_norm=True, tied=True), data=dict(seq=12)),
        dict(tp=2, pp=2, sp=True),
        4,
    ),
    "zb-h1": (adapted("qlora", data=dict(seq=12)), dict(tp=2, pp=2, sp=True, schedule="zb-h1"), 4),
    "zb-v": (adapted("dora", model=dict(layers=4)), dict(pp=2, schedule="zb-v", chunks=2), 2),
    "interleaved-tied": (
        adapted(model=dict(layers=4, tied=True)),
        dict(pp=2, schedule="interleaved", chunks=2),
        2,
    ),
    "a-stage-without": (
        adapted(adapter=dict(targets=["down"]), model=dict(tied=True)),
        dict(pp=2, stage_layers=(0, 2)),
        2,
    ),
    "experts-ep": (adapted(adapter=EVERYWHERE, model=dict(moe=MOE)), dict(ep=2), 2),
    "experts-tp-ep": (
        adapted("qlora", adapter=EVERYWHERE, model=dict(moe=MOE), data=dict(seq=12)),
        dict(tp=2, ep=2, sp=True),
        4,
    ),
    "frozen-experts-etp": (adapted("qlora", model=dict(moe=MOE)), dict(tp=2, etp=2), 2),
}


@pytest.mark.parametrize("name", SPECIAL)
def test_equals_one_process_too(ranks, name):
    """With dropout, experts, copies of an embedding, gradients that are left for later, activations computed again, and
    ranks of a pipeline with nothing to train."""
    plain, parallel, world = SPECIAL[name]
    again = {"recompute": "full"} if parallel.get("sp") else {}
    sections = {key: dict(getattr(plain, key)) for key in ("model", "data", "train")}
    sections["train"] |= dict(micro_batch=2, **again)
    config = make_config(**sections, parallel=parallel)
    compare(assemble(config, ranks(world, run, config, world)), reference(plain), 1e-9)


def test_adapters_begin_alike_under_every_layout(ranks):
    """A is drawn by name and place, B is zero, and DoRA's magnitudes are the norms of the rows, to the bit."""
    plain = adapted("dora", train=dict(precision="float32"))
    whole = begun(plain, 1)
    assert whole["layers.1.mlp.down.lora_b"].abs().max() == 0
    norms = whole["layers.0.attention.output.weight"].double().norm(dim=1)
    assert torch.allclose(whole["layers.0.attention.output.magnitude"].double(), norms, rtol=1e-6)
    deviation = whole["layers.0.mlp.down.lora_a"].std().item() * (3 * 48) ** 0.5
    assert 0.8 < deviation < 1.2
    for parallel, world in ((dict(tp=2), 2), (dict(tp=4, sp=True), 4), (dict(pp=2), 2)):
        config = plain.model_copy(update={"parallel": make_config(parallel=parallel).parallel})
        for held in ranks(world, boxes, config, world):
            for name, start, values in held:
                window = tuple(slice(a, a + n) for a, n in zip(start, values.shape))
                assert torch.equal(values, whole[name][window]), name


def boxes(config, world):
    """What a rank begins with, by name and place."""
    mesh = make_mesh(config, world)
    chunks, records = build_chunks(config, mesh)
    return [
        (name, records[name].boxes[0].start, parameter.detach().clone())
        for chunk in chunks
        for name, parameter in chunk.named_parameters()
    ]


def begun(config, world):
    return {name: values for name, _, values in boxes(config, world)}


def test_an_adapter_that_adds_nothing_changes_nothing():
    """B is zero and magnitudes are the norms, so the model computes what it did; and the gradient of what is frozen is
    nowhere computed."""
    config = adapted("dora", data=dict(seq=12))
    batch = global_batch(config, 0)
    plain, model = Transformer(config.model.model_copy(update={"adapter": None}), 3), Transformer(config.model, 3)
    specs = {spec.name: spec for spec in parameter_specs(config.model)}
    for held in (plain.double(), model.double()):
        for name, parameter in held.named_parameters():
            box = Box((0,) * parameter.ndim, (0,) * parameter.ndim, tuple(parameter.shape))
            parameter.data = initial_values(specs[name], 3, box).double()
    loss = model(batch)[0]
    assert torch.allclose(loss, plain(batch)[0], rtol=1e-7)
    loss.backward()
    assert {n for n, p in model.named_parameters() if p.grad is not None} == {n for n, s in specs.items() if s.trained}


def test_the_norm_of_rows_is_a_constant_in_backward():
    """DoRA's gradients are those of a forward in which it is one (arXiv 2402.09353 section 4.3)."""
    config = adapted("dora", data=dict(seq=12))
    model = plain_model(config)
    linear = model.layers["0"].mlp.down
    factors, x = linear.factors, torch.randn(5, 48, dtype=torch.float64)
    whole = linear.weight + factors.scale * factors.b @ factors.a
    assert torch.allclose(row_squares(linear.weight, factors), whole.detach().square().sum(1))
    norms = whole.norm(dim=1)
    out = linear(x)
    assert torch.allclose(out, x @ (whole * (factors.magnitude / norms)[:, None]).T)
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, [factors.a, factors.b, factors.magnitude], grad)
    taken = (x @ whole.T) * (factors.magnitude / norms.detach())
    want = torch.autograd.grad(taken, [factors.a, factors.b, factors.magnitude], grad)
    assert all(map(torch.allclose, found, want))


def test_4_bits_take_what_the_estimate_says_and_a_rank_holds_its_part(ranks):
    config = adapted("qlora", adapter=dict(targets=["q", "experts"]), model=dict(moe=MOE), parallel=dict(tp=2, ep=2))
    whole = {
        name: values
        for name, _, values, _ in packed(config.model_copy(update={"parallel": type(config.parallel)()}), 1)
    }
    specs = {spec.name: spec for spec in parameter_specs(config.model)}
    assert whole.keys() == {name for name, spec in specs.items() if spec.linear is not None}
    for held in ranks(2, packed, config, 2):
        assert {name for name, *_ in held} == whole.keys()
        for name, start, values, size in held:
            window = tuple(slice(a, a + n) for a, n in zip(start, values.shape))
            assert torch.equal(values, whole[name][window]), name
            assert size == packed_bytes(tuple(values.shape), specs[name].shape, 4)


def packed(config, world):
    """Of each weight in 4 bits that a rank has, where it begins, its values, and the bytes that it takes."""
    chunks, _ = build_chunks(config, make_mesh(config, world))
    return [
        (name, held.box.start, held.values(torch.float32), sum(t.numel() * t.element_size() for t in held.tensors()))
        for chunk in chunks
        for name, held in packed_weights(chunk).items()
    ]
