"""Engine `none`: what is counted, what is reduced and when, what happens to steps that are not finite."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
import torch

from hpctrain.layout.parameters import parameter_specs
from hpctrain.model.batch import IGNORED, Batch
from hpctrain.parallel.parallelize import build_model
from hpctrain.sharding.build import build_engine
from hpctrain.sharding.none.buckets import GradientBuckets
from hpctrain.sharding.norm import clip_factor
from hpctrain.sharding.scaler import GROWTH_INTERVAL, LossScale
from tests.training import assemble, compare, global_batch, make_config, make_mesh, reference, run, train_step


def start(config, world):
    mesh = make_mesh(config, world)
    model, records = build_model(config, mesh)
    return mesh, model, build_engine([model], records, mesh, config)


def without_compiler():
    """A step of a rank to which torch's compiler is not there."""
    sys.modules["torch._dynamo"] = None
    config = make_config()
    mesh, _, engine = start(config, 1)
    return [loss for loss, _ in (train_step(engine, mesh, config, step) for step in range(2))]


def test_no_rank_imports_the_compiler(ranks):
    assert ranks(1, without_compiler)[0] == pytest.approx(reference(make_config(), 2).losses, rel=1e-9)


def norm_of_ones(config, world):
    """The norm when every element of every gradient is 1, and what a rank counts."""
    _, _, engine = start(config, world)
    engine.begin_step(1, 1)
    for gradient in engine.gradients.values():
        gradient.fill_(1.0 / next(b.axis.size for b in engine.buckets.buckets if _holds(b, gradient)))
    return engine.step(0.0).grad_norm


def _holds(bucket, gradient):
    return bucket.flat.untyped_storage().data_ptr() == gradient.untyped_storage().data_ptr()


@pytest.mark.parametrize("model", [{}, {"kv_heads": 1}, {"tied": True, "bias": True}])
def test_norm_counts_every_parameter_once(ranks, model):
    """Trap D7: replicas and tied weights count once."""
    for tp, dp in ((1, 1), (2, 1), (4, 1), (2, 2), (1, 2)):
        config = make_config(model=model, parallel=dict(tp=tp))
        want = math.sqrt(sum(s.numel for s in parameter_specs(config.model)))
        assert ranks(tp * dp, norm_of_ones, config, tp * dp) == [pytest.approx(want, rel=1e-12)] * (tp * dp)


MOE = dict(experts=4, top_k=2, ffn=8, shared_ffn=12)


@pytest.mark.parametrize(
    "world,parallel", [(2, dict(ep=2)), (4, dict(ep=2)), (4, dict(tp=2, ep=4)), (4, dict(tp=2, ep=2, etp=2))], ids=str
)
def test_norm_counts_every_expert_once(ranks, world, parallel):
    config = make_config(model=dict(moe=MOE), parallel=parallel)
    want = math.sqrt(sum(s.numel for s in parameter_specs(config.model)))
    assert ranks(world, norm_of_ones, config, world) == [pytest.approx(want, rel=1e-12)] * world


def initial_weights(config, world):
    _, _, engine = start(config, world)
    weights = [(p.name, p.start, p.shape, p.fetch()) for p in engine.pieces() if p.kind == "weight"]
    engine.close()
    return weights


def test_initial_weights_do_not_depend_on_the_layout(ranks):
    """Trap D3."""

    def whole(tp, world):
        config = make_config(parallel=dict(tp=tp), train=dict(precision="float32"))
        out = {s.name: torch.full(s.shape, torch.nan) for s in parameter_specs(config.model)}
        for pieces in ranks(world, initial_weights, config, world):
            for name, at, shape, values in pieces:
                out[name][tuple(slice(a, a + n) for a, n in zip(at, shape))] = values
        return out

    one = whole(1, 1)
    for tp, world in ((2, 2), (4, 4), (2, 4)):
        other = whole(tp, world)
        assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_the_same_layout_twice_is_bit_equal(ranks, precision):
    config = make_config(parallel=dict(tp=2), train=dict(precision=precision, micro_batch=2))
    first, second = (assemble(config, ranks(4, run, config, 4)) for _ in range(2))
    assert first.losses == second.losses and first.norms == second.norms
    assert all(torch.equal(first.weights[name], second.weights[name]) for name in first.weights)


