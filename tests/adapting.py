"""What tests of adapters share: weights to start from in which nothing is zero, the float64 reference, and a run of any
layout with every gradient of every step."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from hpctrain.config.schema import RunConfig
from hpctrain.layout.parameters import Init, parameter_specs, trained_specs
from hpctrain.layout.placement import Box
from hpctrain.model.loss import CrossEntropy
from hpctrain.model.packed import packed_weights
from hpctrain.model.random import initial_values
from hpctrain.model.transformer import Transformer
from hpctrain.sharding.state import WEIGHT
from hpctrain.verify.samples import global_batch
from tests.training import CPU, LR, make_config, make_mesh, train_step


def adapted(kind: str = "lora", *, adapter: dict[str, Any] | None = None, **sections: dict[str, Any]) -> RunConfig:
    """A tiny run of adapters: odd rank, and a scale that is not 1."""
    model = {"ffn": 48, "head_dim": 8, **sections.pop("model", {})}
    model["adapter"] = {"kind": kind, "rank": 3, "alpha": 4.5, **({"block": 4} if kind == "qlora" else {})}
    model["adapter"] |= adapter or {}
    return make_config(model=model, **sections)


class Given:
    """A state to start from, to be read like a checkpoint: as it is drawn, but that B is not zero, so that A has a
    gradient from the first step on, and that magnitudes are not the norms."""

    def __init__(self, config: RunConfig) -> None:
        self.specs, self.seed = {spec.name: spec for spec in parameter_specs(config.model)}, config.train.seed

    def read(self, name: str, kind: str, start: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        if kind != WEIGHT:
            return torch.zeros(shape)
        spec, box = self.specs[name], Box(start, (0,) * len(start), shape)
        if name.endswith("lora_b"):
            spec = replace(spec, init=Init(std=0.3))
        values = initial_values(spec, self.seed, box)
        return values * 1.3 if spec.init.norms_of is not None else values

    def scalars(self) -> dict[str, float]:
        return {"step": 0.0}


@dataclass
class Trace:
    """Per step the loss, the norm and every gradient; the last adapters; and what is not trained, at the end."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


def plain_model(config: RunConfig) -> Transformer:
    """The whole model in one process, in float64, with the weights of `Given`."""
    model = Transformer(
        config.model, config.train.seed, CrossEntropy(config.train.label_smoothing, config.train.z_loss)
    ).double()
    given = Given(config)
    for name, parameter in model.named_parameters():
        parameter.data = given.read(name, WEIGHT, (0,) * parameter.ndim, tuple(parameter.shape)).double()
    for name, packed in packed_weights(model).items():
        packed.fill(lambda start, shape, name=name: given.read(name, WEIGHT, start, shape), CPU)
    return model.train()


