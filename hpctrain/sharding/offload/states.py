"""Master weights and AdamW's moments of a rank, chunk by chunk: near, on the host, or on a disk."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hpctrain.layout.slots import UNIT, Chunk, Row, Span
from hpctrain.parallel.pages import Buffers, view_bytes
from hpctrain.scratch import Disk, ScratchFile, Transfer
from hpctrain.sharding.state import KINDS

Place = Literal["none", "cpu", "nvme"]

BYTES = 4
"""Of an element: state is float32."""


@dataclass(frozen=True)
class Far:
    """Chunks on a disk. A chunk's record holds its sections one after the other: the kinds of state, and where
    `gradients` are there too, the gradient.

    Attributes:
        file: has room for all records.
        disk: moves them.
        buffers: for as many records as are on their way or in use at once.
        gradients: whether the gradient lies beside the state.
    """

    file: ScratchFile
    disk: Disk
    buffers: Buffers
    gradients: bool

    def offset(self, chunk: Chunk, section: int = 0, element: int = 0) -> int:
        """Where an element of a section of a chunk's record begins."""
        return (chunk.at * self.sections + section * chunk.size + element) * BYTES

    @property
    def sections(self) -> int:
        return len(KINDS) + self.gradients


class States:
    """See the module's docstring.

    Args:
        row: of the rank.
        near: where near chunks live.
        far: where the others do: a disk, or None for memory of the host.
        pinned: lock the pages of that memory.
    """

    def __init__(self, row: Row, near: torch.device, far: Far | None, pinned: bool) -> None:
        self.row, self._far = row, far
        self._near = torch.zeros(len(KINDS), row.near, device=near)
        host = 0 if far else row.far
        self._host = torch.zeros(len(KINDS), host, pin_memory=pinned)

    def resident(self, chunk: Chunk) -> Tensor | None:
        """A chunk's values in memory, [kinds, size]; None where they are on the disk."""
        if chunk.far and self._far:
            return None
        return (self._host if chunk.far else self._near)[:, chunk.at : chunk.at + chunk.size]

    def walk(self, group: int) -> Iterator[tuple[Chunk, Tensor]]:
        """The chunks of a group in order with their values, [sections, size], to be changed until the next one is asked
        for. What is on the disk is read ahead and written behind.

        Raises:
            OSError: the disk failed.
        """
        far, chunks = self._far, [c for c in self.row.chunks if c.group == group]
        todo = deque(c for c in chunks if self.resident(c) is None)
        coming: deque[tuple[Tensor, Transfer]] = deque()

        def read_ahead(must: bool) -> None:
            while todo and far:
                buffer = far.buffers.take() if must and not coming else far.buffers.try_take()
                if buffer is None:
                    return
                chunk = todo.popleft()
                values = _record(buffer, far.sections, chunk)
                coming.append((buffer, far.disk.read(far.file, far.offset(chunk), view_bytes(values))))

        for chunk in chunks:
            values = self.resident(chunk)
            read_ahead(must=values is None)
            if values is not None:
                yield chunk, values
                continue
            assert far
            buffer, transfer = coming.popleft()
            transfer.wait()
            yield chunk, _record(buffer, far.sections, chunk)
            state = view_bytes(_record(buffer, len(KINDS), chunk))
            transfer = far.disk.write(far.file, far.offset(chunk), state)
            far.buffers.give_after(buffer, transfer.done, transfer.wait)
        if far:
            far.buffers.drain()

    def read(self, name: str, kind: str, start: int, numel: int) -> Tensor:
        """Values of a stretch of a fragment, [numel] float32, of the host; theirs alone.

        Args:
            start: in the fragment, a multiple of `UNIT`.

        Raises:
            OSError: the disk failed.
        """
        out, at = torch.empty(numel), 0
        for span in self.row.of_slot(self.row.slots[name], start, numel):
            values = self.resident(span.chunk)
            part = out[at : at + span.numel]
            if values is None:
                with _Window(self._far, span, kind) as window:
                    window.read()
                    part.copy_(window.values)
            else:
                part.copy_(_cut(values, span, kind))
            at += span.numel
        return out

    def write(self, name: str, kind: str, start: int, values: Tensor) -> None:
        """Set values of a stretch of a fragment.

        Args:
            start: in the fragment, a multiple of `UNIT`.
            values: [numel]; they end at a multiple of `UNIT` too, or with the fragment.

        Raises:
            OSError: the disk failed.
        """
        at = 0
        for span in self.row.of_slot(self.row.slots[name], start, values.numel()):
            there, part = self.resident(span.chunk), values[at : at + span.numel]
            if there is None:
                with _Window(self._far, span, kind) as window:
                    window.values.copy_(part)
                    window.write()
            else:
                _cut(there, span, kind).copy_(part)
            at += span.numel

    def close(self) -> None:
        """Give memory and disk back."""
        self._near = self._host = torch.empty(len(KINDS), 0)
        if self._far:
            self._far.file.close()
            self._far = None


def _record(buffer: Tensor, sections: int, chunk: Chunk) -> Tensor:
    """The first sections of a chunk's record in a buffer, [sections, size]."""
    return buffer[: sections * chunk.size * BYTES].view(torch.float32).view(sections, chunk.size)


def _cut(values: Tensor, span: Span, kind: str) -> Tensor:
    return values[KINDS.index(kind), span.in_chunk : span.in_chunk + span.numel]


class _Window:
    """A buffer over one kind of a span on the disk, whole units of it."""

    def __init__(self, far: Far | None, span: Span, kind: str) -> None:
        assert far and span.in_chunk % UNIT == 0, span
        self._far, self._whole = far, -(-span.numel // UNIT) * UNIT
        self._offset = far.offset(span.chunk, KINDS.index(kind), span.in_chunk)
        self._span = span

    def __enter__(self) -> _Window:
        self._buffer = self._far.buffers.take()
        self._padded = self._buffer[: self._whole * BYTES].view(torch.float32)
        self.values = self._padded[: self._span.numel]
        return self

    def __exit__(self, *_: object) -> None:
        self._far.buffers.give(self._buffer)

    def read(self) -> None:
        self._far.disk.read(self._far.file, self._offset, view_bytes(self._padded)).wait()

    def write(self) -> None:
        self._padded[self._span.numel :].zero_()
        self._far.disk.write(self._far.file, self._offset, view_bytes(self._padded)).wait()
