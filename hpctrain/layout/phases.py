"""Bytes that a rank holds in each phase of a step, by what they are for. Plain arithmetic, no torch.

State is that of `layout/memory.py`, activations are those of `layout/activations.py`; here they are put together over
the rank's list of the schedule, and what is there for a moment is added: a chunk of the loss, weights that ZeRO 3 and
FSDP2 have gathered, buckets on their way, parts of the sequence that sp gathers, hidden states that stages receive.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from hpctrain.config.schema import RunConfig
from hpctrain.layout.activations import COMPUTE_BYTES, OURS, Activations, Keeps, activations
from hpctrain.layout.buffers import Moving, OfFsdp, Plain, of_zero
from hpctrain.layout.layout import Layout
from hpctrain.layout.memory import Held, Memory, away_of, held_by, memory_of, schedule_of
from hpctrain.layout.parameters import largest_unit
from hpctrain.layout.placement import cut_of
from hpctrain.layout.recompute import recomputed
from hpctrain.layout.schedule import ZERO_BUBBLE
from hpctrain.layout.shards import replicas_of
from hpctrain.layout.stages import Stage
from hpctrain.layout.transfers import most_received
from hpctrain.layout.units import MIB

PHASES = ("start", "forward", "backward", "step")
PARTS = ("weights", "gradients", "optimizer", "activations", "logits", "buffers")


@dataclass(frozen=True)
class Parts:
    """Bytes of a rank at one time: on its device, then of the host (`pinned` is of `host`), then on its disk."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    logits: int = 0
    buffers: int = 0
    host: int = 0
    pinned: int = 0
    disk: int = 0

    @property
    def device(self) -> int:
        return sum(getattr(self, part) for part in PARTS)

    def plain(self) -> dict[str, int]:
        """For JSON."""
        return {**asdict(self), "device": self.device}


@dataclass(frozen=True)
class OfRank:
    """One rank's bytes by phase.

    Attributes:
        rank: of the world.
        at: by phase, in the order of `PHASES`.
    """

    rank: int
    at: dict[str, Parts]

    @property
    def peak(self) -> int:
        return max(parts.device for parts in self.at.values())


def fullest(config: RunConfig, layout: Layout, keeps: Keeps = OURS) -> OfRank:
    """The rank with the highest peak; of those alike the first."""
    return max((phases(config, layout, layout.rank(pp=at), keeps) for at in range(layout.pp)), key=lambda r: r.peak)