def reference(config: RunConfig, steps: int = 3) -> Trace:
    """Train in one process in float64 with nothing of ours but the model."""
    model, o, trace = plain_model(config), config.optimizer, Trace()
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert list(named) == [spec.name for spec in trained_specs(config.model)]
    groups = [
        {"params": [p for p in named.values() if p.ndim > 1], "weight_decay": o.weight_decay},
        {"params": [p for p in named.values() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(o.beta1, o.beta2), eps=o.eps)
    for step in range(steps):
        batch = global_batch(config, step)
        optimizer.zero_grad()
        total, routers = (None if x is None else x / batch.valid_tokens for x in model(batch))
        (total if routers is None else total + routers).backward()
        trace.norms.append(torch.nn.utils.clip_grad_norm_(list(named.values()), o.clip or float("inf")).item())
        trace.gradients.append({name: p.grad.clone() for name, p in named.items()})
        for group in optimizer.param_groups:
            group["lr"] = LR[step]
        optimizer.step()
        trace.losses.append(total.item())
    trace.weights = {name: p.detach().clone() for name, p in named.items()}
    return trace


def run(config: RunConfig, world: int, steps: int = 3) -> tuple[Any, ...]:
    """On every rank: train from `Given`; losses, norms, gradients of each step with their boxes, the pieces of weights
    that it would save, and whether what is not trained is as it was, to the bit."""
    from hpctrain.parallel.parallelize import build_chunks
    from hpctrain.parallel.pipeline import Pipeline
    from hpctrain.sharding.build import build_engine, takes_values

    mesh = make_mesh(config, world)
    chunks, records = build_chunks(config, mesh, materialize=takes_values(config))
    engine = build_engine(chunks, records, mesh, config)
    engine.load(Given(config))
    before = frozen_state(engine)
    pipeline, losses, norms, gradients = Pipeline(engine, mesh, config), [], [], []
    for step in range(steps):
        loss, norm = train_step(engine, mesh, config, step, pipeline)
        losses.append(loss)
        norms.append(norm)
        if config.engine == "none":
            gradients.append({n: (records[n].boxes[0], g.clone()) for n, g in engine.gradients.items()})
    weights = [(p.name, p.start, p.fetch().clone()) for p in engine.pieces() if p.kind == WEIGHT]
    after = frozen_state(engine)
    same = before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    return losses, norms, gradients, weights, same


def frozen_state(engine: Any) -> dict[str, Tensor]:
    """All that is not trained, of a rank."""
    found: dict[str, Tensor] = {}
    for chunk in engine.chunks:
        for name, p in chunk.named_parameters():
            if not p.requires_grad:
                found[name] = (p.ds_tensor if hasattr(p, "ds_tensor") else p).detach().clone()
        for name, packed in packed_weights(chunk).items():
            found |= {f"{name}.{i}": t.clone() for i, t in enumerate(packed.tensors())}
    return found


def assemble(config: RunConfig, outcomes: list[Any]) -> Trace:
    """One trace from those of all ranks: who holds the same agrees to the bit, and everything is written once."""
    shapes = {spec.name: spec.shape for spec in trained_specs(config.model)}
    trace = Trace(*outcomes[0][:2], [{} for _ in outcomes[0][2]])
    for losses, norms, gradients, weights, same in outcomes:
        assert losses == trace.losses and norms == trace.norms
        assert same, "what is not trained has changed"
        for step, found in enumerate(gradients):
            for name, (box, values) in found.items():
                _put(trace.gradients[step], shapes, name, box.start, values, once=False)
        for name, start, values in weights:
            _put(trace.weights, shapes, name, start, values, once=True)
    assert trace.weights.keys() == shapes.keys(), "adapters are saved, and they alone"
    return trace


def _put(into: dict[str, Tensor], shapes: Any, name: str, start: Any, values: Tensor, once: bool) -> None:
    whole = into.setdefault(name, torch.full(shapes[name], torch.nan, dtype=values.dtype))
    window = whole[tuple(slice(s, s + n) for s, n in zip(start, values.shape))]
    if once:
        assert torch.all(window.isnan()), f"{name}: written twice"
    else:
        assert torch.all(window.isnan() | (window == values)), f"{name}: copies of a gradient differ"
    window.copy_(values)


def compare(got: Trace, want: Trace, tolerance: float) -> None:
    """Assert equality of everything two traces hold, relative to each tensor's largest value."""
    assert torch.allclose(torch.tensor(got.losses), torch.tensor(want.losses), rtol=tolerance, atol=0)
    assert torch.allclose(torch.tensor(got.norms), torch.tensor(want.norms), rtol=tolerance, atol=0)
    pairs = [*zip(got.gradients, want.gradients), (got.weights, want.weights)]
    for place, (mine, theirs) in enumerate(pairs):
        assert mine.keys() == theirs.keys()
        for name, values in mine.items():
            other = theirs[name].to(values.dtype)
            assert values.isfinite().all() and other.abs().max() > 0, name
            worst = (values - other).abs().max() / other.abs().max()
            assert worst <= tolerance, f"{place}: {name} differs by {worst:.2e} of its largest value"
