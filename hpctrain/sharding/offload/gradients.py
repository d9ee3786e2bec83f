"""Gradients of a rank's fragments, summed over the micro-batches of a step: near, on the host, or on the disk."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor

from hpctrain.layout.slots import UNIT, Chunk, Row, Span
from hpctrain.parallel.pages import Buffers, view_bytes
from hpctrain.scratch import Transfer
from hpctrain.sharding.offload.states import BYTES, Far
from hpctrain.sharding.state import KINDS


class Gradients:
    """See the module's docstring.

    A fragment's gradient comes once a micro-batch. When its last part has come its norm is taken, before it leaves
    the device, so that nothing has to be read again for it.

    Args:
        row: of the rank.
        near: where near chunks live.
        far: a disk for those of far chunks, with room for them; None keeps them on the host.
        counted: whether a parameter counts here in the global norm, by name; replicas count on one rank alone.
        pinned: lock the pages of host memory.
    """

    def __init__(
        self, row: Row, near: torch.device, far: Far | None, counted: Callable[[str], bool], pinned: bool
    ) -> None:
        self._row, self._near_device, self._counted = row, near, counted
        self._far = far if far and far.gradients else None
        self._near = torch.zeros(row.near, device=near)
        self._host = torch.zeros(0 if self._far else row.far, pin_memory=pinned)
        self._buffers = Buffers(STAGES, row.largest * BYTES, pinned) if self._far else None
        self._writing: dict[tuple[str, int], Transfer] = {}
        self.begin_step(1)

    def begin_step(self, micro_batches: int) -> None:
        """Forget what came before; every fragment's gradient will come this often."""
        self._expected = micro_batches
        self._came: dict[str, int] = defaultdict(int)
        self._squares = [torch.zeros(2, dtype=torch.float64)]

    def add(self, name: str, values: Tensor) -> None:
        """Add a micro-batch's part of a fragment's gradient.

        Args:
            name: of the parameter.
            values: [numel] float32, the caller's again on return.

        Raises:
            OSError: the disk failed.
        """
        first = self._came[name] == 0
        self._came[name] += 1
        last = self._came[name] == self._expected
        for span in self._row.of_slot(self._row.slots[name]):
            part = values[span.in_slot : span.in_slot + span.numel]
            whole = self._add_on_disk(span, part, first) if self._on_disk(span.chunk) else self._add(span, part, first)
            if last:
                self._squares.append(_squares(whole, self._counted(name)))

    def finish(self) -> tuple[float, bool]:
        """Sum of the squares of the gradients that this rank counts, and whether all gradients are finite, those that
        another rank counts included.

        Raises:
            OSError: the disk failed.
        """
        missing = [n for n, slot in self._row.slots.items() if slot.numel and self._came[n] != self._expected]
        assert not missing, (missing, self._expected)
        if self._buffers:
            self._buffers.drain()
            self._writing.clear()
        if self._near_device.type == "cuda" or any(s.is_cuda for s in self._squares):
            torch.cuda.synchronize()
        squares, bad = torch.stack([s.cpu() for s in self._squares]).sum(0).tolist()
        return squares, bad == 0

    def of(self, chunk: Chunk, values: Tensor) -> Tensor:
        """The gradient of a chunk where it is updated, [size] float32, the caller's to change.

        Args:
            values: the chunk's record as `States.walk` gives it.
        """
        if self._on_disk(chunk):
            return values[len(KINDS)]
        return (self._host if chunk.far else self._near)[chunk.at : chunk.at + chunk.size]

    def _on_disk(self, chunk: Chunk) -> bool:
        return chunk.far and self._far is not None

    def _add(self, span: Span, part: Tensor, first: bool) -> Tensor:
        """Into memory. On a GPU the sum is made there, since the host would be slow at it."""
        at = span.chunk.at + span.in_chunk
        there = (self._host if span.chunk.far else self._near)[at : at + span.numel]
        if first:
            there.copy_(part, non_blocking=True)
            return part
        if there.device == part.device:
            return there.add_(part)
        total = there.to(part.device, non_blocking=True).add_(part)
        there.copy_(total, non_blocking=True)
        return total

    def _add_on_disk(self, span: Span, part: Tensor, first: bool) -> Tensor:
        assert self._far and self._buffers
        far, key = self._far, (span.slot.name, span.in_slot)
        offset = far.offset(span.chunk, len(KINDS), span.in_chunk)
        buffer = self._buffers.take()
        padded = buffer[: -(-span.numel // UNIT) * UNIT * BYTES].view(torch.float32)
        values = padded[: span.numel]
        if first:
            values.copy_(part)
            padded[span.numel :].zero_()
        else:
            if key in self._writing:
                self._writing[key].wait()
            far.disk.read(far.file, offset, view_bytes(padded)).wait()
            values.add_(part.to(values.device))
        self._writing[key] = transfer = far.disk.write(far.file, offset, view_bytes(padded))
        self._buffers.give_after(buffer, transfer.done, transfer.wait)
        return values


STAGES = 4
"""Buffers through which gradients go to the disk."""


def _squares(values: Tensor, counted: bool) -> Tensor:
    """[2] float64: sum of squares as far as it counts, and 1 if a value is not finite."""
    squares = torch.linalg.vector_norm(values, dtype=torch.float64).square()
    finite = squares.isfinite()
    return torch.stack((squares.where(finite & counted, 0.0), (~finite).double()))