@pytest.mark.parametrize("micro_batch,dp", [(1, 1), (2, 1), (8, 1), (1, 2), (2, 2), (4, 2)])
def test_gradients_do_not_depend_on_how_the_batch_is_cut(ranks, micro_batch, dp):
    """Trap D10: divided once, however many micro-batches and ranks there are."""
    config = make_config(train=dict(micro_batch=micro_batch), optimizer=dict(clip=0.0))
    compare(assemble(config, ranks(dp, run, config, dp)), reference(config), 1e-9)


def lopsided(config):
    """Rank 0 has five valid tokens in one sample, rank 1 none at all; then both none."""
    mesh, _, engine = start(config, 2)
    batch = global_batch(config, 0)
    labels = torch.full_like(batch.labels, IGNORED)
    labels[0, :5] = batch.tokens[0, 1:6]
    outcomes = []
    for some in (labels, torch.full_like(labels, IGNORED)):
        mine = Batch(batch.tokens, some, batch.documents, batch.samples).split(4)[mesh.dp.index]
        engine.begin_step(int((some != IGNORED).sum()), 1)
        ticket = engine.forward(0, mine)
        engine.backward(ticket)
        loss, result = ticket.output.item(), engine.step(1e-3)
        outcomes.append((loss, result.grad_norm, result.skipped))
    return outcomes


def test_a_rank_without_valid_tokens_contributes_exactly_nothing(ranks):
    """Trap D9: the divisor is that of all ranks, and a mean over nothing is 0 and not NaN."""
    config = make_config()
    (first, nothing), (second, also_nothing) = ranks(2, lopsided, config)
    assert first[0] > 1 and second[0] == 0.0
    assert first[1] == second[1] > 0 and not first[2]
    assert nothing == also_nothing == (0.0, 0.0, False)


