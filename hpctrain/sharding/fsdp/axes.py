"""Over which ranks state is sharded, and over which the shards are held again (HSDP)."""

from __future__ import annotations

import datetime
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hpctrain.parallel.comm import Axis
from hpctrain.sharding.groups import real_group


class ShardAxes(NamedTuple):
    """How the ranks that would hold the same state hold it.

    Attributes:
        shards: consecutive ones, that hold a part each.
        replicas: those that hold the same part.
        mesh: both as `fully_shard` takes them.
    """

    shards: Axis
    replicas: Axis
    mesh: DeviceMesh


def shard_axes(axis: Axis, replicas: int, alone: Axis, device: torch.device, timeout_s: float) -> ShardAxes:
    """Cut an axis into so many groups, each of which holds all state. Collective over its ranks.

    Args:
        axis: dp x cp, or edp.
        replicas: of the state; divides the axis.
        alone: this rank only.
        device: where it computes.
        timeout_s: of the groups made.
    """
    if replicas == 1:
        return ShardAxes(axis, alone, DeviceMesh.from_group(real_group(axis), device.type))
    size = axis.size // replicas
    table = torch.tensor(axis.ranks).view(replicas, size)
    row, column = divmod(axis.index, size)
    shards = _axis(f"{axis.name} shard", table[row].tolist(), column, axis, timeout_s)
    copies = _axis(f"{axis.name} replicas", table[:, column].tolist(), row, axis, timeout_s)
    groups = [real_group(copies), real_group(shards)]
    mesh = DeviceMesh.from_group(groups, device.type, table, mesh_dim_names=("replicas", "shards"))
    return ShardAxes(shards, copies, mesh)


def _axis(name: str, ranks: list[int], index: int, of: Axis, timeout_s: float) -> Axis:
    """Part of an axis, with a group of its own. Ranks of one part make it at the same time."""
    group: dist.ProcessGroup | None = None
    if len(ranks) > 1:
        made = dist.new_group(ranks, datetime.timedelta(seconds=timeout_s), use_local_synchronization=True)
        assert isinstance(made, dist.ProcessGroup), ranks
        group = made
    return Axis(name, tuple(ranks), index, group, of.meter)
