"""Bytes that a rank holds in each phase of a step, by what they are for. Plain arithmetic, no torch.

State is that of `layout/memory.py`, activations are those of `layout/activations.py`; here they are put together at the
moments of the rank's list (`layout/alive.py`), and what is there for a moment is added: a chunk of the loss, weights
that ZeRO 3 and FSDP2 have gathered, buckets on their way, parts of the sequence that sp gathers, hidden states that
stages receive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

from hpctrain.config.schema import RunConfig
from hpctrain.layout.activations import COMPUTE_BYTES, OURS, Activations, Keeps, activations, inner_columns
from hpctrain.layout.alive import Alive, alive
from hpctrain.layout.buffers import Moving, OfFsdp, Plain, of_zero
from hpctrain.layout.layout import Layout
from hpctrain.layout.memory import Held, Memory, away_of, held_by, micro_batches_of, spread, state_of
from hpctrain.layout.parameters import largest_unit
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
    memory = state_of(config, layout, held, keeps)
    pinned = away_of(config, layout).pinned if memory.host else 0
    return OfRank(rank, in_phases(config, layout, held, memory, keeps, pinned))


def in_phases(
    config: RunConfig, layout: Layout, held: Held, memory: Memory, keeps: Keeps, pinned: int = 0
) -> dict[str, Parts]:
    """By phase, what a rank holds.

    Args:
        held: by the rank.
        memory: its state.
        pinned: of its host memory.
    """
    rest = Parts(memory.weights, memory.gradients, memory.optimizer, host=memory.host, pinned=pinned, disk=memory.disk)
    moving = _moving(config, layout, held, memory, keeps)
    forward, backward = _fullest_moments(config, layout, held, keeps, rest, moving)
    outside = rest
    if config.engine == "fsdp" and not config.sharding.offload.state:  # of each only the rank's part is there
        whole = 0 if config.sharding.reshard_after_forward else COMPUTE_BYTES[config.train.precision] * held.numel
        outside = replace(rest, weights=memory.weights - whole, gradients=memory.optimizer // 2)
    return {
        "start": replace(outside, gradients=0) if made_anew(config) else outside,
        "forward": forward,
        "backward": backward,
        "step": replace(outside, buffers=moving.in_step),
    }


def made_anew(config: RunConfig) -> bool:
    """Whether gradients are let go when a step ends: by ZeRO 1 and 2."""
    return config.engine == "deepspeed" and config.sharding.stage < 3


def _moving(config: RunConfig, layout: Layout, held: Held, memory: Memory, keeps: Keeps) -> Moving:
    """What the engine of a run moves on a rank.

    While it updates, torch's AdamW makes two temporaries of a parameter on a CPU; on a GPU one, but of all parameters
    together (`foreach`). DeepSpeed's kernel makes none.
    """
    width = COMPUTE_BYTES[config.train.precision]
    master, largest = max(width, 4), max(held.sizes, default=0)
    if config.engine == "fsdp":
        ranks = layout.dp * layout.cp
        ranks //= replicas_of(config.sharding.replicas, ranks)
        shard = 0 if config.sharding.offload.state else memory.optimizer // 2
        updating = shard if keeps.streams else 2 * master * largest // ranks
        number = micro_batches_of(config, layout)
        return OfFsdp(config, held.units, shard, updating, ranks, keeps.streams, number)
    layer = max((n for n in held.sizes if n != config.model.vocab * config.model.hidden // layout.tp), default=0)
    if config.engine == "deepspeed":
        bucket = round(min(config.sharding.bucket_mib * MIB, master * held.numel))
        unit, part = largest_unit(config.model, layout.tp), memory.optimizer // 3
        temporaries = 2 - keeps.streams if config.sharding.torch_adam else 0
        there, in_step = of_zero(config.sharding.stage, width, bucket, unit, part, memory.gradients, temporaries)
    elif keeps.streams:
        there, in_step = 0, master * held.numel
    else:
        swapped = master * sum(held.parameters.get(2, []))  # two ranks' gradients, over gloo
        there, in_step = 0, max(2 * master * largest, swapped)
    return Plain(memory.gradients, there, width * layer, in_step)


class _Beside(NamedTuple):
    """Bytes beside what waits for a backward: of activations and of logits there may be fewer."""

    activations: int
    logits: int
    buffers: int

    def of_activations(self) -> int:
        """Without buffers."""
        return self.activations + self.logits


def _fullest_moments(
    config: RunConfig, layout: Layout, held: Held, keeps: Keeps, rest: Parts, moving: Moving
) -> tuple[Parts, Parts]:
    """The fullest moments of forwards and of backwards over the rank's list."""
    sizes = [activations(config, layout, stage, keeps) for stage in held.stages]
    received = most_received(layout.pp, layout.chunks) * sizes[0].handed
    found: dict[bool, tuple[int, Alive, _Beside]] = {}
    for moment, beside in _moments(config, layout, held, sizes, moving, sum):
        total = moment.kept(sizes) + moving.kept(moment.backwards) + sum(beside)
        if moment.forward not in found or total > found[moment.forward][0]:
            found[moment.forward] = total, moment, beside

    def parts(moment: Alive, beside: _Beside) -> Parts:
        logits = moment.logits(sizes)
        return replace(
            rest,
            gradients=moving.kept(moment.backwards),
            activations=moment.kept(sizes) - logits + beside.activations,
            logits=logits + beside.logits,
            buffers=received + beside.buffers,
        )

    return parts(*found[True][1:]), parts(*found[False][1:])