def poisoned(config, world, rank, step_of_poison):
    """Training in which one rank's logits turn to NaN in one step; weights before and after it."""
    mesh, model, engine = start(config, world)
    seen = []
    for step in range(3):
        handle = None
        if step == step_of_poison and mesh.rank == rank:
            handle = model.norm.register_forward_hook(lambda module, inputs, out: out * float("nan"))
        before = [m.clone() for m in engine.masters.values()]
        batch = global_batch(config, step)
        mine = batch.split(config.train.global_batch // mesh.dp.size)[mesh.dp.index]
        engine.begin_step(batch.valid_tokens, 1)
        engine.backward(engine.forward(0, mine))
        result = engine.step(1e-3)
        changed = any(not torch.equal(a, b) for a, b in zip(before, engine.masters.values()))
        seen.append((result.skipped, changed, engine.scalars()["step"]))
        if handle is not None:
            handle.remove()
    return seen


@pytest.mark.parametrize("precision", ["float32", "float64", "bf16", "fp16"])
def test_a_nan_on_one_rank_skips_the_step_on_all(ranks, precision):
    config = make_config(parallel=dict(tp=2), train=dict(precision=precision, loss_scale=8.0))
    outcomes = ranks(4, poisoned, config, 4, 3, 1)
    assert outcomes == [[(False, True, 1.0), (True, False, 1.0), (False, True, 2.0)]] * 4


def replica_gone_wrong(config):
    """One rank's copy of a gradient that another rank counts turns to NaN after the reduction."""
    mesh, _, engine = start(config, 2)
    engine.begin_step(1, 1)
    if mesh.rank == 1:
        engine.gradients["norm.weight"][3] = float("nan")
    return engine.step(1e-3).skipped


def test_a_nan_in_a_copy_that_is_not_counted_skips_the_step(ranks):
    assert ranks(2, replica_gone_wrong, make_config(parallel=dict(tp=2))) == [True, True]


def replicated_in_low_precision(config):
    """The sums over ranks of a key/value weight's gradient, seen on the wire: their dtype."""
    from hpctrain.parallel import comm

    *_, engine = start(config, 4)
    seen = []
    plain = comm.dist.all_reduce

    def watched(t, *args, **kwargs):
        seen.append((t.dtype, tuple(t.shape)))
        return plain(t, *args, **kwargs)

    comm.dist.all_reduce = watched
    batch = global_batch(config, 0)
    engine.begin_step(batch.valid_tokens, 1)
    engine.backward(engine.forward(0, batch))
    key = config.model.head_width * config.model.hidden
    return {dtype for dtype, shape in seen if len(shape) == 1 and shape[0] >= key}  # flattened


def test_gradients_of_shared_key_value_heads_are_summed_in_float32(ranks):
    """Trap D23."""
    config = make_config(parallel=dict(tp=4), model=dict(kv_heads=1), train=dict(precision="bf16", micro_batch=8))
    assert ranks(4, replicated_in_low_precision, config) == [{torch.float32}] * 4


def falling(config, world, steps):
    from hpctrain.parallel.comm import all_reduce

    mesh, _, engine = start(config, world)
    losses = []
    for _ in range(steps):
        batch = global_batch(config, 0)
        mine = batch.split(config.train.global_batch // mesh.dp.size)[mesh.dp.index]
        engine.begin_step(batch.valid_tokens, 1)
        ticket = engine.forward(0, mine)
        engine.backward(ticket)
        engine.step(1e-2)
        losses.append((all_reduce(ticket.output.detach().double(), mesh.loss) / batch.valid_tokens).item())
    return losses, engine.scalars(), {p.dtype for p in engine.working.values()}


@pytest.mark.parametrize("precision,dtype", [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_low_precision_trains_beside_float32(ranks, precision, dtype):
    wide = make_config(parallel=dict(tp=2), train=dict(precision="float32"), optimizer=dict(clip=1.0))
    low = make_config(
        parallel=dict(tp=2), train=dict(precision=precision, loss_scale=2.0**15), optimizer=dict(clip=1.0)
    )
    want = ranks(4, falling, wide, 4, 15)[0][0]
    got, scalars, dtypes = ranks(4, falling, low, 4, 15)[0]
    assert dtypes == {dtype}
    assert got[-1] < 0.7 * got[0]
    # bf16 has 8 bits of mantissa: losses agree to a part in a hundred, not to rounding.
    assert np.allclose(got, want, rtol=0.03), (got, want)
    assert scalars["step"] > 10


def test_many_small_low_precision_gradients_are_not_lost(ranks):
    """1024 x 1e-3 is 1.024; summed in bf16 it stops at 0.5, where that is under half an ulp."""
    assert ranks(1, accumulate_in_bf16) == [pytest.approx((1.024, 0.5), rel=1e-2)]


def accumulate_in_bf16():
    mesh = make_mesh(make_config(), 1)
    p = torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    buckets = GradientBuckets({p: mesh.loss}, torch.float32, 1 << 20, overlap=True)
    buckets.begin(1024)
    naive = torch.zeros(4, dtype=torch.bfloat16)
    for _ in range(1024):
        (p * torch.tensor(1e-3, dtype=torch.bfloat16)).sum().backward()
        naive += 1e-3
    buckets.finish()
    return buckets.gradients()[p][0].item(), naive[0].item()


def trace(config, world):
    """When reductions began in the last backward of a step, and when that backward ended."""
    mesh, _, engine = start(config, world)
    batch = global_batch(config, 0).split(4)[mesh.dp.index].split(2)
    mesh.meter.tracing = True
    engine.begin_step(10, 2)
    for micro_batch in batch:
        ticket = engine.forward(0, micro_batch)
        with mesh.meter.phase("backward"):
            engine.backward(ticket)
    engine.step(1e-3)
    sent = [e.start for e in mesh.meter.events if e.name == "sent all_reduce[dp+cp]"]
    backwards = [e for e in mesh.meter.events if e.name == "backward"]
    return sent, backwards, len(engine.buckets.buckets)


def test_reductions_start_while_the_last_backward_runs(ranks):
    config = make_config(train=dict(precision="float32"))
    for sent, backwards, buckets in ranks(2, trace, config, 2):
        assert len(sent) == buckets > 3, "each bucket once a step, not once a micro-batch"
        assert all(t > backwards[0].end for t in sent)
        assert sum(backwards[1].start < t < backwards[1].end for t in sent) == buckets
    late = make_config(train=dict(precision="float32", overlap=False))
    for sent, backwards, _ in ranks(2, trace, late, 2):
        assert all(t > backwards[1].end for t in sent)


def test_loss_scale():
    scale = LossScale(1024.0, dynamic=True)
    scale.update(overflowed=True)
    assert scale.value == 512
    for _ in range(GROWTH_INTERVAL):
        scale.update(overflowed=False)
    assert scale.value == 1024
    for _ in range(20):
        scale.update(overflowed=True)
    assert scale.value == 1.0
    fixed = LossScale(1024.0, dynamic=False)
    fixed.update(overflowed=True)
    assert fixed.value == 1.0


def test_clip_factor():
    assert clip_factor(2.0, 1.0) == pytest.approx(0.5)
    assert clip_factor(0.5, 1.0) == 1.0 and clip_factor(7.0, 0.0) == 1.0
