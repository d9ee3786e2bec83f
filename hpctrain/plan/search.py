"""The search for the best layouts: all are screened, the best are priced again by playing their schedules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hpctrain.config.keys import as_written
from hpctrain.config.schema import OF_FSDP, RunConfig, TrainConfig
from hpctrain.config.validate import validate
from hpctrain.errors import ConfigError
from hpctrain.layout.fits import needed
from hpctrain.layout.layout import Layout
from hpctrain.layout.memory import Memory, estimate
from hpctrain.layout.units import GIB
from hpctrain.plan.candidates import candidates
from hpctrain.plan.gemm import Array
from hpctrain.plan.links import Machine
from hpctrain.plan.played import price
from hpctrain.plan.room import room, weights_besides
from hpctrain.plan.screen import screen
from hpctrain.plan.step import Price
from hpctrain.plan.work import NAMES, OFFLOAD, RECOMPUTE, Points, Work
from hpctrain.telemetry.flops import flops_per_token

AGREE = 0.01
"""How far the two tiers may be apart."""

MOST = 24
"""Layouts that are priced a second time, at most."""


@dataclass(frozen=True)
class Plan:
    """A layout that fits, and its price.

    Attributes:
        config: what runs it.
        memory: of the fullest rank, without the runtime's slack.
    """

    config: RunConfig
    layout: Layout
    points: Points
    price: Price
    memory: Memory
    work: Work

    @property
    def seconds(self) -> float:
        return float(self.price.time)

    @property
    def tokens_per_second(self) -> float:
        """Of all devices."""
        return self.work.global_batch * self.work.seq / self.seconds

    def mfu(self, machine: Machine) -> float:
        """Causal MFU, 0 to 1, against the dense peak of the products' precision."""
        flops = flops_per_token(self.work.model, self.work.seq).causal
        return self.tokens_per_second * flops / (self.layout.world * machine.hardware.peak(self.work.dtype))

    def room(self, machine: Machine) -> float | None:
        """Bytes that a device has for `memory.total`; None where it has less than the slack, which is a GPU's."""
        usable = self.work.runtime.usable(machine.hardware.gpu.memory.value)
        return usable if usable > 0 else None

    def describe(self) -> str:
        """The layout as settings."""
        p, layout = self.points, self.layout
        axes = [(a, getattr(layout, a)) for a in ("tp", "cp", "pp", "dp", "ep")]
        text = " ".join(f"{axis}={size}" for axis, size in axes if size > 1 or axis == "dp")
        text += f" {layout.schedule}" + (f"x{layout.chunks}" if layout.chunks > 1 else "") if layout.pp > 1 else ""
        text += f" mb={int(p.micro_batch[0])}"
        recompute, stage, away = RECOMPUTE[int(p.recompute[0])], int(p.stage[0]), OFFLOAD[int(p.offload[0])]
        text += f" recompute={recompute}" if recompute != "none" else ""
        text += f" zero={stage}" + ("" if int(p.reshard[0]) or stage < 3 else " kept") if stage else ""
        return text + (f" offload={away}" if away != "none" else "")


def configured(config: RunConfig, points: Points, index: int, devices_per_host: int) -> RunConfig:
    """The recipe with a point's settings."""
    layout = points.layout(index)
    stage = int(points.stage[index])
    hosts, rest = divmod(layout.world, devices_per_host)
    nodes = (
        {"nodes": hosts, "gpus_per_node": devices_per_host}
        if hosts and not rest
        else {"nodes": 1, "gpus_per_node": layout.world}
    )
    away = OFFLOAD[int(points.offload[index])]
    updates = {
        "parallel": {
            **{axis: getattr(layout, axis) for axis in ("tp", "sp", "pp", "cp", "ep", "etp", "schedule", "chunks")},
            "stage_layers": None,
        },
        "sharding": {
            **OF_FSDP,
            "engine": "auto",
            "stage": stage,
            "reshard_after_forward": bool(points.reshard[index]) or stage < 3,
            "offload": config.sharding.offload.model_copy(update={"optimizer": away}),
        },
        "train": {"micro_batch": int(points.micro_batch[index]), "recompute": RECOMPUTE[int(points.recompute[index])]},
        "cluster": nodes,
    }
    parts = {name: getattr(config, name).model_copy(update=values) for name, values in updates.items()}
    return config.model_copy(update=parts)


def search(
    config: RunConfig,
    machine: Machine,
    devices: int,
    work: Work | None = None,
    top: int = 5,
    offload: bool = False,
    keeps: Callable[[Points], Array] | None = None,
) -> list[Plan]:
    """The best layouts that fit, best first.

    Args:
        offload: optimizer state may be kept on hosts and drives.
        keeps: which of many layouts are wanted, an array of truth values.

    Raises:
        ConfigError: none can run, or none fits; says what would. Or a setting has no price.
    """
    _all_alike(config)
    work = work or Work.of(config)
    points = candidates(config, machine.of(devices), devices, offload)
    if keeps is not None:
        points = points.take(np.flatnonzero(keeps(points)))
        if not len(points):
            raise ConfigError("layout", config.name, "no layout has these settings", "hold fewer of them")
    machine = machine.of(devices)
    needs, away = room(config, points, work.runtime, weights_besides(machine, work))
    have = work.runtime.usable(machine.hardware.gpu.memory.value)
    host = machine.hardware.host
    holds = np.where(points.offload == 2, host.nvme.value, host.memory.value) * 0.9 / host.devices
    fits = (needs <= have) & (away <= holds)
    if not fits.any():
        _nothing(config, machine, points, needs, have, devices)
    points = points.take(np.flatnonzero(fits))
    times = screen(machine, work, points).time
    return refined(config, machine, work, points, times, top, have)