def most_activations(config: RunConfig, layout: Layout, held: Held, keeps: Keeps) -> int:
    """Most bytes of activations and logits that a rank has at a time."""
    sizes = [activations(config, layout, stage, keeps) for stage in held.stages]
    moving = _moving(config, layout, held, state_of(config, layout, held, keeps), keeps)
    moments = _moments(config, layout, held, sizes, moving, _Beside.of_activations)
    return max(moment.kept(sizes) + beside.of_activations() for moment, beside in moments)


def _moments(
    config: RunConfig,
    layout: Layout,
    held: Held,
    sizes: Sequence[Activations],
    moving: Moving,
    size_of: Callable[[_Beside], int],
) -> Iterator[tuple[Alive, _Beside]]:
    """What waits on a rank at a time, and the most there is beside it by some measure."""
    most: dict[tuple[bool, int, bool, Activations, int], _Beside] = {}  # chunks are mostly alike
    for moment in alive(layout, micro_batches_of(config, layout), held.stages[0].home):
        stage, size = held.stages[moment.chunk], sizes[moment.chunk]
        alike = moment.forward, len(stage.layers), stage.last, size, moment.backwards
        if alike not in most:
            of_kind = _of_forward if moment.forward else _of_backward
            most[alike] = max(of_kind(config, layout, stage, size, moving, moment.backwards), key=size_of)
        yield moment, most[alike]


def _of_forward(
    config: RunConfig, layout: Layout, stage: Stage, size: Activations, moving: Moving, backwards: int
) -> Iterator[_Beside]:
    """Moments of a forward: the loss, and layers, whose logits are yet to come."""
    here, layers = entering(config, layout) + moving.waiting(backwards), len(stage.layers)
    if stage.last:
        yield _Beside(0, size.chunk, moving.at_loss() + here)
    for gone, more in moving.forward(layers, stage.last):
        there = (size.working[-1 - gone] if layers else 0) - _of_last(size, gone)
        yield _Beside(there, -size.logits, more + here)


def _of_backward(
    config: RunConfig, layout: Layout, stage: Stage, size: Activations, moving: Moving, backwards: int
) -> Iterator[_Beside]:
    """Moments of a backward: the loss, and layers, computed again where they are, whose logits are gone."""
    if stage.last:
        yield _Beside(0, size.of_loss + size.chunk, moving.at_loss())
    layers = len(stage.layers)
    for gone, more in moving.backward(layers, stage.last, backwards):
        there = spread(layout, size) - _of_last(size, gone)
        if gone < layers:
            routed = config.model.routed(stage.layers[-1 - gone])
            there += size.again[-1 - gone] + flowing(config, layout, stage.last, routed)
        yield _Beside(there, -size.logits, more + entering(config, layout))


def _of_last(size: Activations, number: int) -> int:
    """Bytes kept of so many layers at the end of a stage. What is kept beside layers is shared out among them."""
    last = sum(size.layers[len(size.layers) - number :])
    return (size.kept - size.logits) * last // max(1, sum(size.layers))


def entering(config: RunConfig, layout: Layout) -> int:
    """Bytes of a whole sequence, in the parts that sp gathers and put together."""
    tokens = config.train.micro_batch * config.data.seq / layout.cp
    return round(2 * tokens * config.model.hidden * COMPUTE_BYTES[config.train.precision]) if layout.sp else 0


def flowing(config: RunConfig, layout: Layout, last: bool, routed: bool) -> int:
    """Bytes of the gradients of activations that a layer's backward works with: that of its output, which stages but
    the last receive, and of its MLP."""
    model, tokens = config.model, config.train.micro_batch * config.data.seq / layout.cp
    of_token = last * model.hidden + (2 if model.gated else 1) * inner_columns(config, layout, routed)
    return round(tokens * COMPUTE_BYTES[config.train.precision] * of_token)
