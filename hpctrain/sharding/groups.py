"""Process groups for libraries that want one where the mesh has none."""

from __future__ import annotations

import torch
import torch.distributed as dist

from hpctrain.parallel.comm import Axis


def ensure_world(device: torch.device) -> None:
    """Make a process group of one where this process is in none."""
    if not dist.is_initialized():
        backend, store = "nccl" if device.type == "cuda" else "gloo", torch._C._distributed_c10d.HashStore()
        dist.init_process_group(backend, store=store, rank=0, world_size=1)


def real_group(axis: Axis) -> dist.ProcessGroup:
    """The axis' process group, made where there is none because it has one rank."""
    if axis.group is not None:
        return axis.group
    group = dist.new_group(list(axis.ranks), use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup), axis
    return group
