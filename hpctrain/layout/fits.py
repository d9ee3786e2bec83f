"""Whether a run fits: the fullest phase of its fullest rank against what a rank may use, and what would fit instead.

Pure; the figure is that of `hpctrain memory`, and what else is held while the engine is built.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hpctrain.config.schema import OffloadConfig, RunConfig, TrainConfig
from hpctrain.errors import ConfigError
from hpctrain.layout.activations import ON_CPU, OURS, Keeps
from hpctrain.layout.context import misfit
from hpctrain.layout.layout import Layout
from hpctrain.layout.memory import Held, Memory, held_by, state_of
from hpctrain.layout.phases import in_phases
from hpctrain.layout.placement import tp_sizes, zero_misfit
from hpctrain.layout.schedule import ZERO_BUBBLE
from hpctrain.layout.units import in_gib

MEMORY = "memory"
"""What a refusal is about that is not a setting."""


def needed(config: RunConfig, layout: Layout, keeps: Keeps = OURS) -> Memory:
    """What the fullest rank needs in its fullest phase, buffers too; logits are of its activations."""
    return _fullest(config, layout, held_by(config, layout), keeps)


def _fullest(config: RunConfig, layout: Layout, held: Sequence[Held], keeps: Keeps) -> Memory:
    return max((_of_rank(config, layout, of_rank, keeps) for of_rank in held), key=lambda memory: memory.total)


def _of_rank(config: RunConfig, layout: Layout, held: Held, keeps: Keeps) -> Memory:
    state = state_of(config, layout, held, keeps)
    most = max(in_phases(config, layout, held, state, keeps).values(), key=lambda parts: parts.device)
    return replace(
        state,
        weights=most.weights,
        gradients=most.gradients,
        optimizer=most.optimizer,
        activations=most.activations + most.logits,
        buffers=most.buffers,
    )


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

    @property
    def keeps(self) -> Keeps:
        """What a rank keeps on that device, which is a CPU where it is the host."""
        return ON_CPU if self.host is None else OURS

    def holds(self, need: Memory) -> bool:
        """Whether it is enough."""
        return not self.lack(need)

    def lack(self, need: Memory) -> str:
        """What there is too little of, in words; empty where there is enough."""
        here = need.total + (need.host if self.host is None else 0)
        if here > self.device:
            return f"more than the {in_gib(self.device)} GiB that a rank has; needed are {need.describe()}"
        if self.host is not None and need.host > self.host:
            more = f"more than the {in_gib(self.host)} GiB of host memory that a rank may use"
            return f"{more}; needed are {need.describe()}"
        if self.disk is not None and need.disk > self.disk:
            return (
                f"{in_gib(need.disk)} GiB of them on the disk, more than the {in_gib(self.disk)} GiB that a rank finds "
                f"free there"
            )
        return ""


def check_memory(config: RunConfig, layout: Layout, available: int | Room) -> None:
    """Refuse a run that cannot fit.

    Args:
        available: what one rank may use; a number is of bytes where device and host are one.

    Raises:
        ConfigError: more is needed; says what would fit.
    """
    room = available if isinstance(available, Room) else Room(available)
    need = needed(config, layout, room.keeps)
    reason = room.lack(need)
    if not reason:
        return
    mildest: dict[tuple[str, ...], dict[str, int | str]] = {}
    for changes in _alternatives(config, layout, room):
        mildest.setdefault(tuple(changes), changes)
    fewest = min(map(len, mildest), default=0)
    names = [" ".join(f"{k}={v}" for k, v in c.items()) for c in mildest.values() if len(c) == fewest]
    fix = "use " + ", or ".join(names) if names else "use more ranks or a smaller model"
    raise ConfigError(MEMORY, f"{in_gib(need.total + need.host + need.disk)} GiB", reason, fix)


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
    (again, ops, every), here = config.train.recomputation, config.sharding.offload
    recomputes = dict.fromkeys((config.train.recomputation, ("full", TrainConfig().recompute_ops, 1)))
    places = [here, *(here.model_copy(update=away) for away in AWAY if not fixed and config.engine != "fsdp")]
    for resized in _resized(config, layout, ranks):
        held = held_by(config, resized)
        for away, s, (r, o, k), m in itertools.product(places, stages, recomputes, micros):
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
                    "train": config.train.recomputing(r, o, k).model_copy(update={"micro_batch": m}),
                }
            )
            if room.holds(_fullest(changed, resized, held, room.keeps)):
                values: dict[str, tuple[int | str, int | str]] = {
                    "train.micro_batch": (m, micro),
                    "train.recompute": (r, again),
                    "train.recompute_ops": (_written(o), _written(ops)),
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


def _written(operations: Sequence[str]) -> str:
    return f"[{','.join(operations)}]"


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
