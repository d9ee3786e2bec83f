"""Bytes that a rank needs to train, before anything is allocated. Plain arithmetic over the table of parameters.

State is exact: weights, gradients and optimizer state of the boxes that the rank holds. Activations are an
estimate of what backward needs: per token and layer the inputs and outputs of the two norms, queries, keys, values
and attention output, and what the MLP keeps, or router and experts; attention scores are taken not to be stored (fused
attention). What is recomputed is there for one layer of one micro-batch at a time. Allocator waste, buffers of
collectives and the framework
itself are not counted.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

from hpctrain.config.schema import RunConfig
from hpctrain.errors import ConfigError
from hpctrain.layout.activations import COMPUTE_BYTES, activations
from hpctrain.layout.context import misfit
from hpctrain.layout.layout import Layout
from hpctrain.layout.placement import placements, tied_copy, tp_sizes, zero_misfit
from hpctrain.layout.schedule import ZERO_BUBBLE, make_schedule
from hpctrain.layout.stages import Stage, stages_of
from hpctrain.layout.transfers import most_received

GIB = 2**30


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank: the parts of what training holds, and all that is held while the engine is built."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    building: int = 0

    @property
    def training(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations

    @property
    def total(self) -> int:
        return max(self.training, self.building)

    def describe(self) -> str:
        """All parts in GiB."""
        parts = ("weights", "gradients", "optimizer", "activations")
        text = ", ".join(f"{part} {_gib(getattr(self, part))}" for part in parts) + " GiB"
        more = self.building > self.training
        return text + (f", and {_gib(self.building)} GiB while it is built" if more else "")


def estimate(config: RunConfig, layout: Layout) -> Memory:
    """What the fullest rank of a layout needs."""
    return _fullest(config, layout, _held(config, layout))


def _fullest(config: RunConfig, layout: Layout, held: list[_Held]) -> Memory:
    return max((_estimate(config, layout, of_rank) for of_rank in held), key=lambda memory: memory.total)


@dataclass(frozen=True)
class _Held:
    """The fullest rank of a place on pp: its stages, the elements of each of its parameters before ZeRO shards them, by
    the number of ranks that would, and those of the embedding's copy for a head in another stage: its values, and its
    gradient."""

    stages: tuple[Stage, ...]
    parameters: dict[int, list[int]]
    copied: int
    copied_gradient: int


def _held(config: RunConfig, layout: Layout) -> list[_Held]:
    out = []
    for rank in (layout.rank(pp=index) for index in range(layout.pp)):
        mine = stages_of(config.model, layout, rank)
        parameters: dict[int, list[int]] = {}
        for record in placements(config.model, layout, rank).values():
            ranks = math.prod(layout.sizes(record.reduced_over))
            parameters.setdefault(ranks, []).append(math.prod(record.local_shape))
        copy = tied_copy(config.model, layout, rank) if mine[-1].last else None
        gradient = math.prod(copy.local_shape) if copy else 0
        out.append(_Held(mine, parameters, 0 if mine[0].first else gradient, gradient))
    return out


def _estimate(config: RunConfig, layout: Layout, of_rank: _Held) -> Memory:
    held = of_rank.parameters
    compute = COMPUTE_BYTES[config.train.precision]
    master = max(compute, 4)
    stage = config.sharding.stage if config.engine == "deepspeed" else 0
    numel = sum(map(sum, held.values()))
    shards = {ranks: -(-sum(sizes) // ranks) for ranks, sizes in held.items()}
    shard = sum(shards.values())
    separate = compute < master or config.engine == "deepspeed"  # DeepSpeed copies even float32 weights
    copies = 2 + separate  # two moments, and the master weights
    gathered = 0 if config.sharding.reshard_after_forward else numel  # else a layer's at a time
    weights = compute * (shard + gathered if stage >= 3 else numel)
    gradients = master * (shard if stage >= 2 else numel)
    optimizer = copies * master * (shard if stage >= 1 else numel)
    # DeepSpeed's moments are there from the start, in stage 3 its gradients too, while the initial values of the
    # largest fragment are drawn and copied. Engine none starts with neither: it then holds less than in a step.
    fragment = max(-(-max(s) // r) if stage >= 3 else min(max(s), shards[r]) for r, s in held.items())
    kept = compute * (shard if stage >= 3 else numel) + optimizer + gradients * (stage >= 3)
    building = kept + 2 * master * fragment if stage else 0
    weights += compute * of_rank.copied
    gradients += master * of_rank.copied_gradient
    return Memory(weights, gradients, optimizer, live_activations(config, layout, of_rank.stages), building)


def live_activations(config: RunConfig, layout: Layout, stages: tuple[Stage, ...]) -> int:
    """Most bytes of activations that a rank keeps at once, with what it has received for later."""
    micro_batches = config.train.global_batch // (layout.dp * config.train.micro_batch)
    schedule = _schedule(layout.schedule, layout.pp, layout.chunks, max(1, micro_batches))
    sizes = {stage.index: activations(config, layout, stage) for stage in stages}
    live = peak = 0
    for action in schedule.ranks[stages[0].home]:
        size = sizes[action.stage]
        left = size.left if layout.schedule in ZERO_BUBBLE else 0
        if action.kind == "forward":
            live += size.kept
            peak = max(peak, live)
        elif action.kind == "backward_weight":
            live -= left
        else:
            peak = max(peak, live + size.passing + max(0, left - size.kept))
            live += (left if action.kind == "backward_input" else 0) - size.kept
    return peak + most_received(layout.pp, layout.chunks) * sizes[stages[0].index].handed


_schedule = cache(make_schedule)


def check_memory(config: RunConfig, layout: Layout, available: int) -> None:
    """Refuse a run that cannot fit.

    Args:
        available: bytes that one rank may use.

    Raises:
        ConfigError: the estimate is above it; says what would fit.
    """
    need = estimate(config, layout)
    if need.total <= available:
        return
    mildest: dict[tuple[str, ...], dict[str, int | str]] = {}
    for changes in _alternatives(config, layout, available):
        mildest.setdefault(tuple(changes), changes)
    fewest = min(map(len, mildest), default=0)
    names = [" ".join(f"{k}={v}" for k, v in c.items()) for c in mildest.values() if len(c) == fewest]
    fix = "use " + ", or ".join(names) if names else "use more ranks or a smaller model"
    raise ConfigError(
        "memory",
        f"{_gib(need.total)} GiB",
        f"a rank has {_gib(available)} GiB and needs that for {need.describe()}",
        fix,
    )


def _gib(size: float) -> str:
    """Bytes as GiB, three digits and never an exponent."""
    return f"{size / GIB:,.0f}" if size >= 100 * GIB else f"{size / GIB:.3g}"


def _alternatives(config: RunConfig, layout: Layout, available: int) -> Iterator[dict[str, int | str]]:
    """Changes of micro-batch, recomputation, stage, tp and cp on the same ranks that fit; the mildest of each first."""
    micro, stage, ranks = config.train.micro_batch, config.sharding.stage, layout.world // layout.pp
    micros = [m for m in range(micro, 0, -1) if micro % m == 0]
    fixed = config.train.precision == "float64" or config.sharding.engine == "none"
    stages = [stage] if fixed else range(stage, 4)
    again = config.train.recompute
    recomputes = dict.fromkeys((again, "full"))
    for resized in _resized(config, layout, ranks):
        held = _held(config, resized)
        for s, r, m in itertools.product(stages, recomputes, micros):
            if config.train.global_batch % (resized.dp * m) or (s > stage and resized.dp * resized.cp == 1):
                continue
            if zero_misfit(config.model, resized, s):
                continue
            changed = config.model_copy(
                update={
                    "sharding": config.sharding.model_copy(update={"stage": s}),
                    "train": config.train.model_copy(update={"micro_batch": m, "recompute": r}),
                }
            )
            if _fullest(changed, resized, held).total <= available:
                values: dict[str, tuple[int | str, int | str]] = {
                    "train.micro_batch": (m, micro),
                    "train.recompute": (r, again),
                    "sharding.stage": (s, stage),
                    "parallel.tp": (resized.tp, layout.tp),
                    "parallel.etp": (resized.etp, layout.etp),
                    "parallel.cp": (resized.cp, layout.cp),
                }
                yield {key: new for key, (new, old) in values.items() if new != old}


def _resized(config: RunConfig, layout: Layout, ranks: int) -> Iterator[Layout]:
    """Layouts of as many ranks a stage with as much tensor and context parallelism, or more of one of them."""
    for tp in (t for t in tp_sizes(config.model, ranks) if t >= layout.tp):
        for cp in (c for c in range(layout.cp, ranks // tp + 1) if ranks // tp % c == 0):
            sizes = config.parallel.model_copy(update={"tp": tp, "cp": cp})
            if (tp > layout.tp and cp > layout.cp) or misfit(config.model, sizes, config.data.seq):
                continue
            etp = tp if layout.etp > 1 else 1
            if ranks % (layout.ep * etp) == 0 and config.model.expert_width % etp == 0:
                yield replace(layout, dp=ranks // (tp * cp), tp=tp, cp=cp, etp=etp)
