"""Activation checkpointing changes no bit of losses, gradients, norms and weights, and keeps less."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from hpctrain.layout.activations import ON_CPU, activations
from hpctrain.layout.layout import Layout
from hpctrain.layout.recompute import without_effect
from tests.training import assemble, global_batch, make_config, make_mesh, run

GPT = dict(kv_heads=4, norm="layernorm", position="learned", activation="gelu", bias=True, dropout=0.2)
MOE = dict(experts=4, top_k=2, ffn=16, shared_ffn=16, dense_layers=1, aux_loss=0.3, z_loss=0.05, bias_rate=0.05)
MODELS = {"gqa": dict(dropout=0.1), "gpt": GPT, "bare": dict(hidden=21)}


MODELS |= {
    "moe": dict(dropout=0.1, layers=3, moe=dict(MOE)),
    "lora": dict(adapter=dict(kind="dora", rank=3, dropout=0.3)),
}
ALL = ("core_attn", "layernorm", "activation", "mlp", "moe", "shared_experts")


def config_of(model, tp, sp, recompute, every=1, layers=2, parallel=None, **sections):
    """`recompute` is as the setting, or the operations of a selective one."""
    train = dict(recompute=recompute, recompute_every=every, micro_batch=2, **sections.pop("train", {}))
    if not isinstance(recompute, str):
        train |= dict(recompute="selective", recompute_ops=recompute)
    config = make_config(
        model=dict(layers=layers) | MODELS[model],
        data=dict(seq=12),
        parallel=dict(tp=tp, sp=sp) | (parallel or {}),
        train=train,
        **sections,
    )
    for operation in config.train.recompute_ops:
        assert not without_effect(config.model, config.train.recompute_ops, operation)
    return config


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


SETS = {
    "dense": [
        ("layernorm",),
        ("activation",),
        ("mlp",),
        ("layernorm", "activation"),
        ("core_attn", "layernorm", "mlp"),
        ("core_attn", "layernorm", "activation"),
    ],
    "moe": [
        ("layernorm",),
        ("activation",),
        ("moe",),
        ("layernorm", "shared_experts"),
        ("core_attn", "layernorm", "mlp", "moe"),
        ("layernorm", "activation", "shared_experts"),
        ("activation", "moe"),
    ],
}
"""Operations alone, and with those that they meet."""


@pytest.mark.parametrize(("tp", "sp", "dp"), [(1, False, 1), (2, False, 1), (2, True, 2)])
@pytest.mark.parametrize("model", ["gqa", "gpt", "moe"])
def test_named_operations_change_no_bit(ranks, model, tp, sp, dp):
    """Of dense layers, of experts, and of what routers count: their biases are among the weights."""
    none, *others = (
        assemble(c, ranks(tp * dp, run, c, tp * dp))
        for c in (config_of(model, tp, sp, r) for r in ("none", *SETS["moe" if model == "moe" else "dense"]))
    )
    assert none.gradients
    for other in others:
        equal(none, other)


LAYOUTS = {
    "1f1b": ("gqa", 2, dict(pp=2)),
    "zb-h1": ("gqa", 2, dict(pp=2, schedule="zb-h1")),
    "zb-v sp": ("gqa", 4, dict(pp=2, schedule="zb-v", chunks=2, tp=2, sp=True)),
    "ring": ("gqa", 2, dict(cp=2)),
    "ulysses": ("gqa", 2, dict(cp=2, cp_method="ulysses")),
    "ep": ("moe", 2, dict(ep=2)),
    "etp sp": ("moe", 4, dict(tp=2, sp=True, etp=2, ep=2)),
    "1f1b experts": ("moe", 4, dict(pp=2, ep=2)),
    "1f1b adapters": ("lora", 2, dict(pp=2)),
    "adapters sp": ("lora", 2, dict(tp=2, sp=True)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_named_operations_change_no_bit_of_any_layout(ranks, name):
    """Four micro-batches of which more than one waits: dropouts before adapters see those of their own."""
    model, world, parallel = LAYOUTS[name]
    sets = ("layernorm", "activation"), ("core_attn", "layernorm", *(["mlp", "moe"] if model == "moe" else ["mlp"]))
    axes = dict(tp=1, sp=False) | parallel
    configs = [
        config_of(model, axes["tp"], axes["sp"], r, layers=4, parallel=parallel, train=dict(global_batch=16))
        for r in ("none", *sets)
    ]
    none, *others = (assemble(c, ranks(world, run, c, world)) for c in configs)
    assert none.gradients
    for other in others:
        equal(none, other)


@pytest.mark.parametrize(
    ("precision", "what"),
    [
        ("float32", "selective"),
        ("bf16", "full"),
        ("bf16", ("core_attn", "layernorm", "activation")),
        ("float32", ("layernorm", "mlp")),
    ],
)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("model,tp,sp", [("gpt", 2, True), ("bare", 1, False)])
def test_changes_no_bit_of_zero(ranks, model, tp, sp, stage, precision, what):
    plain, less = (
        config_of(model, tp, sp, r, train=dict(precision=precision), sharding=dict(stage=stage, bucket_mib=0.005))
        for r in ("none", what)
    )
    equal(*(assemble(c, ranks(2 * tp, run, c, 2 * tp)) for c in (plain, less)))


@pytest.mark.parametrize("settings", [{}, dict(reshard_after_forward=False, reduce_every="step")])
@pytest.mark.parametrize(("model", "parallel"), [("gqa", {}), ("moe", dict(ep=2)), ("gpt", dict(tp=2, sp=True))])
def test_named_operations_change_no_bit_of_fsdp(ranks, model, parallel, settings):
    axes, sharding = dict(tp=1, sp=False) | parallel, dict(engine="fsdp", **settings)
    sets = ("layernorm", "activation"), ("core_attn", "layernorm", *(["mlp", "moe"] if model == "moe" else ["mlp"]))
    world, train = 2 * axes["tp"], dict(precision="bf16")
    none, *others = (
        assemble(c, ranks(world, run, c, world))
        for c in (
            config_of(model, axes["tp"], axes["sp"], r, parallel=parallel, train=train, sharding=sharding)
            for r in ("none", *sets)
        )
    )
    for other in others:
        equal(none, other)


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


def test_norms_and_mlps_are_entered_again_and_the_rest_is_not(ranks):
    begun, left = ranks(1, entered, ("layernorm", "mlp"))[0]
    assert begun == left
    again = ("attention_norm", "mlp_norm", "mlp.inputs", "mlp.inputs.up", "mlp.down")
    assert all(begun[f"layers.1.{name}"] == 2 for name in again)
    once = ("", ".attention", ".attention.qkv", ".attention.core", ".attention.output", ".mlp")
    assert all(begun[f"layers.1{name}"] == 1 for name in once)


@pytest.mark.parametrize(("what", "mlp"), [("selective", 1), ("full", 2)])
def test_every_second_layer_is_entered_again(ranks, what, mlp):
    begun, left = ranks(1, entered, what, 2)[0]
    inner = "attention.core.module" if what == "selective" else "attention.core"
    assert begun == left and "layers.1.attention.core.module" not in begun
    assert [begun[f"layers.{i}.mlp.down"] for i in range(3)] == [mlp, 1, mlp]
    assert [begun[f"layers.{i}.{inner if i != 1 else 'attention.core'}"] for i in range(3)] == [2, 1, 2]


def waiting(model, what):
    """Bytes that are there between forward and backward."""
    from hpctrain.parallel.parallelize import build_model
    from hpctrain.telemetry.live import LiveBytes

    with LiveBytes() as live:
        config = config_of(model, 1, False, what, layers=3)
        made, _ = build_model(config, make_mesh(config, 1))
        batch = global_batch(config, 0).split(2)[0]
        before = live.now()
        total, routers = made.train()(batch)
        found = live.now() - before
        (total if routers is None else total + routers).backward()
    return found


@pytest.mark.parametrize("model", ["gqa", "moe"])
def test_each_operation_keeps_less(ranks, model):
    """By what the model of memory says of it: nothing else keeps what is to be made again."""
    config = {what: config_of(model, 1, False, what, layers=3) for what in ("none", *SPARES[model])}
    found = {what: ranks(1, waiting, model, what)[0] for what in config}
    said = {what: activations(c, Layout(), None, ON_CPU).kept for what, c in config.items()}
    for what in SPARES[model]:
        spared, less = found["none"] - found[what], said["none"] - said[what]
        assert less > 0 and abs(spared - less) <= 0.02 * said["none"], (what, spared, less)


SPARES = {
    "gqa": [("layernorm",), ("activation",), ("mlp",), ("layernorm", "activation"), ("layernorm", "mlp")],
    "moe": [
        ("layernorm",),
        ("activation",),
        ("moe",),
        ("shared_experts",),
        ("layernorm", "shared_experts"),
        ("layernorm", "mlp", "moe"),
    ],
}


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
