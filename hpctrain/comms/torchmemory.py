"""Tensors of torch, on the CPU or on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hpctrain.comms.memory import Buffer, Combine, too_large


class TorchMemory:
    """See `memory.Memory`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def kind(self) -> str:
        return self.device.type

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self.device) if self.kind == "cuda" else "cpu"

    def zeros(self, elements: int, dtype: str) -> Buffer:
        try:
            return torch.zeros(elements, dtype=getattr(torch, dtype), device=self.device)
        except (RuntimeError, MemoryError):  # the allocators of the host and of CUDA
            raise too_large(elements, dtype, self.name) from None

    def table(self, values: Sequence[float], dtype: str) -> Buffer:
        return torch.tensor(values, dtype=torch.float64, device=self.device).to(getattr(torch, dtype))

    def places(self, start: int, count: int) -> Buffer:
        return torch.arange(start, start + count, dtype=torch.int64, device=self.device)

    def doubles(self, part: Buffer, dtype: str) -> Buffer:
        return part.double()

    def combine(self, reduction: str) -> Combine | None:
        return {
            "sum": lambda into, other: into.add_(other),
            "prod": lambda into, other: into.mul_(other),
            "max": lambda into, other: torch.maximum(into, other, out=into),
            "min": lambda into, other: torch.minimum(into, other, out=into),
        }.get(reduction)

    def product(self, side: int, dtype: str) -> Callable[[], object]:
        a, b, out = (torch.ones(side, side, dtype=getattr(torch, dtype), device=self.device) for _ in range(3))
        return lambda: torch.mm(a, b, out=out)

    def finish(self) -> None:
        if self.kind == "cuda":
            torch.cuda.synchronize(self.device)
