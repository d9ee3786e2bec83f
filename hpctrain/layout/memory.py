"""Bytes that a rank needs to train, before anything is allocated. Plain arithmetic over the table of parameters.

State is exact: weights, gradients and optimizer state of the boxes that the rank holds; of what is not trained, beside
adapters, the weights alone, in 4 bits where they are so. Activations are an
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
from typing import Any, TypeVar

from hpctrain.config.schema import ModelConfig, OffloadConfig, RunConfig
from hpctrain.errors import ConfigError
from hpctrain.layout.activations import COMPUTE_BYTES, OURS, Keeps, activations
from hpctrain.layout.buffers import NO_UNITS, Units
from hpctrain.layout.context import misfit
from hpctrain.layout.layout import Layout
from hpctrain.layout.offload import USUAL, DiskRates, Elsewhere, elsewhere
from hpctrain.layout.parameters import parameter_specs
from hpctrain.layout.placement import DENSE, Index, placements, tied_copy, tp_sizes, zero_misfit
from hpctrain.layout.recompute import forwards
from hpctrain.layout.schedule import ZERO_BUBBLE, make_schedule
from hpctrain.layout.shards import replicas_of
from hpctrain.layout.stages import Stage, stages_of
from hpctrain.layout.transfers import most_received
from hpctrain.layout.units import GIB

MEMORY = "memory"
"""What a refusal is about that is not a setting."""

N = TypeVar("N", int, Any)
"""A number, or an array of numbers."""


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank: the parts of what training holds on its device, all that is held while the engine is built,
    and what is offloaded: in memory of the host, and on its disk."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    building: int = 0
    host: int = 0
    disk: int = 0

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
        text += f", and {_gib(self.building)} GiB while it is built" if more else ""
        return text + (f", besides {_gib(self.host)} GiB of host memory for what is offloaded" if self.host else "")


def estimate(config: RunConfig, layout: Layout, keeps: Keeps = OURS) -> Memory:
    """What the fullest rank of a layout needs."""
    return _fullest(config, layout, held_by(config, layout), keeps)


def _fullest(config: RunConfig, layout: Layout, held: list[Held], keeps: Keeps = OURS) -> Memory:
    return max((memory_of(config, layout, of_rank, keeps) for of_rank in held), key=lambda memory: memory.total)


@dataclass(frozen=True)
class Held:
    """The fullest rank of a place on pp: its stages, the elements of each of its parameters before ZeRO shards them, by
    the number of ranks that would, and those of the embedding's copy for a head in another stage: its values, and its
    gradient. Then elements of what is not trained, bytes of what is in 4 bits, and what is computed with together."""

    stages: tuple[Stage, ...]
    parameters: dict[int, list[int]]
    copied: int
    copied_gradient: int
    frozen: int = 0
    packed: int = 0
    units: Units = NO_UNITS


def held_by(config: RunConfig, layout: Layout) -> list[Held]:
    """Of each place on pp, what its fullest rank holds."""
    out, specs = [], {spec.name: spec for spec in parameter_specs(config.model)}
    for rank in (layout.rank(pp=index) for index in range(layout.pp)):
        mine = stages_of(config.model, layout, rank)
        parameters: dict[int, list[int]] = {}
        together: dict[str, int] = {}
        frozen = packed = 0
        for name, record in placements(config.model, layout, rank).items():
            ranks, numel, spec = (
                math.prod(layout.sizes(record.reduced_over)),
                math.prod(record.local_shape),
                specs[name],
            )
            unit = f"layer {spec.layer}" if spec.layer is not None else "last" if spec.output else "first"
            together[unit] = together.get(unit, 0) + numel
            if spec.trained:
                parameters.setdefault(ranks, []).append(numel)
            elif spec.block is not None:
                packed += packed_bytes(record.local_shape, spec.shape, spec.block)
            else:
                frozen += numel
        copy = tied_copy(config.model, layout, rank) if mine[-1].last else None
        copied = math.prod(copy.local_shape) if copy else 0
        gradient = copied if config.model.adapter is None else 0
        units = _units(config.model, together, any(stage.first and stage.last for stage in mine))
        out.append(Held(mine, parameters, 0 if mine[0].first else copied, gradient, frozen, packed, units))
    return out


def _units(model: ModelConfig, together: dict[str, int], whole: bool) -> Units:
    """Of the elements by layer, and before and after these; `whole`: one stage has all of them."""
    first, last = together.pop("first", 0), together.pop("last", 0)
    layer = max(together.values(), default=0)
    return Units(layer, 0, last, first) if model.tied and whole else Units(layer, first, last)


def packed_bytes(held: Index, whole: Index, block: int) -> int:
    """Bytes of a weight in 4 bits: half a byte an element, a byte a block, and for each matrix 4 of every 256 blocks of
    the whole, and 4 more.

    Args:
        held: shape of what a rank has.
        whole: shape of the weight.
        block: elements with a scale of their own.
    """
    numel, tops = math.prod(held), -(-math.prod(whole[-2:]) // (256 * block))
    return numel // 2 + numel // block + 4 * math.prod(held[:-2]) * (tops + 1)


def memory_of(config: RunConfig, layout: Layout, of_rank: Held, keeps: Keeps) -> Memory:
    """What a rank needs that holds so much."""
    held = of_rank.parameters
    compute = COMPUTE_BYTES[config.train.precision]
    master = max(compute, 4)
    stage = config.sharding.stage if config.engine == "deepspeed" else 0
    numel = sum(map(sum, held.values()))
    shards = {ranks: -(-sum(sizes) // ranks) for ranks, sizes in held.items()}
    shard = sum(shards.values())
    separate = compute < master or config.engine == "deepspeed"  # DeepSpeed copies even float32 weights
    reshard, width = config.sharding.reshard_after_forward, keeps.gradient or master
    weights, gradients, optimizer = state(numel, shard, stage, compute, separate, reshard, keeps.gradient)
    if config.engine == "fsdp":
        weights, gradients, optimizer = _fsdp_state(config, held)
    # DeepSpeed's moments are there from the start, in stage 3 its gradients too, while the initial values of the
    # largest fragment are drawn and copied. Engine none starts with neither: it then holds less than in a step.
    each = [-(-max(s) // r) if stage >= 3 else min(max(s), shards[r]) for r, s in held.items()]
    fragment = max(each, default=0)
    kept = compute * (shard if stage >= 3 else numel) + optimizer + gradients * (stage >= 3)
    building = kept + 2 * master * fragment if stage else 0
    away = elsewhere(config, _kept(of_rank), weights, gradients, optimizer)
    if config.engine == "fsdp" and config.sharding.offload.state:
        away = Elsewhere(0, 0, 0, host=weights + gradients + optimizer)  # all of it, where any of it is
    if config.sharding.offload.state:
        weights, gradients, optimizer, building = away.weights, away.gradients, away.optimizer, 0
    sharded = math.prod(layout.sizes(DENSE)) if stage >= 3 or config.engine == "fsdp" else 1
    if config.engine == "fsdp":  # of what is not trained it has master weights too
        sharded //= replicas_of(config.sharding.replicas, sharded)
    frozen = (master if config.engine == "fsdp" else compute) * -(-of_rank.frozen // sharded) + of_rank.packed
    weights += compute * of_rank.copied + frozen
    building += frozen * (building > 0)
    gradients += width * of_rank.copied_gradient
    activations = live_activations(config, layout, of_rank.stages, keeps)
    return Memory(weights, gradients, optimizer, activations, building, away.host, away.disk)


def _kept(of_rank: Held) -> list[int]:
    """Elements of each parameter that the rank keeps."""
    return [-(-n // ranks) for ranks, sizes in of_rank.parameters.items() for n in sizes]


def away_of(config: RunConfig, layout: Layout, disk: DiskRates = USUAL, host: int = 1 << 62) -> Elsewhere:
    """What the rank that holds most has away from its device, and what of it moves in a step.

    Args:
        disk: as measured.
        host: bytes of memory that a rank may use there.
    """
    most = max(held_by(config, layout), key=lambda of_rank: sum(_kept(of_rank)))
    micro_batches = config.train.global_batch // (layout.dp * config.train.micro_batch)
    runs = [times for stage in most.stages for times in forwards(config.train, stage.layers).values()]
    again = sum(runs) / len(runs) - 1 if runs else 0.0
    return elsewhere(config, _kept(most), 0, 0, 0, micro_batches, disk, host, again)


def _fsdp_state(config: RunConfig, held: dict[int, list[int]]) -> tuple[int, int, int]:
    """Bytes of weights, gradients and optimizer state of a rank in a step under engine `fsdp`: its part of master
    weights, and whole weights and gradients where those are kept."""
    sharding, compute = config.sharding, COMPUTE_BYTES[config.train.precision]
    master, numel = max(compute, 4), sum(map(sum, held.values()))
    parts = {ranks: ranks // replicas_of(sharding.replicas, ranks) for ranks in held}
    shard = sum(-(-size // parts[ranks]) for ranks, sizes in held.items() for size in sizes)
    weights = master * shard + (0 if sharding.reshard_after_forward else compute * numel)
    return weights, master * (numel if sharding.reduce_every == "step" else shard), 2 * master * shard


def state(
    numel: N, shard: N, stage: int, compute: int, separate: bool, reshard: bool = True, gradient: int | None = None
) -> tuple[N, N, N]:
    """Bytes of weights, gradients and optimizer state of a rank in a step.

    Args:
        numel: elements of parameters on the rank before ZeRO shards them; a number, or an array of numbers.
        shard: of these, its part if all were sharded.
        stage: of ZeRO.
        compute: bytes of a weight in the computation.
        separate: there are master weights beside those of the computation.
        reshard: ZeRO 3 lets gathered weights go: only a layer's are there at a time, and not counted.
        gradient: bytes of an element of a gradient; None is that of master weights.
    """
    master, copies = max(compute, 4), 2 + separate  # two moments, and the master weights
    weights = compute * (numel if stage < 3 else shard if reshard else shard + numel)
    gradients = (gradient or master) * (shard if stage >= 2 else numel)
    return weights, gradients, copies * master * (shard if stage >= 1 else numel)


def live_activations(config: RunConfig, layout: Layout, stages: tuple[Stage, ...], keeps: Keeps = OURS) -> int:
    """Most bytes of activations that a rank keeps at once, with what it has received for later."""
    micro_batches = config.train.global_batch // (layout.dp * config.train.micro_batch)
    schedule = schedule_of(layout.schedule, layout.pp, layout.chunks, max(1, micro_batches))
    sizes = {stage.index: activations(config, layout, stage, keeps) for stage in stages}
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


schedule_of = cache(make_schedule)
"""Schedules by name, pp, chunks and micro-batches."""


@dataclass(frozen=True)
class Room:
    """Bytes that one rank may use.

    Attributes:
        device: of its device.
        host: of memory of the host, where that is not the device.
        disk: of its share of the node's disk; None is not known.
    """

    device: int
    host: int | None = None
    disk: int | None = None

    def holds(self, need: Memory) -> bool:
        """Whether it is enough."""
        return not self.lack(need)

    def lack(self, need: Memory) -> str:
        """What there is too little of, in words; empty where there is enough."""
        here = need.total + (need.host if self.host is None else 0)
        if here > self.device:
            return f"more than the {_gib(self.device)} GiB that a rank has; needed are {need.describe()}"
        if self.host is not None and need.host > self.host:
            return (
                f"more than the {_gib(self.host)} GiB of host memory that a rank may use; needed are {need.describe()}"
            )
        if self.disk is not None and need.disk > self.disk:
            return (
                f"{_gib(need.disk)} GiB of them on the disk, more than the {_gib(self.disk)} GiB that a rank finds "
                f"free there"
            )
        return ""


def check_memory(config: RunConfig, layout: Layout, available: int | Room) -> None:
    """Refuse a run that cannot fit.

    Args:
        available: what one rank may use; a number is of bytes where device and host are one.

    Raises:
        ConfigError: the estimate is above it; says what would fit.
    """
    room = available if isinstance(available, Room) else Room(available)
    need = estimate(config, layout)
    reason = room.lack(need)
    if not reason:
        return
    mildest: dict[tuple[str, ...], dict[str, int | str]] = {}
    for changes in _alternatives(config, layout, room):
        mildest.setdefault(tuple(changes), changes)
    fewest = min(map(len, mildest), default=0)
    names = [" ".join(f"{k}={v}" for k, v in c.items()) for c in mildest.values() if len(c) == fewest]
    fix = "use " + ", or ".join(names) if names else "use more ranks or a smaller model"
    raise ConfigError(MEMORY, f"{_gib(need.total + need.host + need.disk)} GiB", reason, fix)


def _gib(size: float) -> str:
    """Bytes as GiB, three digits and never an exponent."""
    return f"{size / GIB:,.0f}" if size >= 100 * GIB else f"{size / GIB:.3g}"


AWAY: tuple[dict[str, str], ...] = (
    {"optimizer": "cpu"},
    {"optimizer": "nvme"},
    {"optimizer": "cpu", "params": "cpu"},
    {"optimizer": "nvme", "params": "nvme"},
    {"optimizer": "nvme", "gradients": "nvme"},
    {"optimizer": "nvme", "gradients": "nvme", "params": "nvme"},
)
"""What else might be offloaded, mildest first."""


def _alternatives(config: RunConfig, layout: Layout, room: Room) -> Iterator[dict[str, int | str]]:
    """Changes of micro-batch, recomputation, stage, offloading, tp, cp, ep that fit on the same ranks; mildest of each
    first."""
    micro, stage, ranks = config.train.micro_batch, config.sharding.stage, layout.world // layout.pp
    micros = [m for m in range(micro, 0, -1) if micro % m == 0]
    plain = config.train.precision == "float64" or config.sharding.engine in ("none", "fsdp")
    fixed = plain or layout.schedule in ZERO_BUBBLE
    stages = [stage] if fixed else range(stage, 4)
    again, here = config.train.recompute, config.sharding.offload
    every = config.train.recompute_every
    recomputes = dict.fromkeys(((again, every), ("full", 1)))
    places = [here, *(here.model_copy(update=away) for away in AWAY if not fixed and config.engine != "fsdp")]
    for resized in _resized(config, layout, ranks):
        held = held_by(config, resized)
        for away, s, (r, k), m in itertools.product(places, stages, recomputes, micros):
            alone = resized.dp * resized.cp == 1  # then a stage spares nothing but by what it lets go elsewhere
            if config.train.global_batch % (resized.dp * m) or (s > stage and alone and away == here):
                continue
            if resized.dp * resized.cp % config.sharding.replicas or (away != here and not _goes(away, s, room)):
                continue
            if config.engine != "fsdp" and zero_misfit(config.model, resized, s):
                continue
            changed = config.model_copy(
                update={
                    "sharding": config.sharding.model_copy(update={"stage": s, "offload": away}),
                    "train": config.train.model_copy(update={"micro_batch": m, "recompute": r, "recompute_every": k}),
                }
            )
            if room.holds(_fullest(changed, resized, held)):
                values: dict[str, tuple[int | str, int | str]] = {
                    "train.micro_batch": (m, micro),
                    "train.recompute": (r, again),
                    "train.recompute_every": (k, every),
                    "sharding.stage": (s, stage),
                    "sharding.offload.optimizer": (away.optimizer, here.optimizer),
                    "sharding.offload.gradients": (away.gradients, here.gradients),
                    "sharding.offload.params": (away.params, here.params),
                    "parallel.tp": (resized.tp, layout.tp),
                    "parallel.etp": (resized.etp, layout.etp),
                    "parallel.cp": (resized.cp, layout.cp),
                    "parallel.ep": (resized.ep, layout.ep),
                }
                yield {key: new for key, (new, old) in values.items() if new != old}


def _goes(away: OffloadConfig, stage: int, room: Room) -> bool:
    """Whether state can be offloaded like this, and is not merely moved within the same memory."""
    if not stage or (stage < 3 and (away.params != "none" or away.gradients == "nvme")):
        return False
    return room.host is not None or "cpu" not in (away.optimizer, away.params)


def _resized(config: RunConfig, layout: Layout, ranks: int) -> Iterator[Layout]:
    """Layouts of as many ranks a stage with as much tensor, context and expert parallelism, or more of one of them."""
    experts = config.model.moe.experts if config.model.moe else 1
    for tp in (t for t in tp_sizes(config.model, ranks) if t >= layout.tp):
        etp = tp if layout.etp > 1 else 1
        for cp in (c for c in range(layout.cp, ranks // tp + 1) if ranks // tp % c == 0):
            sizes = config.parallel.model_copy(update={"tp": tp, "cp": cp})
            if misfit(config.model, sizes, config.data.seq) or config.model.expert_width % etp:
                continue
            for ep in (e for e in range(layout.ep, experts + 1) if experts % e == 0 and ranks % (e * etp) == 0):
                if (tp > layout.tp) + (cp > layout.cp) + (ep > layout.ep) < 2:
                    yield replace(layout, dp=ranks // (tp * cp), tp=tp, cp=cp, ep=ep, etp=etp)
