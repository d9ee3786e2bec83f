"""Sequence parallelism: it equals one plain process to 1e-9, its masks are slices, and its shapes are its own."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hpctrain.layout.layout import Layout
from hpctrain.layout.placement import placements
from hpctrain.model.random import Dropout
from hpctrain.parallel.comm import Axis
from hpctrain.parallel.sequence import SequenceDropout
from hpctrain.telemetry.meter import Meter
from tests.training import assemble, compare, global_batch, make_config, make_mesh, reference, run

GPT = dict(kv_heads=4, norm="layernorm", position="learned", activation="gelu", bias=True, dropout=0.2)
MODELS = {
    "gqa": {},
    "mqa": dict(model=dict(kv_heads=1, qk_norm=True, dropout=0.1)),
    "tied": dict(model=dict(tied=True, bias=True), train=dict(micro_batch=1)),
    "gpt": dict(model=GPT, train=dict(label_smoothing=0.1, z_loss=1e-3)),
    "no-overlap": dict(model=dict(vocab=51, norm="layernorm"), train=dict(micro_batch=2, overlap=False)),
}


def config_of(name, tp=1, sp=False, **train):
    sections = {**MODELS[name], "train": {**MODELS[name].get("train", {}), **train}}
    return make_config(**sections, data=dict(seq=12), parallel=dict(tp=tp, sp=sp))


@functools.cache
def expected(name):
    return reference(config_of(name))


@pytest.mark.parametrize("tp,dp", [(2, 1), (4, 1), (2, 2), (4, 2)])
@pytest.mark.parametrize("name", MODELS)
def test_equals_one_process(ranks, name, tp, dp):
    """Trap D6: what is not cut has its gradient summed over the parts of the sequence, whatever its name."""
    config = config_of(name, tp, sp=True)
    got = assemble(config, ranks(tp * dp, run, config, tp * dp))
    assert got.gradients.keys() == got.weights.keys() == expected(name).weights.keys()
    compare(got, expected(name), 1e-9)


def test_twice_is_bit_equal(ranks):
    config = config_of("gpt", 2, sp=True, precision="bf16")
    first, second = (assemble(config, ranks(4, run, config, 4)) for _ in range(2))
    assert first.losses == second.losses and first.norms == second.norms
    assert all(torch.equal(first.weights[name], second.weights[name]) for name in first.weights)


@pytest.mark.parametrize("size", [2, 4])
def test_masks_are_slices_of_the_whole(size):
    plain = Dropout(0.5, 3, "layers.0.mlp")
    whole = plain.mask([7, 9], torch.Size((8, 5)), torch.device("cpu"))
    axes = [Axis("tp", tuple(range(size)), i, None, Meter()) for i in range(size)]
    parts = [SequenceDropout(plain, a).mask([7, 9], torch.Size((8 // size, 5)), torch.device("cpu")) for a in axes]
    assert torch.equal(torch.cat(parts, 1), whole)
    assert not torch.equal(parts[0], parts[1])


def shapes():
    """Shapes that norms and the layer see, and the widest tensor that any norm's backward keeps."""
    from hpctrain.parallel.parallelize import build_model

    config = config_of("gpt", 2, sp=True)
    mesh = make_mesh(config, dist.get_world_size())
    model, _ = build_model(config, mesh)
    seen = {}
    for name, module in model.named_modules():
        if name in ("layers.0", "layers.1.attention_norm", "layers.1.attention.qkv", "layers.1.attention", "norm"):
            module.register_forward_hook(lambda _, i, out, name=name: seen.update({name: (i[0].shape, _shape(out))}))
    model.train()(global_batch(config, 0).split(4)[0])
    return seen


def _shape(out):
    return tuple(t.shape for t in out if t is not None) if isinstance(out, tuple) else out.shape


def test_activations_between_the_regions_are_sharded(ranks):
    part, whole = (4, 6, 24), (4, 12, 12)
    for seen in ranks(2, shapes):
        assert seen == {
            "layers.0": (part, (part,)),
            "layers.1.attention_norm": (part, part),
            "layers.1.attention.qkv": (part, (whole, whole, whole)),
            "layers.1.attention": (part, part),
            "norm": (part, part),
        }


def saved():
    """Bytes that the column-parallel linears of a layer keep for backward besides their weights."""
    from hpctrain.parallel.tensor import Region, column_linear

    size = dist.get_world_size()
    axis = Axis("tp", tuple(range(size)), dist.get_rank(), dist.new_group(list(range(size))), Meter())
    kept = []
    weight = nn.Parameter(torch.randn(3, 5))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        (out,) = column_linear(torch.randn(2, 4, 5), Region(axis, sequence=True), (axis,), [weight], [None])
    return out.shape, kept


def test_the_gathered_input_is_not_kept(ranks):
    assert ranks(2, saved)[0] == ((2, 8, 3), [(2, 4, 5), (3, 5)])


def test_every_parameter_that_is_not_cut_sees_a_part(ranks):
    config = config_of("gpt", 4, sp=True)
    layout = Layout.of(config.parallel, 4)
    records = placements(config.model, layout, 2)
    whole = {n for n, r in records.items() if r.local_shape == r.global_shape}
    assert {n for n, r in records.items() if r.partial_over == ("tp",)} == whole
    assert all(records[n].replicas == (0, 1, 2, 3) for n in whole) and len(whole) == 1 + 2 * 6 + 2
