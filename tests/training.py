"""What equivalence tests share: asymmetric data, the float64 reference, and a run of any layout to hold against it.

The reference knows nothing of meshes, placements or engines: a plain model, the whole batch, torch's own
clipping and AdamW.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from hpctrain.config.schema import RunConfig
from hpctrain.layout.layout import Layout
from hpctrain.layout.parameters import parameter_specs, saved_shapes
from hpctrain.layout.placement import Box, replica_groups
from hpctrain.model.batch import IGNORED, Batch
from hpctrain.model.loss import CrossEntropy
from hpctrain.model.random import initial_values
from hpctrain.model.router import give_biases, routers_of
from hpctrain.model.transformer import Transformer
from hpctrain.parallel.mesh import Mesh, build_mesh
from hpctrain.sharding.engine import StepResult
from hpctrain.verify.samples import global_batch

CPU = torch.device("cpu")
LR = (1e-2, 7e-3, 5e-3)


def make_config(**sections: dict[str, Any]) -> RunConfig:
    """A tiny model with nothing even about it; sections override its defaults."""
    base: dict[str, dict[str, Any]] = {
        "model": dict(layers=2, hidden=24, heads=4, kv_heads=2, head_dim=6, ffn=40, vocab=53, max_seq=32),
        "data": dict(seq=13),
        "train": dict(precision="float64", global_batch=8, micro_batch=4, seed=3),
        "optimizer": dict(clip=0.05, weight_decay=0.1, eps=1e-6),
        "sharding": dict(bucket_mib=0.005),
    }
    return RunConfig.model_validate({k: {**base.get(k, {}), **sections.get(k, {})} for k in {*base, *sections}})


@dataclass
class Trace:
    """What is compared: per step the loss and norm, the first step's gradients, and the last weights."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)


class LossOfTorch(CrossEntropy):
    """The same sum by torch's functions, of all logits at once."""

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        x, y = logits.flatten(0, 1), labels.flatten()
        smoothing, z_loss = (self.smoothing, self.z_loss) if self.training else (0.0, 0.0)
        total = F.cross_entropy(x, y, ignore_index=IGNORED, reduction="sum", label_smoothing=smoothing)
        return total + z_loss * x.logsumexp(-1).square().masked_fill(y == IGNORED, 0.0).sum()


def reference(config: RunConfig, steps: int = 3, batches: Sequence[Batch] = (), lr: Sequence[float] = LR) -> Trace:
    """Train in one process in float64 with nothing of ours but the model."""
    loss = LossOfTorch(config.train.label_smoothing, config.train.z_loss)
    model = Transformer(config.model, config.train.seed, loss)
    specs = {s.name: s for s in parameter_specs(config.model)}
    for name, p in model.named_parameters():
        whole = Box((0,) * p.ndim, (0,) * p.ndim, tuple(p.shape))
        p.data = initial_values(specs[name], config.train.seed, whole).double()
    named, o = dict(model.named_parameters()), config.optimizer
    biases = give_biases(model, CPU)
    groups = [
        {"params": [p for p in named.values() if p.ndim > 1], "weight_decay": o.weight_decay},
        {"params": [p for p in named.values() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(o.beta1, o.beta2), eps=o.eps)
    trace = Trace()
    for step in range(steps):
        batch = batches[step] if batches else global_batch(config, step)
        optimizer.zero_grad()
        total, routers = (None if x is None else x / batch.valid_tokens for x in model(batch))
        (total if routers is None else total + routers).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), o.clip or float("inf"))
        if step == 0:
            trace.gradients = {n: p.grad.clone() for n, p in named.items()}
        for group in optimizer.param_groups:
            group["lr"] = lr[step]
        optimizer.step()
        move_biases(model)
        trace.losses.append(total.item())
        trace.norms.append(norm.item())
    trace.weights = {n: p.detach().clone() for n, p in {**named, **biases}.items()}
    return trace


def move_biases(model: Transformer) -> None:
    """What a step does to them: expert by expert, after counts that the routers kept of this step alone."""
    for router in routers_of(model).values():
        counts = router.tally.total()[: router.moe.experts].tolist()
        for expert, count in enumerate(counts if router.bias is not None else []):
            step, mean = router.moe.bias_rate, sum(counts) / len(counts)
            router.bias[expert] += step if count < mean else -step if count > mean else 0.0
        router.tally.clear()


def make_mesh(config: RunConfig, world: int) -> Mesh:
    layout = Layout.of(config.parallel, world)
    return build_mesh(layout, CPU, replica_groups(config.model, layout), 60)


