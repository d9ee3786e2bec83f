"""Activations that wait for their backward elsewhere: in memory of the host, or on its disk.

What is moved are whole storages, each once however many tensors of it autograd saves, and they come back with the
same strides: backward computes with the same bits by the same kernels. Parameters stay where they are, and so does what
every layer is given alike (masks, rotary tables).

Of a layer all that was saved comes back at its first use in backward, and the layer before it begins to. Copies to and
from a GPU have a stream of their own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hpctrain.config.schema import OffloadConfig
from hpctrain.parallel.pages import aligned, view_bytes
from hpctrain.scratch import Disk, ScratchFile, Transfer, align
from hpctrain.telemetry.disk import disk_rates

LEAST = 1 << 14
"""Bytes under which a storage stays: to move it costs more than it spares."""


class Shelf(ABC):
    """Where bytes wait. What one call returns is what the next one is given, and each is made once."""

    @abstractmethod
    def put(self, values: Tensor) -> Any:
        """Begin to take them, [n] uint8."""

    @abstractmethod
    def begin(self, ticket: Any) -> Any:
        """Begin to bring them back."""

    @abstractmethod
    def end(self, ticket: Any) -> Tensor:
        """They are back on their device."""

    def drop(self, ticket: Any) -> None:
        """They were put and are not wanted again."""


class HostShelf(Shelf):
    """Memory of the host, page-locked where there is a GPU.

    Args:
        device: where the rank computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def put(self, values: Tensor) -> Tensor:
        if self._stream is None:
            return values.clone()
        out = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            out.copy_(values, non_blocking=True)
        values.record_stream(self._stream)
        return out

    def begin(self, ticket: Tensor) -> Tensor:
        if self._stream is None:
            return ticket
        with torch.cuda.stream(self._stream):
            return ticket.to(self._device, non_blocking=True)

    def end(self, ticket: Tensor) -> Tensor:
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
            ticket.record_stream(torch.cuda.current_stream())
        return ticket


class DiskShelf(Shelf):
    """A scratch file, with memory of the host for what is on its way.

    Args:
        file: grows as needed.
        disk: moves blocks.
        device: where the rank computes.
    """

    def __init__(self, file: ScratchFile, disk: Disk, device: torch.device) -> None:
        self._file, self._disk, self._device = file, disk, device
        self._pinned = device.type == "cuda"
        self._free: dict[int, list[int]] = defaultdict(list)
        self._leaving: list[tuple[Tensor, Transfer]] = []

    def put(self, values: Tensor) -> tuple[int, int, Transfer]:
        size, room = values.numel(), align(values.numel())
        buffer = aligned(room, self._pinned)
        buffer[:size].copy_(values)
        offset = self._free[room].pop() if self._free[room] else self._file.grow(room)
        while len(self._leaving) >= LEAVING:
            self._leaving.pop(0)[1].wait()
        transfer = self._disk.write(self._file, offset, view_bytes(buffer))
        self._leaving = [(b, t) for b, t in self._leaving if not t.done()] + [(buffer, transfer)]
        return offset, size, transfer

    def begin(self, ticket: tuple[int, int, Transfer]) -> tuple[int, int, Tensor, Transfer]:
        offset, size, written = ticket
        written.wait()
        buffer = aligned(align(size), self._pinned)
        return offset, size, buffer, self._disk.read(self._file, offset, view_bytes(buffer))

    def end(self, ticket: tuple[int, int, Tensor, Transfer]) -> Tensor:
        offset, size, buffer, read = ticket
        read.wait()
        self._free[buffer.numel()].append(offset)
        return buffer[:size].to(self._device)

    def drop(self, ticket: tuple[int, int, Transfer]) -> None:
        offset, size, written = ticket
        written.wait()
        self._free[align(size)].append(offset)


LEAVING = 4
"""Storages that are written to a disk at the same time."""


def make_shelf(settings: OffloadConfig, device: torch.device) -> Shelf | None:
    """The shelf that `sharding.offload.activations` asks for; None where activations stay.

    Raises:
        ConfigError: the disk cannot be used.
    """
    if settings.activations == "none":
        return None
    if settings.activations == "cpu":
        return HostShelf(device)
    rates = disk_rates(settings.folder)
    return DiskShelf(ScratchFile(settings.folder, 0), Disk(rates.block, rates.threads), device)