def phases(config: RunConfig, layout: Layout, rank: int = 0, keeps: Keeps = OURS) -> OfRank:
    """What a rank holds.

    Args:
        rank: any; ranks of a place on pp hold alike, as far as sizes divide.
        keeps: what the program keeps there.
    """
    held = held_by(config, layout)[layout.coordinates(rank)["pp"]]
    memory = memory_of(config, layout, held, keeps)
    pinned = away_of(config, layout).pinned if memory.host else 0
    rest = Parts(memory.weights, memory.gradients, memory.optimizer, host=memory.host, pinned=pinned, disk=memory.disk)
    moving = _moving(config, layout, held, memory, keeps)
    forward, backward = _moments(config, layout, held, keeps, rest, moving)
    outside = rest
    if config.engine == "fsdp" and not config.sharding.offload.state:  # of each only the rank's part is there
        whole = 0 if config.sharding.reshard_after_forward else COMPUTE_BYTES[config.train.precision] * _trained(held)
        outside = replace(rest, weights=memory.weights - whole, gradients=memory.optimizer // 2)
    return OfRank(
        rank,
        {
            "start": replace(outside, gradients=0) if made_anew(config) else outside,
            "forward": forward,
            "backward": backward,
            "step": replace(outside, buffers=moving.in_step),
        },
    )


def made_anew(config: RunConfig) -> bool:
    """Whether gradients are let go when a step ends: by ZeRO 1 and 2."""
    return config.engine == "deepspeed" and config.sharding.stage < 3


def _moving(config: RunConfig, layout: Layout, held: Held, memory: Memory, keeps: Keeps) -> Moving:
    """What the engine of a run moves on a rank."""
    width = COMPUTE_BYTES[config.train.precision]
    sizes, master = [n for sizes in held.parameters.values() for n in sizes], max(width, 4)
    largest = max(sizes, default=0)
    if config.engine == "fsdp":
        ranks = layout.dp * layout.cp
        ranks //= replicas_of(config.sharding.replicas, ranks)
        shard = 0 if config.sharding.offload.state else memory.optimizer // 2
        number = _micro_batches(config, layout)
        return OfFsdp(config, held.units, shard, largest, ranks, keeps.streams, number)
    layer = max((n for n in sizes if n != config.model.vocab * config.model.hidden // layout.tp), default=0)
    swapped = 0 if keeps.streams else master * sum(held.parameters.get(2, []))  # two ranks' gradients, over gloo
    there, in_step = 0, max(2 * master * largest, swapped)  # AdamW's temporaries
    if config.engine == "deepspeed":
        bucket = round(min(config.sharding.bucket_mib * MIB, master * _trained(held)))
        unit, part = largest_unit(config.model, layout.tp), memory.optimizer // 3
        there, in_step = of_zero(config.sharding.stage, width, bucket, unit, part, memory.gradients)
    return Plain(memory.gradients, there, width * layer, in_step)


def _trained(held: Held) -> int:
    return sum(map(sum, held.parameters.values()))


def _micro_batches(config: RunConfig, layout: Layout) -> int:
    return max(1, config.train.global_batch // (layout.dp * config.train.micro_batch))


def _moments(
    config: RunConfig, layout: Layout, held: Held, keeps: Keeps, rest: Parts, moving: Moving
) -> tuple[Parts, Parts]:
    """The fullest moments of forwards and of backwards over the rank's list."""
    schedule = schedule_of(layout.schedule, layout.pp, layout.chunks, _micro_batches(config, layout))
    sizes = {stage.index: activations(config, layout, stage, keeps) for stage in held.stages}
    stages = {stage.index: stage for stage in held.stages}
    splits = layout.schedule in ZERO_BUBBLE
    received = most_received(layout.pp, layout.chunks) * sizes[held.stages[0].index].handed
    entering = _entering(config, layout)
    working = {stage.index: _working(config, layout, stage) for stage in held.stages}
    forward = backward = rest
    live = logits = backwards = 0
    for action in schedule.ranks[held.stages[0].home]:
        size, stage = sizes[action.stage], stages[action.stage]
        left = size.left if splits else 0
        empty = replace(rest, gradients=moving.kept(backwards), buffers=received)
        if action.kind == "forward":
            live, logits = live + size.kept - size.logits, logits + size.logits
            here = entering + moving.waiting(backwards)
            moments = [_with(empty, live, logits + size.chunk, moving.at_loss() + here)] if stage.last else []
            for gone, more in moving.forward(len(stage.layers), stage.last):
                there = live - _of_last(size, gone)
                if stage.layers:
                    there += working[stage.index][-1 - gone]
                moments.append(_with(empty, there, logits - size.logits, more + here))
            forward = max(forward, *moments, key=_device)
        elif action.kind == "backward_weight":
            live -= left
        else:
            moments = [_with(empty, live, logits + size.of_loss + size.chunk, moving.at_loss())] if stage.last else []
            logits -= size.logits
            flowing = _flowing(config, layout, stage.last)
            for gone, more in moving.backward(len(stage.layers), stage.last, backwards):
                there = live - _of_last(size, gone)
                if gone < len(stage.layers):
                    there += size.again[-1 - gone] + flowing
                moments.append(_with(empty, there, logits, more + entering))
            backward = max(backward, *moments, key=_device)
            backwards += 1
            live += (left if action.kind == "backward_input" else 0) - size.kept + size.logits
    return forward, backward


def _of_last(size: Activations, number: int) -> int:
    """Bytes kept of so many layers at the end of a stage. What is kept beside layers is shared out among them."""
    last = sum(size.layers[len(size.layers) - number :])
    return (size.kept - size.logits) * last // max(1, sum(size.layers))


def _entering(config: RunConfig, layout: Layout) -> int:
    """Bytes of a whole sequence, in the parts that sp gathers and put together."""
    tokens = config.train.micro_batch * config.data.seq / layout.cp
    return round(2 * tokens * config.model.hidden * COMPUTE_BYTES[config.train.precision]) if layout.sp else 0


def _flowing(config: RunConfig, layout: Layout, last: bool) -> int:
    """Bytes of the gradients of activations that a layer's backward works with: that of its output, which stages but
    the last receive, and of its MLP."""
    model, tokens = config.model, config.train.micro_batch * config.data.seq / layout.cp
    of_token = last * model.hidden + (2 if model.gated else 1) * cut_of(model, "ffn", layout.tp, 0)[1]
    return round(tokens * COMPUTE_BYTES[config.train.precision] * of_token)


def _working(config: RunConfig, layout: Layout, stage: Stage) -> list[int]:
    """Bytes that each layer's forward works with where it keeps none of them: two hidden states, and its MLP."""
    model, tokens = config.model, config.train.micro_batch * config.data.seq / layout.cp
    of_token = 2 * model.hidden + (4 if model.gated else 2) * cut_of(model, "ffn", layout.tp, 0)[1]
    size = round(tokens * COMPUTE_BYTES[config.train.precision] * of_token)
    return [size * (what == "full") for what in recomputed(config.train, stage.layers).values()]


def _device(parts: Parts) -> int:
    return parts.device


def _with(empty: Parts, activations: int, logits: int, buffers: int) -> Parts:
    return replace(empty, activations=activations, logits=logits, buffers=empty.buffers + buffers)