def refined(
    config: RunConfig, machine: Machine, work: Work, points: Points, times: Array, top: int, have: float
) -> list[Plan]:
    """The first of an order priced by playing, as long as the rules and the memory model let them run, until what comes
    is too slow to be among the best."""
    out: list[Plan] = []
    for index in np.argsort(times, kind="stable"):
        if len(out) >= top and times[index] > (1 + AGREE) * sorted(plan.seconds for plan in out)[top - 1]:
            break
        layout, one = points.layout(int(index)), points.take(np.array([index]))
        chosen = configured(config, one, 0, machine.hardware.host.devices)
        memory = _memory(chosen, layout, work)
        if not int(one.offload[0]) and (memory.training > have or not _valid(chosen, layout.world)):
            continue
        out.append(Plan(chosen, layout, one, price(machine, work, layout, one), memory, work))
        if len(out) == MOST:
            break
    return sorted(out, key=lambda plan: plan.seconds)[:top]


def _memory(config: RunConfig, layout: Layout, work: Work) -> Memory:
    """What the fullest rank needs, of its buffers what is known."""
    return (needed if work.runtime.buffers else estimate)(config, layout, work.runtime.keeps)


def priced(config: RunConfig, machine: Machine, devices: int, work: Work) -> Plan:
    """The layout that a configuration says, whether it fits or not.

    Raises:
        ConfigError: it cannot run on so many devices, or has a setting that has no price.
    """
    validate(config, devices)
    _all_alike(config)
    machine = machine.of(devices)
    if (replicas := config.sharding.replicas) > 1:
        reason = "has no price here: state is taken to be sharded over all of dp x cp"
        raise ConfigError("sharding.replicas", replicas, reason, "use 1")
    layout = Layout.of(config.parallel, devices)
    sharding = config.sharding
    points = Points.one(
        layout,
        config.train.micro_batch,
        config.train.recompute,
        3 if config.engine == "fsdp" else sharding.stage,
        sharding.reshard_after_forward,
        sharding.offload.optimizer,
    )
    memory = _memory(config, layout, work)
    return Plan(config, layout, points, price(machine, work, layout, points), memory, work)


def _all_alike(config: RunConfig) -> None:
    """Refuse what has no price where a layer's is taken to be that of all like it."""
    train = config.train
    if (every := train.recompute_every) > 1:
        reason = "has no price here: of all layers the same is taken to be computed again"
        raise ConfigError("train.recompute_every", every, reason, "use 1")
    if train.recompute_ops != (usual := TrainConfig().recompute_ops):
        reason = "has no price here: of a layer nothing, core attention or all is taken to be computed again"
        raise ConfigError("train.recompute_ops", list(train.recompute_ops), reason, f"use {as_written(usual)}")
    if (budget := train.activation_budget) is not None:
        reason = "has no price here, but what it chooses may have (`hpctrain memory` says what that is)"
        raise ConfigError("train.activation_budget", budget, reason, "use null")


HELD = {
    **{f"parallel.{axis}": axis for axis in ("tp", "pp", "cp", "ep", "chunks")},
    "train.micro_batch": "micro_batch",
    "sharding.stage": "stage",
}
"""Settings that the search chooses and that can be held: numbers of a point."""


def best_with(config: RunConfig, machine: Machine, devices: int, work: Work, held: tuple[str, ...]) -> Plan:
    """The best layout that leaves some settings of the configuration as they are.

    Raises:
        ConfigError: none can run, or none fits.
    """

    def keeps(points: Points) -> Array:
        chosen = np.ones(len(points), dtype=bool)
        for key in held:
            section, _, name = key.partition(".")
            value = getattr(getattr(config, section), name) if name else None
            if key in HELD:
                chosen &= getattr(points, HELD[key]) == value
            elif key == "train.recompute":
                chosen &= points.recompute == RECOMPUTE.index(value)
            elif key == "parallel.schedule":
                chosen &= points.schedule == NAMES.index(value)
        return chosen

    return search(config, machine, devices, work, 1, keeps=keeps)[0]


def _valid(config: RunConfig, world: int) -> bool:
    try:
        validate(config, world)
    except ConfigError:
        return False
    return True


def _nothing(config: RunConfig, machine: Machine, points: Points, needs: object, have: float, devices: int) -> None:
    sizes = np.asarray(needs, float)
    least = int(np.argmin(sizes))
    gib = f"{sizes[least] / GIB:,.1f} GiB"
    more = devices
    while more < devices * 1024:
        more *= 2
        try:
            again = candidates(config, machine.of(more), more)
        except ConfigError:
            continue
        if float(np.min(room(config, again)[0])) <= have:
            break
    fix = f"{more} devices are enough" if more < devices * 1024 else "use a smaller model or batch"
    layout = points.layout(least).describe()
    allowed = f"needs {gib} on a rank at the least ({layout}), and a device has {have / GIB:.1f} GiB for it"
    raise ConfigError("memory", config.name, allowed, f"{fix}, or let --offload keep optimizer state on the hosts")


def lacks(best: Plan, other: Plan) -> str:
    """Why another plan is slower, in words: where it loses most, and what it gains elsewhere."""
    a, b = best.price.at(0), other.price.at(0)
    loses = sorted(((b[name] - a[name], name) for name in a), reverse=True)
    total = other.seconds - best.seconds
    if total < 1e-3 * best.seconds:
        return "as fast within the model's error"
    worst, name = loses[0]
    gained, where = loses[-1]
    text = f"{worst / best.seconds:+.1%} {name}"
    return text + (f", {gained / best.seconds:+.1%} {where}" if gained < -2e-3 * best.seconds else "")