class _Parcel:
    """A storage that has left."""

    def __init__(self, shelf: Shelf, values: Tensor) -> None:
        self._shelf = shelf
        self._coming: Any = None
        self._back: Tensor | None = None
        self._there: Any = shelf.put(values)

    def __del__(self) -> None:
        if self._there is not None:
            self._shelf.drop(self._there)

    def begin(self) -> None:
        """Begin to bring it back, if nobody has."""
        if self._there is not None:
            self._coming, self._there = self._shelf.begin(self._there), None

    def bytes(self) -> Tensor:
        """All of it, [n] uint8."""
        if self._back is None:
            self.begin()
            self._back, self._coming = self._shelf.end(self._coming), None
        return self._back


class _Frame:
    """What one layer has put away, and what the layer before it has."""

    def __init__(self, before: _Frame | None) -> None:
        self.parcels: list[_Parcel] = []
        self._before = before

    def fetch(self) -> None:
        """Begin to bring all of it back, and then what is wanted next."""
        for parcel in self.parcels:
            parcel.begin()
        if self._before is not None:
            for parcel in self._before.parcels:
                parcel.begin()
            self._before = None
        self.parcels = []


class Away:
    """A tensor that is away: a view of a storage on a shelf."""

    def __init__(self, frame: _Frame, parcel: _Parcel, tensor: Tensor) -> None:
        self._frame, self._parcel, self._dtype = frame, parcel, tensor.dtype
        self._size, self._stride, self._offset = tensor.size(), tensor.stride(), tensor.storage_offset()
        self._grad = tensor.requires_grad

    def back(self) -> Tensor:
        """The tensor again, with its strides."""
        self._frame.fetch()
        whole = self._parcel.bytes().view(self._dtype)
        out = whole.as_strided(self._size, self._stride, whole.storage_offset() + self._offset)
        return out.requires_grad_(self._grad) if self._grad else out


class Stash:
    """Puts a layer's activations on a shelf while they wait.

    Args:
        shelf: where.
        least: bytes of a storage that is put there.
    """

    def __init__(self, shelf: Shelf, least: int = LEAST) -> None:
        self._shelf, self._least = shelf, least
        self._last: _Frame | None = None
        self._open: _Open | None = None

    @contextmanager
    def layer(self, first: bool, stay: Sequence[Any]) -> Iterator[None]:
        """While this holds, what autograd saves goes to the shelf.

        Args:
            first: no layer that comes before has run in this forward.
            stay: among them tensors that are not this layer's alone.
        """
        frame = _Frame(None if first else self._last)
        opened = _Open(self._shelf, self._least, frame, stay)
        outer, self._open = self._open, opened
        try:
            with torch.autograd.graph.saved_tensors_hooks(opened.pack, unpack):
                yield
        finally:
            self._open, self._last = outer, frame
            opened.close()

    def pack(self, tensor: Tensor) -> Tensor | Away:
        """Put a tensor of the layer that is running away, or leave it."""
        return tensor if self._open is None else self._open.pack(tensor)


class _Open:
    """A layer that is running."""

    def __init__(self, shelf: Shelf, least: int, frame: _Frame, stay: Sequence[Any]) -> None:
        self._shelf, self._least, self._frame = shelf, least, frame
        self._stay = {t.untyped_storage()._cdata for t in stay if isinstance(t, Tensor) and not t.requires_grad}
        self._gone: dict[int, tuple[torch.UntypedStorage, _Parcel]] = {}

    def pack(self, tensor: Tensor) -> Tensor | Away:
        """Put a tensor away, or leave it."""
        storage = tensor.untyped_storage()
        own = isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
        used = tensor.numel() * tensor.element_size()
        if own or storage._cdata in self._stay or storage.nbytes() < self._least or 2 * used < storage.nbytes():
            return tensor
        if storage._cdata not in self._gone:
            values = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload]
            parcel = _Parcel(self._shelf, values)
            self._frame.parcels.append(parcel)
            self._gone[storage._cdata] = storage, parcel
        return Away(self._frame, self._gone[storage._cdata][1], tensor)

    def close(self) -> None:
        """Let go of what was put away: autograd keeps the hook, and with it this object, as long as what it saved."""
        self._gone.clear()


class Elsewhere(Protocol):
    """A tensor that is not there."""

    def back(self) -> Tensor:
        """The tensor again, with its strides."""


def unpack(packed: Tensor | Elsewhere) -> Tensor:
    """A tensor, wherever it was."""
    return packed if isinstance(packed, Tensor) else packed.back()
