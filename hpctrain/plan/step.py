"""A whole optimizer step: its time, what that is made of, and what bounds it. Vectorised over layouts.

Two ways to the time of the pipeline share everything else: a formula (`screen`), and playing the runtime's own schedule
(`played`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import numpy as np

from hpctrain.config.schema import ModelConfig
from hpctrain.layout.parameters import parameter_specs
from hpctrain.layout.stages import Stage
from hpctrain.plan.by_module import Seconds, of_layer, seconds
from hpctrain.plan.gemm import Array
from hpctrain.plan.layer import Cost, first, hidden_part, last, layer
from hpctrain.plan.links import Machine
from hpctrain.plan.work import NAMES, ByModule, Phase, Points, Work

PARTS = ("compute", "tp", "cp", "ep", "pp bubble", "pp sends", "dp", "shard", "optimizer", "offload")
"""What a step's time is made of, in the order of tables."""

ADAM_BYTES = 34.0
"""Bytes that AdamW moves for an element: float32 weight, two moments read and written, its gradient read twice (norm,
update), the half-precision weight written."""


@dataclass(frozen=True)
class Blocks:
    """What the parts of the model cost a rank for a micro-batch, and how many elements they have that are trained."""

    dense: Cost
    routed: Cost | None
    first: Cost
    last: Cost
    numel_dense: Array
    numel_routed: Array
    numel_ends: Array
    numel_expert: Array


Kind = Literal["trained", "frozen", "packed"]
"""Of parameters: beside adapters all others are frozen, and packed where they are in 4 bits."""


@cache
def numels(model: ModelConfig, kind: Kind = "trained") -> dict[str, int]:
    """Elements of a kind: of a dense layer's parameters, of a routed layer's without its experts, of its experts, and
    of embedding and head."""
    out = {"dense": 0, "routed": 0, "experts": 0, "ends": 0}
    routed = next((i for i in range(model.layers) if model.routed(i)), None)
    plain = next((i for i in range(model.layers) if not model.routed(i)), None)
    for spec in parameter_specs(model):
        if kind != ("trained" if spec.trained else "packed" if spec.block else "frozen"):
            continue
        if spec.layer is None:
            out["ends"] += spec.numel
        elif spec.layer == plain:
            out["dense"] += spec.numel
        elif spec.layer == routed:
            out["experts" if "experts" in spec.cuts else "routed"] += spec.numel
    return out


def blocks(machine: Machine, work: Work, points: Points) -> Blocks:
    """See `Blocks`."""
    model, count = work.model, numels(work.model)
    return Blocks(
        layer(machine, work, points, False),
        layer(machine, work, points, True) if model.moe else None,
        first(machine, work, points),
        last(machine, work, points),
        count["dense"] / points.tp,
        count["routed"] / points.tp,
        count["ends"] / points.tp,
        count["experts"] / (points.ep * points.etp),
    )


def zero3(machine: Machine, work: Work, points: Points, numel: Array, cost: Cost) -> tuple[Array, Array]:
    """What gathering a layer's weights and reducing its gradients adds to a micro-batch, forward and backward.

    Weights are gathered before forward, and again before backward if they were let go, beside the layer before: three
    times the weights in all (ZeRO, arXiv 1910.02054, section 7).
    """
    runtime = work.runtime
    machine = machine.of_one_port() if runtime.one_port else machine
    group = machine.group(points.dp * points.cp, points.tp)
    copies = group.size * machine.gap * runtime.lists

    def gather(elements: Array) -> Array:
        return machine.collective("all_gather", elements * work.weight_width / group.size, group) + copies

    def reduce(elements: Array) -> Array:
        return machine.collective("reduce_scatter", elements * runtime.reduce_bytes, group) + copies

    on = (points.stage == 3) & (group.size > 1)
    if runtime.by_module:
        forward, backward = _by_module(work, runtime.by_module, points, cost, gather, reduce)
    else:
        times, share = runtime.gathers, machine.busy(group)
        once = times * gather(numel / times)
        both = once * (points.reshard == 1) + times * reduce(numel / times)
        forward = hidden_part(once, cost.forward.total, share)
        backward = hidden_part(both, cost.backward.total, share)
    return np.where(on, forward, 0.0), np.where(on, backward, 0.0)


def _by_module(
    work: Work, rules: ByModule, points: Points, cost: Cost, gather: Seconds, reduce: Seconds
) -> tuple[Array, Array]:
    """The same, module by module."""
    (tp,), (again,) = np.unique(points.tp), np.unique(points.recompute == 2)
    back = cost.backward + cost.forward * -float(again)
    there, returning = (of_layer(work.model, int(tp), phase) for phase in (cost.forward, back))
    forward, backward = seconds(there, returning, rules, gather, reduce, bool(again))
    return forward - cost.forward.compute, backward - cost.backward.compute


