"""The run that all layouts are held against: one process, float64, the plain model, torch's own AdamW.

It knows nothing of meshes, placements, schedules or engines.
"""

from __future__ import annotations

import torch

from hpctrain.config.schema import ParallelConfig, RunConfig, ShardingConfig
from hpctrain.config.validate import validate
from hpctrain.errors import ConfigError
from hpctrain.layout.fits import check_memory
from hpctrain.layout.layout import Layout
from hpctrain.layout.parameters import parameter_specs, saved_shapes, trained_specs
from hpctrain.layout.placement import Box
from hpctrain.model.loss import CrossEntropy
from hpctrain.model.packed import packed_weights
from hpctrain.model.random import initial_reader, initial_values
from hpctrain.model.router import give_biases, routers_of
from hpctrain.model.transformer import Transformer
from hpctrain.telemetry.memory import available_memory
from hpctrain.train.schedule import learning_rate
from hpctrain.verify.samples import global_batch
from hpctrain.verify.trace import Trace


def reference(config: RunConfig, steps: int) -> Trace:
    """Train for `steps` steps. Losses are summed over micro-batches, so that memory is that of one.

    Raises:
        ConfigError: it does not fit in this machine's memory.
    """
    check_memory(_plain(config), Layout(), available_memory(torch.device("cpu")).bytes, _as_it_is)
    options = config.optimizer
    model = _model(config)
    named, biases = dict(model.named_parameters()), give_biases(model, torch.device("cpu"))
    decays = {spec.name: spec.decay for spec in trained_specs(config.model)}
    named = {name: p for name, p in named.items() if p.requires_grad}
    groups = [
        {"params": [p for n, p in named.items() if decays[n]], "weight_decay": options.weight_decay},
        {"params": [p for n, p in named.items() if not decays[n]], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(options.beta1, options.beta2), eps=options.eps)
    trace = Trace(initial={n: p.detach().clone() for n, p in named.items()})
    for step in range(steps):
        batch = global_batch(config, step)
        optimizer.zero_grad()
        loss = 0.0
        for part in batch.split(config.train.micro_batch):
            total, routers = model(part)
            (total if routers is None else total + routers).div(max(batch.valid_tokens, 1)).backward()
            loss += total.item() / max(batch.valid_tokens, 1)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip or float("inf"))
        if step == 0:
            trace.gradients = {n: _gradient(p) for n, p in named.items()}
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(options, config.train, step)
        optimizer.step()
        _move_biases(model)
        trace.losses.append(loss)
        trace.norms.append(norm.item())
    saved = saved_shapes(config.model)
    trace.weights = {n: p.detach().clone() for n, p in {**named, **biases}.items() if n in saved}
    return trace


def _plain(config: RunConfig) -> RunConfig:
    """The run as it is here: in one process, with no engine, and nothing computed again."""
    train = config.train.model_copy(update={"recompute": "none", "recompute_every": 1})
    return config.model_copy(update={"parallel": ParallelConfig(), "sharding": ShardingConfig(), "train": train})


def _as_it_is(config: RunConfig, world: int) -> None:
    """Refuse what would change nothing here."""
    validate(config, world)
    if config.train.recompute != "none":
        raise ConfigError("train.recompute", config.train.recompute, "the reference computes nothing again")


def _model(config: RunConfig) -> Transformer:
    with torch.device("meta"):
        model = Transformer(
            config.model, config.train.seed, CrossEntropy(config.train.label_smoothing, config.train.z_loss)
        )
    model = model.to_empty(device="cpu").double()
    specs = {spec.name: spec for spec in parameter_specs(config.model)}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            whole = Box((0,) * parameter.ndim, (0,) * parameter.ndim, tuple(parameter.shape))
            parameter.copy_(initial_values(specs[name], config.train.seed, whole))
    for name, packed in packed_weights(model).items():
        packed.fill(initial_reader(specs[name], config.train.seed), torch.device("cpu"))
    return model.train()


def _move_biases(model: Transformer) -> None:
    """By `bias_rate` towards experts that had less than the mean of the step's tokens."""
    for router in routers_of(model).values():
        total = router.tally.total()
        if router.bias is not None and total is not None:
            counts = total[: router.moe.experts]
            router.bias += (router.moe.bias_rate or 0.0) * (counts.mean() - counts).sign().float()
        router.tally.clear()


def _gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
