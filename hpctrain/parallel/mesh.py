"""A layout with process groups: built once, passed to whoever needs it, never global."""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hpctrain.layout.layout import Layout, Ranks
from hpctrain.layout.placement import DENSE, EXPERT, Placement
from hpctrain.parallel.comm import Axis
from hpctrain.telemetry.meter import Meter


@dataclass(frozen=True)
class Mesh:
    """The named views of the world that one rank uses.

    Attributes:
        layout: the arithmetic behind it.
        rank: global rank.
        device: where this rank computes.
        world: all ranks.
        tp, pp, dp, cp: one axis each.
        loss: dp x cp, over which token counts and dense gradients are summed.
        total: pp x dp x cp, over which losses are summed, of which only the last stage knows.
        model: pp x tp, the ranks that together hold one copy of the parameters that are no expert's.
        ep, etp: axes of the second factorisation of a stage; tokens are sent over ep, etp splits an expert.
        edp: over which gradients of experts are summed.
        experts: pp x ep x etp, the ranks that together hold one copy of the experts.
        alone: this rank only.
        meter: counters of this rank.
    """

    layout: Layout
    rank: int
    device: torch.device
    world: Axis
    tp: Axis
    pp: Axis
    dp: Axis
    cp: Axis
    loss: Axis
    total: Axis
    model: Axis
    ep: Axis
    etp: Axis
    edp: Axis
    experts: Axis
    alone: Axis
    meter: Meter
    _subgroups: dict[Ranks, Axis]

    def reduction(self, placement: Placement) -> Axis:
        """The ranks over which an engine sums a parameter's gradient."""
        return {DENSE: self.loss, EXPERT: self.edp}[placement.reduced_over]

    def partial(self, placement: Placement) -> Axis:
        """The ranks over which the parts of a parameter's gradient are summed inside autograd; often one."""
        if not placement.partial_over:
            return self.alone
        return self.tp if placement.replicas == self.tp.ranks else self._subgroups[placement.replicas]


def build_mesh(
    layout: Layout,
    device: torch.device,
    subgroups: Iterable[tuple[Ranks, ...]] = (),
    timeout_s: float = 600.0,
    meter: Meter | None = None,
) -> Mesh:
    """Make the process groups of a layout. Collective: every rank of the world calls it alike.

    Args:
        layout: its world must equal the default group's size.
        device: where this rank computes.
        subgroups: further partitions of the world, from `layout.placement.replica_groups`.
        timeout_s: of every group.
        meter: where traffic is counted; a new one by default.
    """
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    assert layout.world == size, (layout, size)
    meter, timeout = meter or Meter(), datetime.timedelta(seconds=timeout_s)
    made: dict[tuple[bool, tuple[Ranks, ...]], dist.ProcessGroup | None] = {}

    def axis(name: str, groups: tuple[Ranks, ...], beside: bool = False) -> Axis:
        """Axes of the same ranks share a group, but not one that sums gradients while backward talks over another:
        when a sum begins is not the same on every rank. Those are `beside`."""
        mine = next(g for g in groups if rank in g)
        key = (beside, groups)
        if key not in made:
            made[key] = None
            for ranks in groups:
                group = dist.new_group(list(ranks), timeout=timeout) if len(ranks) > 1 else None
                if ranks == mine:
                    made[key] = group
        return Axis(name, mine, mine.index(rank), made[key], meter)

    views = {a: axis(a, layout.groups(a)) for a in ("tp", "pp", "cp", "ep", "etp")}
    views |= {a: axis(a, layout.groups(a), beside=True) for a in ("dp", "edp")}
    loss = axis("dp+cp", layout.groups("dp", "cp"), beside=True)
    total = axis("pp+dp+cp", layout.groups("pp", "dp", "cp"), beside=True)
    model = axis("pp+tp", layout.groups("pp", "tp"))
    experts = axis("pp+ep+etp", layout.groups("pp", "ep", "etp"))
    world = axis("world", (tuple(range(size)),), beside=True)
    extra = {a.ranks: a for a in (axis("tp", groups) for groups in subgroups)}
    alone = Axis("self", (rank,), 0, None, meter)
    return Mesh(
        layout,
        rank,
        device,
        world,
        **views,
        loss=loss,
        total=total,
        model=model,
        experts=experts,
        alone=alone,
        meter=meter,
        _subgroups=extra,
    )