def train_step(engine, mesh: Mesh, config: RunConfig, step: int, pipeline=None) -> tuple[float, float]:
    """One optimizer step on this rank's share of the global batch: mean loss over all ranks, and the norm."""
    loss, result = train_batch(engine, mesh, config, step, pipeline)
    return loss, result.grad_norm


def train_batch(engine, mesh: Mesh, config: RunConfig, step: int, pipeline=None) -> tuple[float, StepResult]:
    """The same, with all that the engine says of the step."""
    from hpctrain.parallel.comm import all_reduce_
    from hpctrain.parallel.context import own_part
    from hpctrain.parallel.pipeline import Pipeline

    batch = global_batch(config, step)
    share = config.train.global_batch // mesh.dp.size
    mine = own_part(batch.split(share)[mesh.dp.index], config, mesh).split(config.train.micro_batch)
    engine.begin_step(batch.valid_tokens, len(mine))
    total = (pipeline or Pipeline(engine, mesh, config)).train(mine)
    result = engine.step(LR[step % len(LR)])
    return (all_reduce_(total, mesh.total) / batch.valid_tokens).item(), result


def run(config: RunConfig, world: int, steps: int = 3) -> list[Any]:
    """On every rank: train, and return losses, norms and the pieces of gradients and weights it owns."""
    from hpctrain.parallel.parallelize import build_chunks
    from hpctrain.parallel.pipeline import Pipeline
    from hpctrain.sharding.build import build_engine

    mesh = make_mesh(config, world)
    chunks, records = build_chunks(config, mesh)
    engine = build_engine(chunks, records, mesh, config)
    pipeline = Pipeline(engine, mesh, config)
    losses, norms, gradients = [], [], {}
    for step in range(steps):
        loss, norm = train_step(engine, mesh, config, step, pipeline)
        losses.append(loss)
        norms.append(norm)
        if step == 0 and config.engine == "none":
            gradients = {n: (records[n].boxes[0], g.clone()) for n, g in engine.gradients.items()}
        if step == 0 and config.engine == "fsdp":  # of which the first moment is a share
            share = 1.0 - config.optimizer.beta1
            moments = (p for p in engine.pieces() if p.kind == "exp_avg")
            gradients = {p.name: (Box(p.start, p.start, p.shape), p.fetch() / share) for p in moments}
    weights = [(p.name, Box(p.start, p.start, p.shape), p.fetch()) for p in engine.pieces() if p.kind == "weight"]
    return [losses, norms, gradients, weights]


def assemble(config: RunConfig, outcomes: list[Any]) -> Trace:
    """Put what the ranks returned together, and check that ranks that hold the same thing agree to the bit."""
    trace = Trace(*outcomes[0][:2])
    shapes = saved_shapes(config.model)
    for losses, norms, gradients, _ in outcomes:
        assert losses == trace.losses and norms == trace.norms
        for name, (box, values) in gradients.items():
            whole = trace.gradients.setdefault(name, torch.full(shapes[name], torch.nan, dtype=values.dtype))
            window = whole[tuple(slice(s, s + n) for s, n in zip(box.start, box.shape))]
            assert torch.all(window.isnan() | (window == values)), f"{name}: copies of a gradient differ"
            window.copy_(values)
    for *_, weights in outcomes:
        for name, box, values in weights:
            whole = trace.weights.setdefault(name, torch.full(shapes[name], torch.nan, dtype=values.dtype))
            window = whole[tuple(slice(s, s + n) for s, n in zip(box.start, box.shape))]
            assert torch.all(window.isnan()), f"{name}: written by two ranks"
            window.copy_(values)
    return trace


def compare(got: Trace, want: Trace, tolerance: float) -> None:
    """Assert equality of everything two traces hold, relative to each tensor's largest value.

    Weights that are still smaller than the learning rate are held against that: without rotary embedding the
    key bias has no gradient (softmax ignores what is added to all scores), and AdamW enlarges its rounding. Of that
    gradient there is only rounding to compare, 1e-20 or so, and nothing of it may be as large as 1e-19.
    """
    assert np.allclose(got.losses, want.losses, rtol=tolerance, atol=0), (got.losses, want.losses)
    assert np.allclose(got.norms, want.norms, rtol=tolerance, atol=0), (got.norms, want.norms)
    for label, mine, theirs, floor in (
        ("gradient", got.gradients, want.gradients, 1e-10),
        ("weight", got.weights, want.weights, max(LR)),
    ):
        if mine:
            assert mine.keys() == theirs.keys()
        for name, values in mine.items():
            other = theirs[name].to(values.dtype)
            worst = (values - other).abs().max() / other.abs().max().clamp_min(floor)
            assert worst <= tolerance, f"{label} {name} differs by {worst:.2e} of its largest value"
