"""What the runtime of a pipeline keeps, sends, frees and skips."""

from __future__ import annotations

import math

import pytest
import torch

from hpctrain.layout.layout import Layout
from hpctrain.layout.memory import live_activations
from hpctrain.layout.schedule_claims import claimed_peak
from hpctrain.layout.stages import stages_of
from hpctrain.layout.traffic import pipeline_bytes
from hpctrain.telemetry.live import LiveBytes
from tests.training import LR, global_batch, make_config, make_mesh, train_step


def start(config, world, prepare=lambda chunks: None):
    from hpctrain.parallel.parallelize import build_chunks
    from hpctrain.parallel.pipeline import Pipeline
    from hpctrain.sharding.build import build_engine

    mesh = make_mesh(config, world)
    chunks, records = build_chunks(config, mesh)
    prepare(chunks)
    engine = build_engine(chunks, records, mesh, config)
    return mesh, engine, Pipeline(engine, mesh, config)


def counted(config, world):
    """Of one step on this rank: bytes sent over pp, the most live tickets, and that nothing is left of the step."""
    mesh, engine, pipeline = start(config, world)
    train_step(engine, mesh, config, 0, pipeline)
    mesh.meter.reset()
    train_step(engine, mesh, config, 1, pipeline)
    sent = {key: traffic.bytes for key, traffic in mesh.meter.traffic.items()}
    return sent.get(("send", "pp"), 0), pipeline.peak_live


