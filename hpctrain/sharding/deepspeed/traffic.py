"""Counting what DeepSpeed sends, in the meter and in the terms of `parallel/comm.py`.

What there is to count with our settings, over dp x cp unless said otherwise:

- gradients, in float32. Stage 1 all-reduces them at the end of a step. Stage 2 does so at every micro-batch, and
  whole: its setting `reduce_scatter` picks what a rank keeps of the sum, not what is sent. Only stage 3
  reduce-scatters, at every micro-batch.
- weights, in the precision of the model. Stages 1 and 2 all-gather them at the end of a step. Stage 3 gathers
  matrices for every forward and again for every backward, but for those at the turn from one to the other that
  prefetching has come across while they were there: they are kept, in a model of two layers most of them. It
  gathers vectors once a step.
- the flag of non-finite values and the norm of each parameter group, over pp x tp as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from hpctrain.parallel.comm import Axis
from hpctrain.parallel.mesh import Mesh
from hpctrain.sharding.deepspeed.patches import require_source
from hpctrain.telemetry.meter import Collective, Meter


class CountedBackend:
    """Stands in for DeepSpeed's backend, `deepspeed.comm.comm.cdb`, through which all its collectives go.

    Like DeepSpeed's own globals it knows one engine at a time: the one made last.

    Args:
        mesh: whose meter counts, and whose axes name the groups.

    Raises:
        ConfigError: the installed DeepSpeed calls its backend in another way.
    """

    def __init__(self, mesh: Mesh) -> None:
        from deepspeed.comm import comm

        require_source(comm.all_reduce, "return cdb.all_reduce(tensor, op, group, async_op)")
        require_source(comm.reduce_scatter_tensor, "return cdb.reduce_scatter_tensor(output_tensor=output_tensor,")
        self._mesh, self._module = mesh, comm
        self._backend: Any = comm.cdb._backend if isinstance(comm.cdb, CountedBackend) else comm.cdb
        self._axes: dict[Any, Axis] = {}
        comm.cdb = self

    def close(self) -> None:
        """Give DeepSpeed its own backend back."""
        if self._module.cdb is self:
            self._module.cdb = self._backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def all_reduce(self, tensor: Tensor, op: Any, group: Any = None, async_op: bool = False) -> Any:
        return self._count("all_reduce", tensor, group, self._backend.all_reduce, tensor, op, group, async_op)

    def reduce(self, tensor: Tensor, dst: int, op: Any, group: Any = None, async_op: bool = False) -> Any:
        return self._count("reduce", tensor, group, self._backend.reduce, tensor, dst, op, group, async_op)

    def broadcast(self, tensor: Tensor, src: int, group: Any = None, async_op: bool = False) -> Any:
        return self._count("broadcast", tensor, group, self._backend.broadcast, tensor, src, group, async_op)

    def all_gather(self, tensor_list: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False) -> Any:
        call = self._backend.all_gather
        return self._count("all_gather", tensor, group, call, tensor_list, tensor, group, async_op)

    def all_gather_into_tensor(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        call = self._backend.all_gather_into_tensor
        return self._count("all_gather", input_tensor, group, call, output_tensor, input_tensor, group, async_op)

    def reduce_scatter(
        self, output: Tensor, input_list: list[Tensor], op: Any, group: Any = None, async_op: bool = False
    ) -> Any:
        call = self._backend.reduce_scatter
        return self._count("reduce_scatter", input_list, group, call, output, input_list, op, group, async_op)

    def reduce_scatter_tensor(
        self, output_tensor: Tensor, input_tensor: Tensor, op: Any, group: Any = None, async_op: bool = False
    ) -> Any:
        call = self._backend.reduce_scatter_tensor
        return self._count(
            "reduce_scatter", input_tensor, group, call, output_tensor, input_tensor, op, group, async_op
        )

    def barrier(self, group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
        return self._count("barrier", (), group, self._backend.barrier, group, async_op, device_ids)

    def _count(
        self, operation: str, payload: Tensor | Sequence[Tensor], group: Any, call: Callable[..., Any], *args: Any
    ) -> Any:
        axis = self._axis(group)
        if axis.size == 1:
            return call(*args)
        tensors = [payload] if isinstance(payload, Tensor) else payload
        begun = axis.begin(operation, sum(t.numel() * t.element_size() for t in tensors))
        with axis.meter.waiting(begun):
            result = call(*args)
        if result is not None and axis.meter.asynchronous:
            axis.meter.in_flight = [result]
        return None if result is None else CountedWork(result, begun, axis.meter)

    def _axis(self, group: Any) -> Axis:
        """The axis that a group's ranks are; one made up where they are none of the mesh's. None is the world."""
        if group not in self._axes:
            mesh, ranks = self._mesh, tuple(dist.get_process_group_ranks(group))
            views = (mesh.alone, mesh.world, mesh.cp, mesh.edp, mesh.dp, mesh.pp, mesh.tp, mesh.model, mesh.loss)
            known = {view.ranks: view for view in views}  # of the same ranks the last
            made_up = Axis(f"{len(ranks)} ranks", ranks, dist.get_rank(group), group, mesh.meter)
            self._axes[group] = known.get(ranks, made_up)
        return self._axes[group]


class CountedWork:
    """A collective under way, whose `wait` is counted. Everything else is the work's own."""

    def __init__(self, work: Any, begun: Collective, meter: Meter) -> None:
        self._work, self._begun, self._meter = work, begun, meter
        self._since: float | None = time.perf_counter()

    def wait(self, *args: Any, **options: Any) -> Any:
        since, self._since = self._since, None
        with self._meter.waiting(self._begun, since):
            return self._work.wait(*args, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)
