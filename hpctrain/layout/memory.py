"""Bytes that a rank needs to train, before anything is allocated. Plain arithmetic over the table of parameters.

State is exact: weights, gradients and optimizer state of the boxes that the rank holds; of what is not trained, beside
adapters, the weights alone, in 4 bits where they are so. Activations are an
estimate of what backward needs: per token and layer the inputs and outputs of the two norms, queries, keys, values
and attention output, and what the MLP keeps, or router and experts; attention scores are taken not to be stored (fused
attention). What is recomputed is there for one layer of one micro-batch at a time. What is there for a moment
is added by `layout/phases.py`. Allocator waste and the framework itself are not counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any, TypeVar

from hpctrain.config.schema import ModelConfig, Operation, RunConfig
from hpctrain.layout.activations import COMPUTE_BYTES, OURS, Activations, Keeps, activations
from hpctrain.layout.alive import alive
from hpctrain.layout.buffers import NO_UNITS, Units
from hpctrain.layout.layout import Layout
from hpctrain.layout.offload import USUAL, DiskRates, Elsewhere, elsewhere
from hpctrain.layout.parameters import Cut, ParameterSpec, parameter_specs
from hpctrain.layout.placement import DENSE, Index, place, tied_copy
from hpctrain.layout.recompute import forwards
from hpctrain.layout.schedule import ZERO_BUBBLE
from hpctrain.layout.shards import replicas_of
from hpctrain.layout.stages import Stage, stages, stages_of
from hpctrain.layout.transfers import most_received
from hpctrain.layout.units import in_gib

WEIGHTED: dict[tuple[Operation, ...], Cut] = {
    ("mlp",): "ffn",
    ("moe",): "experts",
    ("moe", "shared_experts"): "shared_ffn",
}
"""The operations with which weights are needed again, by what is cut of those."""

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
    buffers: int = 0
    building: int = 0
    host: int = 0
    disk: int = 0

    @property
    def training(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations + self.buffers

    @property
    def total(self) -> int:
        return max(self.training, self.building)

    def describe(self) -> str:
        """All parts in GiB."""
        parts = ("weights", "gradients", "optimizer", "activations", *(["buffers"] if self.buffers else []))
        text = ", ".join(f"{part} {in_gib(getattr(self, part))}" for part in parts) + " GiB"
        more = self.building > self.training
        text += f", and {in_gib(self.building)} GiB while it is built" if more else ""
        return text + (f", besides {in_gib(self.host)} GiB of host memory for what is offloaded" if self.host else "")


def estimate(config: RunConfig, layout: Layout, keeps: Keeps = OURS) -> Memory:
    """What the fullest rank of a layout needs, without buffers: what programs are compared by (`fits.needed` has
    ours)."""
    found = (memory_of(config, layout, of_rank, keeps) for of_rank in held_by(config, layout))
    return max(found, key=lambda memory: memory.total)


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

    @cached_property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(map(sum, self.parameters.values()))

    @cached_property
    def sizes(self) -> frozenset[int]:
        """Elements of its parameters, each number once."""
        return frozenset(chain.from_iterable(self.parameters.values()))

    @cached_property
    def kept(self) -> list[int]:
        """Elements of each parameter that the rank keeps."""
        return [-(-n // ranks) for ranks, sizes in self.parameters.items() for n in sizes]


def held_by(config: RunConfig, layout: Layout) -> list[Held]:
    """Of each place on pp, what its fullest rank holds."""
    model, made = config.model, stages(config.model, layout)
    homes = {layer: stage.home for stage in made for layer in stage.layers}
    of_place: list[list[ParameterSpec]] = [[] for _ in range(layout.pp)]
    for spec in parameter_specs(model):
        end = made[-1 if spec.output else 0].home
        of_place[end if spec.layer is None else homes[spec.layer]].append(spec)
    whole = made[0] is made[-1]
    return [_held(model, layout, layout.rank(pp=place), specs, whole) for place, specs in enumerate(of_place)]


def _held(model: ModelConfig, layout: Layout, rank: int, specs: Iterable[ParameterSpec], whole: bool) -> Held:
    """What a rank holds that has parts of these parameters; `whole`: one stage is all of the model."""
    mine = stages_of(model, layout, rank)
    alike: dict[object, tuple[Index, int]] = {}
    parameters: dict[int, list[int]] = {}
    together: dict[str, int] = {}
    frozen = packed = 0
    for spec in specs:
        if (key := (spec.shape, spec.cuts)) not in alike:  # layers are
            record = place(spec, model, layout, rank)
            alike[key] = record.local_shape, math.prod(layout.sizes(record.reduced_over))
        shape, ranks = alike[key]
        numel = math.prod(shape)
        unit = f"layer {spec.layer}" if spec.layer is not None else "last" if spec.output else "first"
        together[unit] = together.get(unit, 0) + numel
        if spec.trained:
            parameters.setdefault(ranks, []).append(numel)
        elif spec.block is not None:
            packed += packed_bytes(shape, spec.shape, spec.block)
        else:
            frozen += numel
    copy = tied_copy(model, layout, rank) if mine[-1].last else None
    copied = math.prod(copy.local_shape) if copy else 0
    gradient = copied if model.adapter is None else 0
    units = _units(model, together, whole)
    return Held(mine, parameters, 0 if mine[0].first else copied, gradient, frozen, packed, units)


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
    """What a rank needs that holds so much, without buffers."""
    activations = live_activations(config, layout, of_rank.stages, keeps)
    return replace(state_of(config, layout, of_rank, keeps), activations=activations)


def state_of(config: RunConfig, layout: Layout, of_rank: Held, keeps: Keeps) -> Memory:
    """The same without activations."""
    held = of_rank.parameters
    compute = COMPUTE_BYTES[config.train.precision]
    master = max(compute, 4)
    stage = config.sharding.stage if config.engine == "deepspeed" else 0
    numel = of_rank.numel
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
    away = elsewhere(config, of_rank.kept, weights, gradients, optimizer)
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
    return Memory(weights, gradients, optimizer, 0, building=building, host=away.host, disk=away.disk)


def away_of(config: RunConfig, layout: Layout, disk: DiskRates = USUAL, host: int = 1 << 62) -> Elsewhere:
    """What the rank that holds most has away from its device, and what of it moves in a step.

    Args:
        disk: as measured.
        host: bytes of memory that a rank may use there.
    """
    most = max(held_by(config, layout), key=lambda of_rank: sum(of_rank.kept))
    again = weights_again(config, most.stages)
    return elsewhere(config, most.kept, 0, 0, 0, micro_batches_of(config, layout), disk, host, again)


def weights_again(config: RunConfig, held: Iterable[Stage]) -> float:
    """Share of the weights of some stages' layers that are needed once more, because their forward runs again."""
    runs: dict[tuple[Operation, ...], dict[int, int]] = {part: {} for part in ((), *WEIGHTED)}
    for part, of_layer in runs.items():
        for stage in held:
            of_layer |= forwards(config.train, stage.layers, part)
    layers, all_of_them, again = runs[()], 0, 0
    for spec in parameter_specs(config.model):
        if spec.layer in layers:
            part = next((part for part, cut in WEIGHTED.items() if cut in spec.cuts), ())
            all_of_them += spec.numel
            again += spec.numel * (runs[part][spec.layer] - 1)
    return again / max(1, all_of_them)


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
    sizes = [activations(config, layout, stage, keeps) for stage in stages]
    besides = [size.passing + spread(layout, size) for size in sizes]
    peak = max(
        moment.kept(sizes) + (0 if moment.forward else besides[moment.chunk])
        for moment in alive(layout, micro_batches_of(config, layout), stages[0].home)
    )
    return peak + most_received(layout.pp, layout.chunks) * sizes[0].handed


def spread(layout: Layout, size: Activations) -> int:
    """Bytes by which a stage's activations become more in the first part of a split backward."""
    return max(0, size.left - size.kept) if layout.schedule in ZERO_BUBBLE else 0


def micro_batches_of(config: RunConfig, layout: Layout) -> int:
    """Of a step, on a rank."""
    return max(1, config.train.global_batch // (layout.dp * config.train.micro_batch))
