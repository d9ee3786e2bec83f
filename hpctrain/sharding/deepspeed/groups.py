"""The mesh as DeepSpeed wants to see it: an object with the five methods it calls on a "model parallel unit"."""

from __future__ import annotations

import torch.distributed as dist

from hpctrain.parallel.mesh import Mesh
from hpctrain.sharding.groups import real_group


class MeshUnit:
    """DeepSpeed's view of the mesh.

    Data parallel means the ranks gradients are summed over (dp x cp); model parallel the ranks that hold one
    copy of the parameters (pp x tp). DeepSpeed reads "no group" as the whole world, so an axis of one rank
    gets a real group of one. It must not have any method about sequences: DeepSpeed would take the mesh for
    one of its own sequence-parallel kind.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._data, self._model = real_group(mesh.loss), real_group(mesh.model)

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self._data

    def get_data_parallel_world_size(self) -> int:
        return self._mesh.loss.size

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return self._model

    def get_model_parallel_world_size(self) -> int:
        return self._mesh.model.size

    def get_model_parallel_rank(self) -> int:
        """The rank along tp alone: with it DeepSpeed decides which rank counts a replicated parameter in the
        norm, and stage 3 asks for it under this name."""
        return self._mesh.tp.index
