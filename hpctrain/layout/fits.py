"""Whether a run fits: the fullest phase of its fullest rank against what a rank may use, and what would fit instead.

Pure; the figure is that of `hpctrain memory`, and what else is held while the engine is built.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from hpctrain.config.schema import OffloadConfig, ParallelConfig, RunConfig, TrainConfig
from hpctrain.errors import ConfigError
from hpctrain.layout.activations import ON_CPU, OURS, Keeps
from hpctrain.layout.layout import Layout, divisors
from hpctrain.layout.memory import Held, Memory, held_by, state_of
from hpctrain.layout.phases import in_phases
from hpctrain.layout.placement import tp_sizes
from hpctrain.layout.units import in_gib

MEMORY = "memory"
"""What a refusal is about that is not a setting."""

Rules = Callable[[RunConfig, int], None]
"""Rules of settings on so many ranks, from a floor above: `config.validate.validate`. Raises `ConfigError`."""


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
        return self.lack(need) is None

    def lack(self, need: Memory) -> tuple[int, str] | None:
        """Bytes that are more than there are of their kind, and that in words; None where there is enough."""
        here = need.total + (need.host if self.host is None else 0)
        if here > self.device:
            return here, f"more than the {in_gib(self.device)} GiB that a rank has; needed are {need.describe()}"
        if self.host is not None and need.host > self.host:
            more = f"more than the {in_gib(self.host)} GiB of host memory that a rank may use"
            return need.host, f"{more}; needed are {need.describe()}"
        if self.disk is not None and need.disk > self.disk:
            return need.disk, f"on its disk, more than the {in_gib(self.disk)} GiB that a rank finds free there"
        return None


Changes = Mapping[str, int | str]
"""Settings by name, and what to set them to."""


def in_words(found: Sequence[Changes]) -> str:
    """What to change of a run that does not fit, by what would do."""
    names = [" ".join(f"{key}={value}" for key, value in changes.items()) for changes in found]
    return "use " + ", or ".join(names) if names else "use more ranks or a smaller model"


def check_memory(
    config: RunConfig,
    layout: Layout,
    available: int | Room,
    rules: Rules,
    mend: Callable[[Sequence[Changes]], str] = in_words,
) -> None:
    """Refuse a run that cannot fit.

    Args:
        available: what one rank may use; a number is of bytes where device and host are one.
        rules: that settings which would fit must keep to, as those of the run do.
        mend: says what to change, by what would do.

    Raises:
        ConfigError: more is needed; says what would fit.
    """
    room = available if isinstance(available, Room) else Room(available)
    need = needed(config, layout, room.keeps)
    if (lack := room.lack(need)) is None:
        return
    mildest: dict[tuple[str, ...], Changes] = {}
    for changes in _alternatives(config, layout, room, rules):
        mildest.setdefault(tuple(changes), changes)
    fewest = min(map(len, mildest), default=0)
    fix = mend([changes for changes in mildest.values() if len(changes) == fewest])
    short, reason = lack
    raise ConfigError(MEMORY, f"{in_gib(short)} GiB", reason, fix)


AWAY: tuple[dict[str, str], ...] = (
    {"optimizer": "cpu", "gradients": "auto"},
    {"optimizer": "nvme"},
    {"optimizer": "cpu", "gradients": "auto", "params": "cpu"},
    {"optimizer": "nvme", "params": "nvme"},
    {"optimizer": "nvme", "gradients": "nvme"},
    {"optimizer": "nvme", "gradients": "nvme", "params": "nvme"},
)
"""What else might be offloaded, mildest first."""


def _alternatives(config: RunConfig, layout: Layout, room: Room, rules: Rules) -> Iterator[dict[str, int | str]]:
    """Changes of micro-batch, recomputation, stage, offloading, tp, cp, ep that fit on the same ranks; mildest of each
    first."""
    micro, stage, ranks = config.train.micro_batch, config.sharding.stage, layout.world // layout.pp
    micros = divisors(micro)[::-1]
    fsdp = config.engine == "fsdp"
    (again, ops, every), here = config.train.recomputation, config.sharding.offload
    recomputes = dict.fromkeys((config.train.recomputation, ("full", TrainConfig().recompute_ops, 1)))
    places = [here, *(here.model_copy(update=away) for away in AWAY if not fsdp)]
    for resized in _resized(config, layout, ranks):
        held = held_by(config, resized)
        stages = [stage] if fsdp else range(stage, 4)
        for away, s, (r, o, k), m in itertools.product(places, stages, recomputes, micros):
            alone = resized.dp * resized.cp == 1  # then a stage spares nothing but by what it lets go elsewhere
            if (s > stage and alone and away == here) or (away != here and not _goes(away, room)):
                continue
            changed = config.model_copy(
                update={
                    "parallel": _sizes(config.parallel, resized),
                    "sharding": config.sharding.model_copy(update={"stage": s, "offload": away}),
                    "train": config.train.recomputing(r, o, k).model_copy(update={"micro_batch": m}),
                }
            )
            if _keeps_to(rules, changed, layout.world) and room.holds(_fullest(changed, resized, held, room.keeps)):
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


def _goes(away: OffloadConfig, room: Room) -> bool:
    """Whether state leaves the memory that it is in."""
    return room.host is not None or "cpu" not in (away.optimizer, away.params)


def _sizes(parallel: ParallelConfig, resized: Layout) -> ParallelConfig:
    axes = ("tp", "cp", "ep", "etp")
    return parallel.model_copy(update={axis: getattr(resized, axis) for axis in axes})


def _keeps_to(rules: Rules, config: RunConfig, world: int) -> bool:
    try:
        rules(config, world)
    except ConfigError:
        return False
    return True


def _resized(config: RunConfig, layout: Layout, ranks: int) -> Iterator[Layout]:
    """Layouts of as many ranks a stage with as much tensor, context and expert parallelism, or more of one of them."""
    experts = config.model.moe.experts if config.model.moe else 1
    for tp in (t for t in tp_sizes(config.model, ranks) if t >= layout.tp):
        etp = tp if layout.etp > 1 else 1
        for cp in (c for c in divisors(ranks // tp) if c >= layout.cp):
            for ep in (e for e in divisors(experts) if e >= layout.ep and ranks % (e * etp) == 0):
                if (tp > layout.tp) + (cp > layout.cp) + (ep > layout.ep) < 2:
                    yield replace(layout, dp=ranks // (tp * cp), tp=tp, cp=cp, ep=ep, etp=etp)
