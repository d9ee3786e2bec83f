"""All layouts of a recipe on so many devices that the rules allow, as arrays."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from hpctrain.config.schema import ParallelConfig, RunConfig
from hpctrain.errors import ConfigError
from hpctrain.layout.context import misfit as sequence_misfit
from hpctrain.layout.layout import Layout, divisors
from hpctrain.layout.placement import tp_sizes, zero_misfit
from hpctrain.layout.stages import even
from hpctrain.plan.links import Machine
from hpctrain.plan.work import NAMES, RECOMPUTE, Points

MICRO_BATCHES = (1, 2, 4, 8, 16)
CHUNKS = (2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24)
MOST_CP = 32
MOST_DEVICES, MOST_BATCH = 2**24, 2**30
"""What is searched for: above, numbers are slips of the finger."""


def pipelines(config: RunConfig, pp: int) -> Iterator[tuple[str, int]]:
    """Schedules and chunks for so many ranks: every stage has a layer."""
    layers = config.model.layers
    if pp == 1:
        yield "1f1b", 1
        return
    yield "1f1b", 1
    yield "zb-h1", 1
    for chunks in CHUNKS:
        if pp * chunks <= layers and even(layers, pp * chunks):
            yield "interleaved", chunks
    if 2 * pp <= layers:
        yield "zb-v", 2


def candidates(config: RunConfig, machine: Machine, devices: int, offload: bool = False) -> Points:
    """Every layout that can run, whether it fits or not.

    Raises:
        ConfigError: there is none; says why.
    """
    batch = config.train.global_batch
    for name, value, most in (("gpus", devices, MOST_DEVICES), ("train.global_batch", batch, MOST_BATCH)):
        if value > most:
            raise ConfigError(name, value, f"plans are for {most:,} at most", "use fewer")
    found = list(_columns(config, machine, devices, offload))
    if not found:
        _explain(config, machine, devices, offload)
        raise ConfigError("train.global_batch", batch, f"no layout of {devices} devices divides it", "use a multiple")
    return Points.join(found)


TRIED = 40
"""Batches near one that does not work, of which the first that does is named."""


def _explain(config: RunConfig, machine: Machine, devices: int, offload: bool) -> None:
    """Why no layout divides the batch, and the nearest batch that works."""
    batch = config.train.global_batch
    sizes = sorted({devices // (tp * pp * cp) for tp, pp, cp in _axes(config, machine, devices)})
    near = {n for dp in sizes for n in (batch // dp * dp, -(-batch // dp) * dp) if n and n != batch}
    for other in sorted(near, key=lambda n: abs(n - batch))[:TRIED]:
        train = config.train.model_copy(update={"global_batch": other})
        changed = config.model_copy(update={"train": train})
        if next(_columns(changed, machine, devices, offload), None) is not None:
            allowed = (
                f"must be a multiple of dp (at least {sizes[0]} on {devices} devices) with micro-batches for all stages"
            )
            raise ConfigError("train.global_batch", batch, allowed, f"use {other}, or fewer devices")


def _axes(config: RunConfig, machine: Machine, devices: int) -> Iterator[tuple[int, int, int]]:
    """tp, pp and cp that the model and the machine allow."""
    model, domain = config.model, machine.hardware.domain.devices
    for tp in (t for t in tp_sizes(model, devices) if t <= domain):
        for pp in (p for p in divisors(devices // tp) if p <= model.layers):
            for cp in (
                c for c in divisors(devices // (tp * pp)) if c <= MOST_CP and (c == 1 or config.data.seq // c >= 1024)
            ):
                sizes = ParallelConfig(tp=tp, sp=tp > 1, cp=cp, cp_method=config.parallel.cp_method)
                if not sequence_misfit(model, sizes, config.data.seq):
                    yield tp, pp, cp


def _columns(config: RunConfig, machine: Machine, devices: int, offload: bool) -> Iterator[Points]:
    for tp, pp, cp in _axes(config, machine, devices):
        dp = devices // (tp * pp * cp)
        if config.train.global_batch % dp == 0:
            yield from _of_axes(config, tp, pp, cp, dp, offload)


def _of_axes(config: RunConfig, tp: int, pp: int, cp: int, dp: int, offload: bool) -> Iterator[Points]:
    model, each = config.model, config.train.global_batch // dp
    micros = [m for m in MICRO_BATCHES if each % m == 0]
    stage_ranks = dp * cp * tp
    experts = [1]
    if model.moe:
        experts = [ep for ep in divisors(model.moe.experts) if stage_ranks % ep == 0]
    for (schedule, chunks), ep in itertools.product(pipelines(config, pp), experts):
        split = schedule.startswith("zb")
        fits = [m for m in micros if pp == 1 or each // m >= pp]
        if schedule in ("interleaved", "zb-v"):
            fits = [m for m in fits if (each // m) % pp == 0]
        layout = Layout(pp=pp, dp=dp, cp=cp, tp=tp, ep=ep, sp=tp > 1, schedule=schedule, chunks=chunks)
        alone = dp * cp == 1  # on one rank ZeRO is there to offload
        stages = [0] if split or (alone and not offload) else [0, 1, 2, 3]
        stages = [s for s in stages if zero_misfit(model, layout, s) is None]
        kinds = [
            (s, r, o)
            for s in stages
            if s < 3 or model.adapter is None  # `config.adapters` refuses it
            for r in ((1, 0) if s == 3 else (1,))
            for o in ((0, 1, 2) if offload and s else (0,))
            if o or not s or not alone
        ]
        rows = list(itertools.product(fits, range(len(RECOMPUTE)), kinds))
        if not rows:
            continue
        micro, recompute, stage, reshard, away = np.array([(m, r, *k) for m, r, k in rows], dtype=np.int64).T
        same = {"tp": tp, "sp": int(tp > 1), "pp": pp, "dp": dp, "cp": cp, "ep": ep, "etp": 1, "chunks": chunks}
        same["schedule"] = NAMES.index(schedule)
        yield Points(
            **{name: np.full(len(rows), value, dtype=np.int64) for name, value in same.items()},
            micro_batch=micro,
            recompute=recompute,
            stage=stage,
            reshard=reshard,
            offload=away,
        )
