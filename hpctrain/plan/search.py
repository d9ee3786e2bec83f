"""The search for the best layouts: all are screened, the best are priced again by playing their schedules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from hpctrain.config.keys import as_written
from hpctrain.config.schema import OF_FSDP, RunConfig, TrainConfig
from hpctrain.config.validate import validate
from hpctrain.errors import ConfigError
from hpctrain.layout.fits import needed
from hpctrain.layout.layout import Layout
from hpctrain.layout.memory import Memory, estimate
from hpctrain.layout.units import in_gib
from hpctrain.plan.candidates import MOST_DEVICES, candidates
from hpctrain.plan.gemm import Array
from hpctrain.plan.held import OFFLOADED, layouts_with, value_of
from hpctrain.plan.links import Machine
from hpctrain.plan.played import price
from hpctrain.plan.room import room, weights_besides
from hpctrain.plan.screen import screen
from hpctrain.plan.step import Price
from hpctrain.plan.work import OFFLOAD, RECOMPUTE, Points, Work
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
    there = available(machine, work)
    fits = there.fits(points, needs, away)
    if not fits.any():
        _nothing(config, machine, work, points, (needs, away), devices, offload)
    points = points.take(np.flatnonzero(fits))
    times = screen(machine, work, points).time
    return refined(config, machine, work, points, times, top, there)


class Available(NamedTuple):
    """Bytes that a rank may use: of its device, of its host's memory, of its host's drives."""

    device: float
    host: float
    disk: float

    def fits(self, points: Points, needs: Array, away: Array) -> Array:
        """Of many layouts, for which it is enough: bytes on the device, and of what is offloaded."""
        return (needs <= self.device) & (away <= np.where(points.offload == 2, self.disk, self.host))

    def holds(self, memory: Memory) -> bool:
        """Whether it is enough for training."""
        return memory.training <= self.device and memory.host <= self.host and memory.disk <= self.disk


OF_HOST = 0.9
"""Share of a host's memory and drives that ranks may use."""


def available(machine: Machine, work: Work) -> Available:
    """On a machine, by a program. CPUs have neither a CUDA context nor NCCL's buffers."""
    host, runtime = machine.hardware.host, work.runtime
    runtime = replace(runtime, slack=0.0) if machine.hardware.fabric.network == "gloo" else runtime
    share = OF_HOST / host.devices
    device = runtime.usable(machine.hardware.gpu.memory.value)
    return Available(device, share * host.memory.value, share * host.nvme.value)


PATIENCE = 64
"""Layouts that a rule refuses alike, the fastest first, before it is taken to refuse all."""


def refined(
    config: RunConfig, machine: Machine, work: Work, points: Points, times: Array, top: int, there: Available
) -> list[Plan]:
    """The first of an order priced by playing, as long as rules and memory model let them run, until what comes is too
    slow to be among the best.

    Raises:
        ConfigError: rules refuse them for what is the same in all.
    """
    out: list[Plan] = []
    refused, first = Counter[str](), None
    for index in np.argsort(times, kind="stable"):
        if len(out) >= top and times[index] > (1 + AGREE) * sorted(plan.seconds for plan in out)[top - 1]:
            break
        layout, one = points.layout(int(index)), points.take(np.array([index]))
        chosen = configured(config, one, 0, machine.hardware.host.devices)
        memory = _memory(chosen, layout, work)
        if not there.holds(memory):
            continue
        try:
            validate(chosen, layout.world)
        except ConfigError as error:
            refused[str(error)] += 1
            first = first or error
            if not out and refused[str(error)] == PATIENCE:
                raise
            continue
        out.append(Plan(chosen, layout, one, price(machine, work, layout, one), memory, work))
        if len(out) == MOST:
            break
    if first is not None and not out:
        raise first
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


def best_with(config: RunConfig, machine: Machine, devices: int, work: Work, held: tuple[str, ...]) -> Plan:
    """The best layout that leaves some settings of the configuration as they are.

    Raises:
        ConfigError: none can run, or none fits.
    """
    away = OFFLOADED in held and value_of(config, OFFLOADED) != "none"
    plans = search(config, machine, devices, work, 1, away, layouts_with(config, held))
    if not plans:
        raise ConfigError("memory", config.name, "what seemed to fit does not", "use more devices")
    return plans[0]


def _nothing(
    config: RunConfig,
    machine: Machine,
    work: Work,
    points: Points,
    needs: tuple[Array, Array],
    devices: int,
    offload: bool,
) -> None:
    """Refuse what does not fit: what is needed at the least, and how many devices are enough.

    Args:
        needs: bytes on the device, and of what is offloaded.
    """
    there = available(machine, work)
    device, away = (np.asarray(part, float) for part in needs)
    short = device > there.device
    if short.all():
        least, size, kind, have = int(np.argmin(device)), device, "", there.device
        holder = "a device has"
    else:
        among = np.flatnonzero(~short)
        least, size = int(among[np.argmin(away[among])]), away
        disk = int(points.offload[least]) == 2
        kind, have = (" on drives", there.disk) if disk else (" of host memory", there.host)
        holder = "its host has"
    more = devices
    while more < devices * 1024 and more < MOST_DEVICES:
        more *= 2
        try:
            found = candidates(config, machine.of(more), more, offload)
        except ConfigError:
            continue
        if there.fits(found, *room(config, found, work.runtime, weights_besides(machine, work))).any():
            break
    else:
        more = 0
    fix = f"{more} devices are enough" if more else "use a smaller model or batch"
    layout = points.layout(least).describe()
    needed_there = f"needs {in_gib(size[least])} GiB{kind} on a rank at the least ({layout})"
    allowed = f"{needed_there}, and {holder} {in_gib(have)} GiB for it"
    hint = "" if offload else ", or let --offload keep optimizer state on the hosts"
    raise ConfigError("memory", config.name, allowed, fix + hint)


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
