"""Experts under ZeRO 1 and 2, whose state is sharded over other ranks than that of dense parameters.

DeepSpeed looks for modules of its own class `MoE`, for flags on parameters, and for process groups by name in globals.
It reduces and shards what carries the flag over the group of that name, divides its gradients by the number of
data-parallel ranks as it does all gradients, and counts it in the norm over all ranks, each of which has a fragment of
its own.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from hpctrain.parallel.mesh import Mesh
from hpctrain.sharding.groups import real_group

GROUP = "hpctrain_experts"
"""Name of the groups in DeepSpeed's globals."""


def shard_experts(root: nn.Module, parameters: Iterable[nn.Parameter], number: int, mesh: Mesh) -> None:
    """Let DeepSpeed know of a rank's experts, before an engine is made.

    Args:
        root: the module that DeepSpeed is given; it gets one more, without parameters.
        parameters: of the experts.
        number: of experts in a layer.
        mesh: has the ranks, ep x etp and edp, that are told to DeepSpeed.
    """
    from deepspeed.moe.layer import MoE
    from deepspeed.utils import groups

    class Mark(MoE):  # type: ignore[misc]
        """Makes DeepSpeed look for experts; it is asked for nothing else."""

        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.num_experts = number

        def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
            """The groups are there."""

    root.add_module("experts", Mark())
    for parameter in parameters:
        parameter.allreduce = False  # type: ignore[attr-defined]
        parameter.group_name = GROUP  # type: ignore[attr-defined]
    groups._EXPERT_PARALLEL_GROUP[GROUP] = real_group(mesh.ep)
    groups._EXPERT_DATA_PARALLEL_GROUP[GROUP] = real_group(mesh.edp)


def forget_experts() -> None:
    """Take the groups out of DeepSpeed's globals: another engine's are not these."""
    from deepspeed.utils import groups

    for known in (groups._EXPERT_PARALLEL_GROUP, groups._EXPERT_DATA_PARALLEL_GROUP):
        known.pop(GROUP, None)