@dataclass(frozen=True)
class Exchange:
    """Once a step over ranks that hold the same parameters: seconds of reducing gradients and of gathering the weights
    that ZeRO updated; of both the part that has nothing to run beside, the last that is reduced and the first that is
    gathered; and the share of a device that they take."""

    summed: Array
    gathered: Array
    alone: Array
    share: Array

    def __add__(self, other: Exchange) -> Exchange:
        """One after the other."""
        whole, mine = self.summed + other.summed, self.summed / np.maximum(self.summed + other.summed, 1e-12)

        def mean(one: Array, two: Array) -> Array:
            return one * mine + two * (1 - mine)

        gathered = self.gathered + other.gathered
        return Exchange(whole, gathered, mean(self.alone, other.alone), mean(self.share, other.share))


def exchanged(machine: Machine, work: Work, points: Points, numel: Array, alone: Array, over: str) -> Exchange:
    """That of `numel` elements of a rank.

    Args:
        alone: of these, elements that are reduced last.
        over: dp, or edp of experts.
    """
    if over == "dp":
        group = machine.group(points.dp * points.cp, points.tp)
    else:
        edp = points.dp * points.cp * points.tp // (points.ep * points.etp)
        group = machine.group(edp, points.ep * points.etp)
    size, stage = numel * work.runtime.reduce_bytes, points.stage
    summed = machine.collective("all_reduce", size, group)
    if work.runtime.scattered:
        summed = np.where(stage > 0, machine.collective("reduce_scatter", size, group), summed)
    rounds = np.where((stage == 2) & (not work.runtime.scattered), points.micro_batches(work), 1)
    gathered = machine.collective("all_gather", numel * work.weight_width / np.maximum(1, group.size), group)
    sharded = (stage == 1) | (stage == 2)
    return Exchange(
        np.where(stage < 3, summed * rounds, 0.0),
        np.where(sharded, gathered, 0.0),
        np.minimum(1.0, alone / np.maximum(numel, 1)),
        machine.busy(group),
    )


def optimizer(machine: Machine, work: Work, points: Points, numel: Array, expert: Array) -> tuple[Array, Array]:
    """Seconds of the update on the device, and of update and traffic where state is kept elsewhere."""
    edp = points.dp * points.cp * points.tp // (points.ep * points.etp)
    shard = points.stage > 0
    mine = numel / np.where(shard, points.dp * points.cp, 1) + expert / np.where(shard, edp, 1)
    on_device = mine * ADAM_BYTES / machine.device(work.dtype).bandwidth
    host, devices = machine.hardware.host, machine.hardware.host.devices
    moved = mine * (4 + work.width) / host.pcie_bandwidth.value
    on_host = np.maximum(moved, mine * ADAM_BYTES / (host.memory_bandwidth.value / devices))
    disk = mine * 12 * devices * (1 / host.nvme_read.value + 1 / host.nvme_write.value)
    away = np.where(points.offload == 2, on_host + disk, on_host)
    return np.where(points.offload == 0, on_device, 0.0), np.where(points.offload > 0, away, 0.0)


def sends(machine: Machine, work: Work, points: Points) -> tuple[Array, Array]:
    """Seconds from the end of a stage's work to when the next has it: in one domain, and in another."""
    size = points.micro_batch * work.seq / points.cp * work.model.hidden * work.width
    parted = (points.sp == 1) | work.runtime.scatter_sends
    near, far = (machine.send(size / np.where(parted, points.tp, 1), away) for away in (False, True))
    if work.runtime.scatter_sends:
        group = machine.group(points.tp, np.ones_like(points.tp))
        more = np.where(points.sp == 1, 0.0, machine.collective("all_gather", size / points.tp, group))
        near, far = near + more, far + more
    return np.where(points.pp > 1, near, 0.0), np.where(points.pp > 1, far, 0.0)


