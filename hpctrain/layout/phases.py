"""Bytes that a rank holds in each phase of a step, by what they are for. Plain arithmetic, no torch.

State is that of `layout/memory.py`, activations are those of `layout/activations.py`; here they are put together over
the rank's list of the schedule, and what is there for a moment is added: a chunk of the loss, weights that ZeRO 3 and
FSDP2 have gathered, buckets on their way, parts of the sequence that sp gathers, hidden states that stages receive.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from hpctrain.config.schema import RunConfig
from hpctrain.layout.activations import COMPUTE_BYTES, OURS, Activations, Keeps, activations
from hpctrain.layout.layout import Layout
from hpctrain.layout.memory import Held, Memory, away_of, held_by, memory_of, schedule_of
from hpctrain.layout.parameters import largest_unit
from hpctrain.layout.placement import cut_of
from hpctrain.layout.schedule import ZERO_BUBBLE
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
    buffers = _Buffers(config, layout, held, memory)
    forward, backward = _moments(config, layout, held, keeps, rest, buffers)
    return OfRank(
        rank,
        {
            "start": replace(rest, gradients=0) if made_anew(config) else rest,
            "forward": forward,
            "backward": backward,
            "step": replace(rest, buffers=buffers.in_step),
        },
    )


def made_anew(config: RunConfig) -> bool:
    """Whether gradients are let go when a step ends: by ZeRO 1 and 2."""
    return config.engine == "deepspeed" and config.sharding.stage < 3


class _Buffers:
    """What is there for a moment besides activations, bytes."""

    def __init__(self, config: RunConfig, layout: Layout, held: Held, memory: Memory) -> None:
        self.width = COMPUTE_BYTES[config.train.precision]
        self.master = max(self.width, 4)
        model, tokens = config.model, config.train.micro_batch * config.data.seq / layout.cp
        sizes = [n for sizes in held.parameters.values() for n in sizes]
        largest, trained = max(sizes, default=0), sum(sizes)
        layer = max((n for n in sizes if n != model.vocab * model.hidden // layout.tp), default=0)
        self.of_gradient = self.width * layer  # of a weight, on its way to where gradients are summed
        self.entering = 0
        if layout.sp:  # the whole sequence, in parts and put together
            self.entering = round(2 * tokens * model.hidden * self.width)
        self.flowing = round(tokens * self.width * (2 * model.hidden + 2 * cut_of(model, "ffn", layout.tp, 0)[1]))
        unit = largest_unit(model, layout.tp)
        self.gathered = self.scattered = 0
        self.in_step = 2 * self.master * largest  # AdamW's temporaries
        if config.engine == "fsdp":
            ahead = config.sharding.prefetch
            gathered = 0 if not config.sharding.reshard_after_forward else unit * self.width
            self.gathered = (1 + ahead) * gathered + unit * self.width
            self.scattered = unit * self.master + unit * self.width
            self.in_step = 2 * memory.optimizer  # AdamW's temporaries, of all parameters at once
        elif config.engine == "deepspeed":
            stage, bucket = config.sharding.stage, round(min(config.sharding.bucket_mib * MIB, self.master * trained))
            part = memory.optimizer // 3  # master weights, of which and of both moments it is
            if stage == 3:  # its limit of what is gathered at once; AdamW works on one flat tensor
                self.gathered = 2 * unit * self.width
            self.gathered += bucket * (stage != 2)
            copies = 3 if stage < 3 and self.width < self.master else 4
            self.in_step = max(0, copies * part - memory.gradients) + bucket * (stage == 3)


def _moments(
    config: RunConfig, layout: Layout, held: Held, keeps: Keeps, rest: Parts, buffers: _Buffers
) -> tuple[Parts, Parts]:
    """The fullest moments of forwards and of backwards over the rank's list."""
    micro_batches = config.train.global_batch // (layout.dp * config.train.micro_batch)
    schedule = schedule_of(layout.schedule, layout.pp, layout.chunks, max(1, micro_batches))
    sizes = {stage.index: activations(config, layout, stage, keeps) for stage in held.stages}
    splits = layout.schedule in ZERO_BUBBLE
    received = most_received(layout.pp, layout.chunks) * sizes[held.stages[0].index].handed
    empty = replace(rest, buffers=received + buffers.gathered)
    forward = backward = empty
    live = logits = 0
    for action in schedule.ranks[held.stages[0].home]:
        size = sizes[action.stage]
        left = size.left if splits else 0
        if action.kind == "forward":
            live, logits = live + size.kept - size.logits, logits + size.logits
            now = _with(empty, live, logits + size.chunk, buffers.entering)
            forward = max(forward, now, key=lambda parts: parts.device)
        elif action.kind == "backward_weight":
            live -= left
        else:
            for now in _in_backward(size, empty, live, logits, buffers):
                backward = max(backward, now, key=lambda parts: parts.device)
            live += (left if action.kind == "backward_input" else 0) - size.kept + size.logits
            logits -= size.logits
    return forward, backward


def _in_backward(size: Activations, empty: Parts, live: int, logits: int, buffers: _Buffers) -> tuple[Parts, Parts]:
    """While the loss is differentiated; and while a layer is, computed again first, when logits are gone."""
    again = size.passing - size.of_loss + buffers.flowing
    more = buffers.entering + buffers.scattered + buffers.of_gradient
    return (
        _with(empty, live, logits + size.of_loss + size.chunk, 0),
        _with(empty, live + again, logits - size.logits, more),
    )


def _with(empty: Parts, activations: int, logits: int, buffers: int) -> Parts:
    return replace(empty, activations=activations, logits=logits, buffers=empty.buffers + buffers)
