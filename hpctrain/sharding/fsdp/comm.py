"""The collectives that FSDP2 asks for, by `parallel/comm.py`: counted, and under way while the host computes.

FSDP2 hides what it sends behind computing by CUDA streams. On the CPU there are none, and by itself it waits for each
collective at once. Here a gather is waited for when its weights are unpacked, and a reduction when the next one begins,
or the engine takes the gradients: as on GPUs, no more than one unit's whole gradients wait to be sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.parallel.comm import Axis, Pending, start_all_gather_into, start_reduce_scatter_into

Reductions = list[Callable[[], None]]
"""What waits for the reduction under way, if there is one."""


class _Allocates:
    """Buffers are the allocator's."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class Gather(_Allocates):
    """All-gathers the weights of a unit.

    Args:
        axis: the ranks that share them.
        unit: name of it, for traces.
        beside: wait when the weights are unpacked; otherwise at once, or where there are streams in those.
    """

    def __init__(self, axis: Axis, unit: str, beside: bool) -> None:
        self._axis, self._unit, self._beside = axis, unit, beside

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        assert input_tensor.data_ptr() == output_tensor.view(self._axis.size, -1)[self._axis.index].data_ptr()
        self._axis.meter.mark(f"gather {self._unit}")
        pending = start_all_gather_into(output_tensor, self._axis)
        gathering = Gathering(pending, lambda: self._axis.meter.mark(f"gathered {self._unit}"))
        if self._beside:
            return gathering
        gathering.wait()
        return None


class Gathering(dist.Work):  # type: ignore[name-defined, misc]
    """A gather under way, in the form in which FSDP2 waits for it."""

    def __init__(self, pending: Pending[Tensor], ended: Callable[[], None]) -> None:
        super().__init__()
        self._pending, self._ended = pending, ended

    def wait(self, timeout: Any = None) -> bool:
        self._pending.wait()
        self._ended()
        return True


class Scatter(_Allocates):
    """Reduce-scatters the gradients of a unit, as sums.

    Args:
        axis: the ranks that share them.
        unit: name of it, for traces.
        later: takes what waits, of all units; None: wait at once, or where there are streams in those.
    """

    def __init__(self, axis: Axis, unit: str, later: Reductions | None) -> None:
        self._axis, self._unit, self._later = axis, unit, later

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Room for what is sent, once what was sent before has been let go; and for the sums."""
        if self._later is not None:
            finish(self._later)
        return super().allocate(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        assert op == dist.ReduceOp.SUM, op
        self._axis.meter.mark(f"reduce {self._unit}")
        pending = start_reduce_scatter_into(output_tensor, input_tensor, self._axis)

        def wait() -> None:
            pending.wait()
            self._axis.meter.mark(f"reduced {self._unit}")

        if self._later is None:
            wait()
        else:
            self._later.append(wait)


def finish(reductions: Reductions) -> None:
    """Wait for the reduction under way."""
    while reductions:
        reductions.pop()()


def count_sums(axis: Axis) -> Callable[[Tensor], None]:
    """What is called with each sum over replicas of the state, which FSDP2 makes itself."""

    def counted(total: Tensor) -> None:
        axis.begin("all_reduce", total.numel() * total.element_size())

    return counted
