"""A layout with process groups: built once, passed to whoever needs it, never global."""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hpctrain.layout.layout import Layout, Ranks
from hpctrain.layout.placement import Placement
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
        model: pp x tp, the ranks that together hold one copy of the parameters.
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
    alone: Axis
    meter: Meter
    _subgroups: dict[Ranks, Axis]

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
    made: dict[tuple[Ranks, ...], dist.ProcessGroup | None] = {}

    def axis(name: str, groups: tuple[Ranks, ...]) -> Axis:
        mine = next(g for g in groups if rank in g)
        if groups not in made:
            made[groups] = None
            for ranks in groups:
                group = dist.new_group(list(ranks), timeout=timeout) if len(ranks) > 1 else None
                if ranks == mine:
                    made[groups] = group
        return Axis(name, mine, mine.index(rank), made[groups], meter)

    views = {a: axis(a, layout.groups(a)) for a in ("tp", "pp", "dp", "cp")}
    loss = axis("dp+cp", layout.groups("dp", "cp"))
    total = axis("pp+dp+cp", layout.groups("pp", "dp", "cp"))
    model = axis("pp+tp", layout.groups("pp", "tp"))
    world = axis("world", (tuple(range(size)),))
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
        alone=alone,
        meter=meter,
        _subgroups=extra,
    )
