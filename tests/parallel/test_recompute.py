"""Activation checkpointing changes no bit of losses, gradients, norms and weights, and keeps less."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.training import assemble, global_batch, make_config, make_mesh, run

GPT = dict(kv_heads=4, norm="layernorm", position="learned", activation="gelu", bias=True, dropout=0.2)
MODELS = {"gqa": dict(dropout=0.1), "gpt": GPT, "bare": dict(hidden=21)}


def config_of(model, tp, sp, recompute, every=1, layers=2, **sections):
    train = dict(recompute=recompute, recompute_every=every, micro_batch=2, **sections.pop("train", {}))
    return make_config(
        model=MODELS[model] | dict(layers=layers),
        data=dict(seq=12),
        parallel=dict(tp=tp, sp=sp),
        train=train,
        **sections,
    )


def equal(first, second):
    assert first.losses == second.losses and first.norms == second.norms
    for what in ("gradients", "weights"):
        mine, other = getattr(first, what), getattr(second, what)
        assert mine.keys() == other.keys()
        assert all(torch.equal(mine[name], other[name]) for name in mine)


@pytest.mark.parametrize("tp,sp,dp", [(1, False, 1), (2, False, 2), (2, True, 2), (4, True, 1)])
@pytest.mark.parametrize("model", ["gqa", "gpt"])
def test_changes_no_bit(ranks, model, tp, sp, dp):
    configs = [config_of(model, tp, sp, r) for r in ("none", "selective", "full")]
    none, selective, full = (assemble(c, ranks(tp * dp, run, c, tp * dp)) for c in configs)
    assert none.gradients
    equal(none, selective)
    equal(none, full)


def test_every_second_layer_changes_no_bit(ranks):
    configs = [config_of("gqa", 2, True, *what, layers=3) for what in (("none",), ("selective", 2), ("full", 2))]
    none, selective, full = (assemble(c, ranks(2, run, c, 2)) for c in configs)
    equal(none, selective)
    equal(none, full)


@pytest.mark.parametrize(("precision", "what"), [("float32", "selective"), ("bf16", "full")])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("model,tp,sp", [("gpt", 2, True), ("bare", 1, False)])
def test_changes_no_bit_of_zero(ranks, model, tp, sp, stage, precision, what):
    plain, less = (
        config_of(model, tp, sp, r, train=dict(precision=precision), sharding=dict(stage=stage, bucket_mib=0.005))
        for r in ("none", what)
    )
    equal(*(assemble(c, ranks(2 * tp, run, c, 2 * tp)) for c in (plain, less)))


def entered(what, every=1):
    """How often each module's forward was entered and left in a step."""
    from hpctrain.parallel.parallelize import build_model

    config = config_of("gqa", 1, False, what, every, layers=3)
    model, _ = build_model(config, make_mesh(config, dist.get_world_size()))
    begun, left = {}, {}
    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda *_, n=name: begun.update({n: begun.get(n, 0) + 1}))
        module.register_forward_hook(lambda *_, n=name: left.update({n: left.get(n, 0) + 1}))
    model.train()(global_batch(config, 0).split(2)[0])[0].backward()
    return begun, left


def test_modules_are_left_as_often_as_entered(ranks):
    begun, left = ranks(1, entered, "full")[0]
    assert begun == left
    assert begun["layers.1"] == 1 and begun["layers.1.mlp.down"] == 2 and begun["layers.1.attention.core"] == 2


@pytest.mark.parametrize(("what", "mlp"), [("selective", 1), ("full", 2)])
def test_every_second_layer_is_entered_again(ranks, what, mlp):
    begun, left = ranks(1, entered, what, 2)[0]
    inner = "attention.core.module" if what == "selective" else "attention.core"
    assert begun == left and "layers.1.attention.core.module" not in begun
    assert [begun[f"layers.{i}.mlp.down"] for i in range(3)] == [mlp, 1, mlp]
    assert [begun[f"layers.{i}.{inner if i != 1 else 'attention.core'}"] for i in range(3)] == [2, 1, 2]


def kept(recompute, every=1):
    """Bytes of activations kept for backward: of tensors that are neither parameters nor inputs."""
    from hpctrain.parallel.parallelize import build_model

    config = config_of("gqa", 1, False, recompute, every)
    model, _ = build_model(config, make_mesh(config, dist.get_world_size()))
    batch, storages = global_batch(config, 0).split(2)[0], {}
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def keep(t):
        storage = t.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        total, _ = model.train()(batch)
    return sum(s.nbytes() for s in storages.values()), total.item()


def test_keeps_less(ranks):
    ways = ("none",), ("selective", 2), ("selective",), ("full", 2), ("full",)
    sizes, losses = zip(*(ranks(1, kept, *way)[0] for way in ways))
    none, some, selective, half, full = sizes
    assert len(set(losses)) == 1
    assert full < selective < some < none and full < half < none
