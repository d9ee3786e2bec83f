"""Who sends how many bytes to whom in an optimizer step, and what kind of link they take.

Bytes are those of `layout/traffic.py`. Rings follow the order of ranks in a group, so a rank sends to the next one;
of an all-to-all every rank of the group gets as much; a stage of a pipeline sends to the ranks of its neighbours that
have the same place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpctrain.config.schema import RunConfig
from hpctrain.layout.layout import AXES, EXPERT_AXES, Layout
from hpctrain.layout.placement import DENSE, EXPERT
from hpctrain.layout.shards import replicas_of
from hpctrain.layout.stages import stages_of
from hpctrain.layout.traffic import (
    Traffic,
    context_traffic,
    data_bytes,
    expert_traffic,
    pipeline_sends,
    replica_bytes,
    tensor_traffic,
    wire,
)

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

LINKS = ("nvlink", "leaf", "spine", "core", "cross_rail")
"""Kinds of links: inside an NVLink domain; one leaf switch; leaves under one switch; further up; and from a rail to
another, which always leaves the leaf."""

WEIGHTS = {"nvlink": 0.0, "leaf": 1e-6, "spine": 1.0, "core": 1.001, "cross_rail": 1.002}
"""Of a byte over each of them, where orders of ranks are compared by one number."""

NOMINAL = {"tp": 64.0, "cp": 16.0, "ep": 16.0, "etp": 16.0, "data": 8.0, "experts": 8.0, "pp": 1.0}
"""Bytes that a rank is taken to send over an axis where no configuration says: only their proportions matter."""

PAIRS = 4_000_000
"""Pairs of ranks up to which those of an all-to-all are all listed. Of more each rank sends to fewer others, evenly
spread over the group, as much as to all of them."""


@dataclass(frozen=True)
class Sends:
    """What one axis sends: from which rank to which, bytes in an optimizer step."""

    axis: str
    source: Ints
    target: Ints
    bytes: Floats


@dataclass(frozen=True)
class LinkBytes:
    """Bytes of all ranks in an optimizer step by axis and kind of link.

    Attributes:
        by_axis: of each axis, bytes by kind of link (`LINKS`).
        relayed: of those from rail to rail, what a GPU beside the sender could send on the right rail (NCCL's PXN).
    """

    by_axis: Mapping[str, Mapping[str, float]]
    relayed: float = 0.0

    def over(self, *links: str) -> float:
        """Bytes over the kinds of links named."""
        return sum(row[link] for row in self.by_axis.values() for link in links)

    @property
    def leaving(self) -> float:
        """Bytes that leave a leaf switch: up the fabric, or from a rail to another."""
        return self.over("spine", "core", "cross_rail")

    @property
    def total(self) -> float:
        """All bytes."""
        return self.over(*LINKS)

    def against(self, other: LinkBytes) -> str:
        """How much less of this leaves leaf switches than of another order, in words."""
        here, there = self.leaving, other.leaving
        rails = self.over("cross_rail"), other.over("cross_rail")
        if abs(here - there) <= 1e-9 * self.total and abs(rails[0] - rails[1]) <= 1e-9 * self.total:
            return "as many bytes leave leaf switches"
        times = f", {there / here:.1f} times as much" if here else ""
        return (
            f"{there:.3g} bytes a step leave leaf switches, {rails[1]:.3g} of them from rail to rail{times}; "
            f"in this order {here:.3g}, {rails[0]:.3g} of them from rail to rail"
        )

    @property
    def order_key(self) -> tuple[float, ...]:
        """What orders of ranks are compared by: tp outside NVLink domains, then `cost`, as shares of all bytes.

        Rounded, as sums in another order differ in the last bits."""
        scale = max(self.total, 1e-300)
        tp = sum(n for link, n in self.by_axis.get("tp", {}).items() if link != "nvlink")
        return tuple(round(part / scale, 9) for part in (tp, *self.cost))

    @property
    def cost(self) -> tuple[float, ...]:
        """Bytes over dear links, the dearest first; `WEIGHTS` is the same order in one number."""
        return self.leaving, self.over("cross_rail"), self.over("core"), self.over("leaf")


def sends(layout: Layout, config: RunConfig | None = None) -> tuple[Sends, ...]:
    """What every axis that is wider than one rank sends in an optimizer step, by engine as configured."""
    found = []
    for axis, names in (
        ("tp", ("tp",)),
        ("cp", ("cp",)),
        ("data", DENSE),
        ("data replicas", DENSE),
        ("ep", ("ep",)),
        ("etp", ("etp",)),
        ("experts", EXPERT),
        ("experts replicas", EXPERT),
    ):
        groups = _of_state(group_matrix(layout, *names), axis, config)
        if groups.shape[1] == 1 or (axis == "experts" and config is None and layout.ep * layout.etp == 1):
            continue
        ring, spread = _volumes(layout, config, axis, groups.shape[1])
        if ring.any():
            found.append(_ring(axis, groups, ring))
        if spread.any():
            found.append(_spread(axis, groups, spread))
    if layout.pp > 1:
        found.append(_pipeline(layout, config))
    return tuple(found)


def group_matrix(layout: Layout, *axes: str) -> Ints:
    """`Layout.groups` as an array, a row a group."""
    table = EXPERT_AXES if any(a in ("edp", "ep", "etp") for a in axes) else AXES
    ranks = np.arange(layout.world, dtype=np.int64).reshape(layout.sizes(table))
    moving = [i for i, a in enumerate(table) if a in axes]
    fixed = [i for i in range(len(table)) if i not in moving]
    size = int(np.prod([ranks.shape[i] for i in moving]))
    return np.ascontiguousarray(ranks.transpose(fixed + moving)).reshape(-1, size)


def _of_state(groups: Ints, axis: str, config: RunConfig | None) -> Ints:
    """Groups of ranks that share state, cut into those that have a part each and those that have the same part."""
    kind, _, same = axis.partition(" ")
    if kind not in ("data", "experts"):
        return groups
    replicas = replicas_of(config.sharding.replicas if config else 1, groups.shape[1])
    parts = groups.reshape(-1, replicas, groups.shape[1] // replicas)
    return parts.transpose(0, 2, 1).reshape(-1, replicas) if same else parts.reshape(-1, parts.shape[2])


def _ring(axis: str, groups: Ints, volume: Floats) -> Sends:
    source, target = groups.ravel(), np.roll(groups, -1, axis=1).ravel()
    return Sends(axis, source, target, volume[source])


def _spread(axis: str, groups: Ints, volume: Floats) -> Sends:
    size = groups.shape[1]
    steps = np.unique(np.linspace(1, size - 1, min(size - 1, max(8, PAIRS // groups.size))).round().astype(np.int64))
    source = np.concatenate([groups.ravel()] * len(steps))
    target = np.concatenate([np.roll(groups, -int(step), axis=1).ravel() for step in steps])
    return Sends(axis, source, target, volume[source] / len(steps))


def _pipeline(layout: Layout, config: RunConfig | None) -> Sends:
    stage = layout.world // layout.pp
    within = np.arange(stage, dtype=np.int64)
    parts: list[tuple[Ints, Ints, Floats]] = []
    for pp in range(layout.pp):
        if config is None:
            for peer in {(pp + 1) % layout.pp, (pp - 1) % layout.pp} & {pp - 1, pp + 1}:
                parts.append((pp * stage + within, peer * stage + within, np.full(stage, NOMINAL["pp"])))
            continue
        by_tp = [pipeline_sends(config, layout, pp * stage + tp) for tp in _tps(config, layout)]
        for peer in by_tp[0]:
            volume = _over_tp(layout, [float(sent[peer]) for sent in by_tp])[within % layout.tp]
            parts.append((pp * stage + within, peer * stage + within, volume))
    return Sends("pp", *(np.concatenate(column) for column in zip(*parts)))  # type: ignore[arg-type]


def _tps(config: RunConfig, layout: Layout) -> range:
    """Indices on tp whose traffic has to be computed: the first, or all where something is cut unevenly."""
    tokens = config.train.micro_batch * config.data.seq // layout.cp
    uneven = config.model.vocab % layout.tp or tokens % layout.tp
    return range(layout.tp if uneven else 1)


def _over_tp(layout: Layout, values: list[float]) -> Floats:
    return np.array(values * layout.tp if len(values) == 1 else values, dtype=np.float64)


def _volumes(layout: Layout, config: RunConfig | None, axis: str, ranks: int) -> tuple[Floats, Floats]:
    """Bytes that every rank sends over an axis to the next of its ring, and spread over its group."""
    if config is None:
        flat = np.full(layout.world, NOMINAL[axis])
        return (flat * 0, flat) if axis == "ep" else (flat, flat * 0)
    stage, by_like = layout.world // layout.pp, {}
    ring, spread = np.empty(layout.world), np.empty(layout.world)
    for pp in range(layout.pp):
        like = tuple(
            (s.first, s.last, *map(config.model.routed, s.layers)) for s in stages_of(config.model, layout, pp * stage)
        )
        if like not in by_like:
            found = [_OF[axis](config, layout, pp * stage + tp) for tp in _tps(config, layout)]
            by_like[like] = [
                _over_tp(layout, [_wired(traffic, ranks, kind) for traffic in found]) for kind in (False, True)
            ]
        for out, values in zip((ring, spread), by_like[like]):
            out[pp * stage : (pp + 1) * stage] = np.tile(values, stage // layout.tp)
    return ring, spread


def _wired(traffic: dict[str, int], ranks: int, spread: bool) -> float:
    return float(sum(wire(op, n, ranks) for op, n in traffic.items() if (op == "all_to_all") == spread))


def _plain(traffic: Traffic) -> dict[str, int]:
    return {operation: payload.bytes for operation, payload in traffic.items()}


_OF: dict[str, Callable[[RunConfig, Layout, int], dict[str, int]]] = {
    "tp": lambda c, y, r: _plain(tensor_traffic(c, y, r)),
    "cp": lambda c, y, r: _plain(context_traffic(c, y, r)),
    "ep": lambda c, y, r: _plain(expert_traffic(c, y, r).get("ep", {})),
    "etp": lambda c, y, r: _plain(expert_traffic(c, y, r).get("etp", {})),
    "data": lambda c, y, r: data_bytes(c, y, r, DENSE),
    "data replicas": lambda c, y, r: {"all_reduce": replica_bytes(c, y, r, DENSE)},
    "experts": lambda c, y, r: data_bytes(c, y, r, EXPERT),
    "experts replicas": lambda c, y, r: {"all_reduce": replica_bytes(c, y, r, EXPERT)},
}
"""Payload of a rank over an axis, by operation."""