def crossed(ranks: Array, pp: int, domain: int) -> list[Array]:
    """Whether a pipeline leaves a domain between ranks i and i + 1 of it, and last between its last and its first:
    one of a stage's `ranks` does, and the others wait for that."""
    between = [((i + 2) * ranks - 1) // domain > i * ranks // domain for i in range(pp - 1)]
    return [*between, pp * ranks > domain]


def blocked(schedule: str, ways: Sequence[Array], rank: int) -> tuple[Array, Array]:
    """Seconds that a rank which waits for its sends waits after a forward and after a backward."""
    pp = len(ways)
    if schedule == "interleaved":
        return ways[rank], ways[rank - 1]
    return ways[min(rank, pp - 2)], ways[max(rank - 1, 0)]


@dataclass(frozen=True)
class Price:
    """Seconds of a step, by part.

    Attributes:
        parts: by `PARTS`; their sum is the time.
        detail: of compute: matmul, attention, pointwise.
    """

    parts: Mapping[str, Array]
    detail: Mapping[str, Array]

    @property
    def time(self) -> Array:
        return sum(self.parts.values())

    def bound(self, index: int = 0) -> str:
        """What a step spends most on, in words."""
        parts = {name: float(np.atleast_1d(value)[index]) for name, value in {**self.parts, **self.detail}.items()}
        parts.pop("compute", None)
        return max(parts, key=lambda name: parts[name])

    def at(self, index: int) -> dict[str, float]:
        """The parts of one of many."""
        return {name: float(np.atleast_1d(value)[index]) for name, value in self.parts.items()}


def deferred(work: Work, pp: int, number: Array, last: Cost) -> tuple[Cost, Array]:
    """What the ends of the model cost the last stage for a micro-batch where some gradients of the head's weight wait
    until the pipeline drains, and the seconds of those that wait."""
    if not work.runtime.defers or pp == 1:
        return last, 0.0 * number
    share = np.minimum(work.runtime.defers / number, 1.0)
    waiting = last.backward_weight.total * share * number
    return replace(last, backward_weight=last.backward_weight * (1 - share)), waiting


def drained(done: Array, waiting: Array, backward: Sequence[Array], pp: int) -> Array:
    """When all is done, gradients that wait included: the last rank works on them from its last micro-batch on, while
    that goes back through the first stages of the ranks before."""
    drain = sum(backward[: pp - 1])
    return np.maximum(done, done - drain + waiting)


def stage_cost(stage: Stage, cost: Blocks, model: ModelConfig, extra: tuple[Array, Array]) -> Cost:
    """What a virtual stage costs a rank for a micro-batch, with what ZeRO 3 adds to each layer."""
    routed = sum(map(model.routed, stage.layers))
    dense = len(stage.layers) - routed
    parts = [(cost.dense, dense)] + ([(cost.routed, routed)] if cost.routed else [])
    parts += [(cost.first, int(stage.first)), (cost.last, int(stage.last))]
    fore = back = weights = Phase()
    for of, times in parts:
        if of is not None and times:
            fore, back, weights = (
                fore + of.forward * times,
                back + of.backward_input * times,
                weights + of.backward_weight * times,
            )
    layers = len(stage.layers)
    return Cost(
        fore.with_(shard=fore.shard + extra[0] * layers), back.with_(shard=back.shard + extra[1] * layers), weights
    )


def everything_else(
    machine: Machine, work: Work, points: Points, cost: Blocks, layers: Array, backward: Array
) -> dict[str, Array]:
    """Parts of a step that no micro-batch has: on the rank that has `layers` layers and an end of the model, whose last
    micro-batch's backward takes `backward` seconds.

    Gradients are whole after the last micro-batch. Of interleaved chunks all but one have had it a group of
    micro-batches before the end, or more. Gradients that are last, of the embedding and of the layers that are reduced
    with it, have nothing to be reduced beside, and their weights nothing to be gathered beside.
    """
    runtime, interleaved = work.runtime, points.schedule == NAMES.index("interleaved")
    chunks = np.where(interleaved, points.chunks, 1)
    whole = interleaved & runtime.whole_chunks
    beside = backward * (1 + (points.pp - 1) * (chunks - 1) / chunks - whole / chunks)
    share = sum(map(work.model.routed, range(work.model.layers))) / work.model.layers
    ends = cost.numel_ends / np.where((points.pp == 1) | work.model.tied, 1, 2)  # embedding, or head
    own = layers * ((1 - share) * cost.numel_dense + share * cost.numel_routed)
    embedding = cost.numel_ends / (1 if work.model.tied else 2)

    def last(numel: Array) -> Array:
        return np.where(whole, numel / chunks, np.minimum(numel, runtime.bucket))

    done = exchanged(machine, work, points, own + ends, last(own) + embedding, "dp")
    if work.model.moe:
        expert = layers * share * cost.numel_expert
        done = done + exchanged(machine, work, points, expert, last(expert), "edp")
    on_device, away = optimizer(machine, work, points, own + ends, expert if work.model.moe else 0.0)
    summed, gathered = done.summed, done.gathered
    if runtime.dp_overlap:
        summed = partly_hidden(summed, beside, summed * done.alone, done.share)
    if runtime.gather_overlap:
        update = np.minimum(gathered * done.alone, whole * on_device * (1 - 1 / chunks))  # of the other chunks
        gathered = partly_hidden(gathered, beside / 2 + update, gathered * done.alone - update, done.share)
    if work.model.tied and work.model.adapter is None:  # both ends hold the embedding and sum its gradient
        pair = machine.group(np.where(points.pp > 1, 2, 1), points.tp * points.cp * points.dp)
        summed = summed + machine.collective("all_reduce", ends * runtime.reduce_bytes, pair)
    return {"dp": summed + gathered, "optimizer": on_device, "offload": away}


def partly_hidden(time: Array, beside: Array, alone: Array, share: Array) -> Array:
    """`hidden_part` of communication of which so many seconds have nothing to run beside."""
    shown = np.maximum(alone, time - beside)
    return shown + share * (time - shown)
