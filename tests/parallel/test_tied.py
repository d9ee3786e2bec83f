"""The gradient of an embedding tied across stages is summed and handed back in float32, whatever is computed in."""

from __future__ import annotations

import functools
import math

import pytest
import torch

from hpctrain.layout.layout import Layout
from hpctrain.layout.traffic import pipeline_bytes
from tests.training import LR, global_batch, make_config, make_mesh

PARALLEL = [dict(pp=2), dict(pp=2, schedule="zb-v", chunks=2)]


def step(config, world, losing):
    """The embedding's gradient of a step over a micro-batch 8 times, and the norm of all; where the head is, what it
    added to it, and the largest of what it added in any micro-batch. `losing`: what it added is lost on the way."""
    from hpctrain.parallel.parallelize import build_chunks
    from hpctrain.parallel.pipeline import Pipeline
    from hpctrain.sharding.build import build_engine

    mesh = make_mesh(config, world)
    engine = build_engine(*build_chunks(config, mesh), mesh, config)
    pipeline = Pipeline(engine, mesh, config)
    micro_batch = max(global_batch(config, 0).split(1), key=lambda batch: batch.valid_tokens)
    parts, totals = [], []

    def collect(original, tie):
        parts.append(tie._copy.grad.abs().max().item())
        original()
        if len(parts) == 8:
            totals.append(tie._total.clone())
            tie._total.mul_(not losing)

    if pipeline.tie is not None:
        pipeline.tie.collect = functools.partial(collect, pipeline.tie.collect, pipeline.tie)
    engine.begin_step(8 * micro_batch.valid_tokens, 8)
    pipeline.train([micro_batch] * 8)
    gradient = engine.gradients.get("embedding.weight")
    gradient = None if gradient is None else gradient.clone()
    return gradient, engine.step(LR[0]).grad_norm, totals, max(parts, default=0.0)


def steps(ranks, parallel, **train):
    """A step, and one in which what the head added is lost: the embedding's gradient of each, the norm of the first,
    what the head added, and the largest of that in a micro-batch."""
    config = make_config(model=dict(layers=4, tied=True), parallel=parallel, train=dict(micro_batch=1, **train))
    whole, rest = (ranks(2, step, config, 2, losing) for losing in (False, True))
    head = next(of_rank for of_rank in whole if of_rank[2])
    return whole[0][0], rest[0][0], whole[0][1], head[2][0], head[3]


@pytest.mark.parametrize("parallel", PARALLEL, ids=["1f1b", "zb-v"])
@pytest.mark.parametrize("precision", ["bf16", "float64"])
def test_what_the_head_adds_keeps_its_precision(ranks, parallel, precision):
    gradient, rest, _, total, _ = steps(ranks, parallel, precision=precision)
    assert gradient.dtype == total.dtype == (torch.float64 if precision == "float64" else torch.float32)
    rounding = torch.finfo(total.dtype).eps * gradient.abs().max()
    assert total.abs().max() > 1000 * rounding
    assert (gradient - rest - total).abs().max() <= 8 * rounding


@pytest.mark.parametrize("parallel", PARALLEL, ids=["1f1b", "zb-v"])
def test_a_sum_too_large_for_fp16_does_not_overflow(ranks, parallel):
    """No micro-batch's gradient is, at a loss scale at which all of them together are."""
    largest = torch.finfo(torch.float16).max
    small, _, norm, _, part = steps(ranks, parallel, precision="fp16", loss_scale=2.0**8)
    scale = 2.0**8 * 2 ** math.floor(math.log2(largest / part))
    gradient, _, same, total, part = steps(ranks, parallel, precision="fp16", loss_scale=scale)
    assert part < largest < total.abs().max()
    assert same == pytest.approx(norm, rel=1e-2)
    assert (gradient / scale - small / 2**8).abs().max() < 1e-2 * (small / 2**8).abs().max()


def test_bytes_by_hand():
    """bf16: the weight of 53 rows of 24 in 2 bytes, its gradient in 4."""
    config = make_config(model=dict(tied=True), parallel=dict(pp=2), train=dict(precision="bf16"))
    layout = Layout.of(config.parallel, 2)
    once = 8 * 13 * 24 * 2
    assert [pipeline_bytes(config, layout, r) for r in range(2)] == [once + 53 * 24 * 2, once + 53 * 24 * 4]