SCHEDULES = [
    (2, 8, 1, dict(pp=2, schedule="gpipe")),
    (4, 1, 1, dict(pp=4)),
    (2, 8, 2, dict(pp=2, tp=2)),
    (3, 8, 1, dict(pp=3, stage_layers=(0, 9, 0))),
    (2, 4, 1, dict(pp=2, schedule="interleaved", chunks=3)),
    (3, 8, 1, dict(pp=3, schedule="interleaved", chunks=2)),
    (3, 8, 1, dict(pp=3, schedule="zb-h1")),
    (2, 8, 2, dict(pp=2, schedule="zb-v", chunks=2)),
    (3, 2, 1, dict(pp=3, schedule="zb-v", chunks=2)),
]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("pp,micro_batches,per_stage,parallel", SCHEDULES)
def test_what_is_sent_and_kept_is_as_claimed(ranks, pp, micro_batches, per_stage, parallel, tied):
    model = dict(layers=9, tied=tied)
    config = make_config(model=model, parallel=parallel, train=dict(micro_batch=8 // micro_batches))
    world, name, chunks = pp * per_stage, config.parallel.schedule, config.parallel.chunks
    layout = Layout.of(config.parallel, world)
    for rank, (sent, live) in enumerate(ranks(world, counted, config, world)):
        at = layout.coordinates(rank)["pp"]
        assert sent == pipeline_bytes(config, layout, rank)
        assert live == claimed_peak(name, pp, chunks, layout_micro_batches(config, layout), at)


def layout_micro_batches(config, layout):
    return config.train.global_batch // (layout.dp * config.train.micro_batch)


def peaks(config, world, numbers):
    """Bytes on this rank that were alive at once in a step of each number of micro-batches; of one micro-batch alone,
    and between its forward and its backward; and of the hidden states of one. All without what stays."""
    mesh, engine, pipeline = start(config, world)
    found = []
    with LiveBytes() as live:
        micro_batches = global_batch(config, 0).split(config.train.micro_batch)
        train_step(engine, mesh, config, 0, pipeline)
        for number in numbers:
            engine.begin_step(1, number)
            base = live.peak = live.now()
            pipeline.train(micro_batches[:number])
            assert live.now() == base
            found.append(live.peak - base)
        engine.begin_step(1, 1)
        base = live.peak = live.now()
        hidden = pipeline.blank(micro_batches[0])
        size = hidden.nbytes
        first, last = mesh.pp.index == 0, mesh.pp.index == world - 1
        ticket = engine.forward(0, micro_batches[0], None if first else hidden.requires_grad_())
        del hidden
        kept = live.now() - base
        engine.backward(ticket, None if last else torch.ones_like(ticket.output))
    return found, live.peak - base, kept, size


@pytest.mark.parametrize("schedule,recompute", [("1f1b", "none"), ("1f1b", "full"), ("gpipe", "full")])
def test_peak_bytes_are_those_of_live_activations(ranks, schedule, recompute):
    """One micro-batch in backward, the others between forward and backward, and what is under way: a tensor sent, one
    received for later, scalars. Under 1F1B that does not grow with the number of micro-batches."""
    train = dict(global_batch=16, micro_batch=1, recompute=recompute)
    config = make_config(data=dict(document_mask=False), parallel=dict(pp=2, schedule=schedule), train=train)
    for at, ((four, sixteen), alone, kept, hidden) in enumerate(ranks(2, peaks, config, 2, (4, 16))):
        for peak, number in ((four, 4), (sixteen, 16)):
            under_way = peak - alone - (claimed_peak(schedule, 2, 1, number, at) - 1) * kept
            assert 0 <= under_way <= 2 * hidden + 64
        assert schedule == "gpipe" or sixteen == four


def activations_against_the_estimate(config, world):
    """Bytes that a step adds to what stays, and what was estimated for this rank's place."""
    mesh, engine, pipeline = start(config, world)
    with LiveBytes() as live:
        train_step(engine, mesh, config, 0, pipeline)
        micro_batches = global_batch(config, 1).split(config.train.micro_batch)
        engine.begin_step(1, len(micro_batches))
        base = live.peak = live.now()
        pipeline.train(micro_batches)
    return (live.peak - base) / live_activations(config, mesh.layout, stages_of(config.model, mesh.layout, mesh.rank))


@pytest.mark.parametrize(
    "parallel,recompute",
    [
        (dict(), "full"),
        (dict(schedule="gpipe"), "full"),
        (dict(schedule="interleaved", chunks=2), "full"),
        (dict(schedule="zb-h1"), "full"),
        (dict(schedule="zb-h1"), "none"),
    ],
)
def test_the_estimate_is_about_what_is_alive(ranks, parallel, recompute):
    """In small models it is too little by what is not counted: gradients under way, positions, scores of attention."""
    train = dict(precision="float32", micro_batch=1, recompute=recompute)
    config = make_config(model=dict(layers=4), parallel=dict(pp=2, **parallel), train=train)
    for ratio in ranks(2, activations_against_the_estimate, config, 2):
        assert 0.9 < ratio < 1.4


def evaluation_peaks(config, world, numbers):
    """Bytes on this rank that were alive at once in an evaluation of each number of micro-batches."""
    _, _, pipeline = start(config, world)
    found = []
    with LiveBytes() as live:
        micro_batches = global_batch(config, 0).split(1)
        pipeline.evaluate(micro_batches)
        for number in numbers:
            live.peak = 0
            pipeline.evaluate(micro_batches[:number])
            found.append(live.peak)
    return found


def test_an_evaluation_keeps_no_more_for_more_micro_batches(ranks):
    config = make_config(parallel=dict(pp=2), train=dict(global_batch=16, micro_batch=1))
    for four, sixteen in ranks(2, evaluation_peaks, config, 2, (4, 16)):
        assert four == sixteen


def test_bytes_by_hand():
    """pp 3: the middle sends hidden states and gradients of 8 x 13 positions of 24 float64; a tied embedding of 53 rows
    travels once each way between the ends."""
    for tied, more in ((False, 0), (True, 53 * 24 * 8)):
        config = make_config(model=dict(layers=9, tied=tied), parallel=dict(pp=3))
        layout = Layout.of(config.parallel, 3)
        once = 8 * 13 * 24 * 8
        assert [pipeline_bytes(config, layout, r) for r in range(3)] == [once + more, 2 * once, once + more]


def frozen(config, world, names):
    """One step with some layers frozen: norm, this rank's gradients, which weights changed, and all it holds."""

    def prepare(chunks):
        for chunk in chunks:
            for name, p in chunk.named_parameters():
                p.requires_grad_(not name.startswith(names))

    mesh, engine, pipeline = start(config, world, prepare)
    before = {name: p.detach().clone() for name, p in engine.working.items()}
    _, norm = train_step(engine, mesh, config, 0, pipeline)
    changed = {name for name, p in engine.working.items() if not torch.equal(p.detach(), before[name])}
    return norm, {n: g.clone() for n, g in engine.gradients.items()}, changed, list(before)


FROZEN = {
    "first": ("embedding", "layers.0", "layers.1"),
    "middle": ("layers.2",),
    "last": ("layers.3", "norm", "head"),
}


@pytest.mark.parametrize("parallel", [{}, dict(schedule="zb-h1")], ids=["1f1b", "zb-h1"])
@pytest.mark.parametrize("which", FROZEN)
def test_a_stage_without_trained_parameters(ranks, which, parallel):
    """Traps D8 and D29: it computes nothing it need not, and the others' norm and gradients are what they were."""
    one = make_config(model=dict(layers=4), train=dict(micro_batch=2))
    split = dict(pp=3, stage_layers=(2, 1, 1), **parallel)
    config = make_config(model=dict(layers=4), train=dict(micro_batch=2), parallel=split)
    ((norm, want, changed, _),) = ranks(1, frozen, one, 1, FROZEN[which])
    outcomes = ranks(3, frozen, config, 3, FROZEN[which])
    assert [] in [list(gradients) for _, gradients, _, _ in outcomes]
    assert set().union(*(moved for _, _, moved, _ in outcomes)) == changed == set(want)
    for mine, gradients, _, held in outcomes:
        assert mine == pytest.approx(norm, rel=1e-9)
        assert set(gradients) == set(want) & set(held)
        for name, values in gradients.items():
            assert (values - want[name]).abs().max() <= 1e-9 * want[name].abs().max(), name


def poisoned(config, world, bad, where):
    """In the second step a stage returns NaN, or makes one of a weight. Was each step skipped, and did weights move?"""
    mesh, engine, pipeline = start(config, world)
    steps, layer = [], next(iter(engine.chunks[0].layers.values()))

    def spoil(value):
        return value * math.nan if len(steps) == 1 else value

    if mesh.rank == bad and where == "activation":
        layer.register_forward_hook(lambda module, inputs, out: (spoil(out[0]), *out[1:]))
    elif mesh.rank == bad:
        layer.mlp_norm.weight.register_hook(spoil)
    for step in range(3):
        batch = global_batch(config, step)
        before = [p.detach().clone() for p in engine.working.values()]
        engine.begin_step(batch.valid_tokens, 4)
        pipeline.train(batch.split(2))
        result = engine.step(LR[step])
        moved = any(not torch.equal(p.detach(), b) for p, b in zip(engine.working.values(), before))
        steps.append((result.skipped, moved))
    return steps


@pytest.mark.parametrize("bad", [0, 1, 2])
@pytest.mark.parametrize("where", ["activation", "gradient"])
def test_all_stages_skip_a_step_that_is_not_finite_in_one(ranks, bad, where):
    """Trap D28. A gradient that is not finite in one stage alone is seen in no loss."""
    config = make_config(model=dict(layers=3), parallel=dict(pp=3), train=dict(micro_batch=2))
    assert ranks(3, poisoned, config, 3, bad, where) == [[(False, True), (True, False), (False, True)]] * 3


def evaluated(config, world):
    from hpctrain.parallel.comm import all_reduce

    mesh, _, pipeline = start(config, world)
    batch = global_batch(config, 0).split(7)[0]  # the last micro-batch is smaller
    total = pipeline.evaluate(batch.split(2)) + pipeline.evaluate([])
    return all_reduce(total, mesh.total).item()


@pytest.mark.parametrize(
    "parallel",
    [dict(pp=3), dict(pp=2, schedule="interleaved", chunks=2), dict(pp=2, schedule="zb-v", chunks=2)],
    ids=["1f1b", "interleaved", "zb-v"],
)
def test_evaluation(ranks, parallel):
    model = dict(layers=4, tied=True, dropout=0.5)
    (want,) = ranks(1, evaluated, make_config(model=model), 1)
    config = make_config(model=model, parallel=parallel)
    for got in ranks(parallel["pp"], evaluated, config, parallel["pp"]):
        assert got == pytest.approx(want, rel=1e-12)


def split(config, world, prepare=lambda chunks: None):
    """Bytes on this rank beyond what stays, after a forward and after each part of its backward; and payload sent over
    tp in the second part."""
    mesh, engine, _ = start(config, world, prepare)
    found = []
    with LiveBytes() as live:
        batch = global_batch(config, 0)
        engine.begin_step(batch.valid_tokens, 2)
        engine.backward(engine.forward(0, batch))
        base = live.now()  # weights and gradients
        ticket = engine.forward(0, batch)
        found.append(live.now() - base)
        rest = engine.backward_input(ticket)
        del ticket
        found.append(live.now() - base)
        mesh.meter.reset()
        rest()
        found.append(live.now() - base)
    return found, sum(traffic.bytes for (_, axis), traffic in mesh.meter.traffic.items() if axis == "tp")


def widths(model):
    """Of what a layer's linears leave, and of what the head does."""
    h, kv, ffn = model.hidden, model.kv * model.head_width, model.ffn
    return h + h + 2 * kv + h + h + h + 2 * ffn + ffn + h, h + model.vocab


@pytest.mark.parametrize("sp", [False, True])
def test_a_split_backward_frees_all_but_what_weights_need(ranks, sp):
    """After the first part: per linear its input and its output's gradient, each once, and under sp of a part of the
    sequence where the linear has all; after the second: nothing."""
    parallel = dict(tp=1 + sp, sp=sp, schedule="zb-h1")
    config = make_config(model=dict(layers=2, dropout=0.1, vocab=54), data=dict(seq=12), parallel=parallel)
    layer, head = widths(config.model)
    whole = 8 * 12 * 8
    for (kept, left, end), _ in ranks(1 + sp, split, config, 1 + sp):
        assert left == whole * (2 * layer + head) // (1 + sp) < kept
        assert end == 0


def test_a_split_backward_leaves_nothing_for_weights_that_are_frozen(ranks):
    """And gathers nothing for them."""
    parallel = dict(tp=2, sp=True, schedule="zb-h1")
    config = make_config(model=dict(vocab=54), data=dict(seq=12), parallel=parallel)

    def freeze(chunks):
        for name, p in chunks[0].named_parameters():
            p.requires_grad_(name.startswith(("embedding", "head")) or "norm" in name)

    _, head = widths(config.model)
    part = 8 * 12 * 8 // 2
    for (_, left, end), sent in ranks(2, split, config, 2, freeze):
        assert (left, end) == (part * head, 0)
        assert sent == part * config.model.hidden
