"""Where the offloaded state of a rank lies: fragments in slots, slots in chunks, chunks near or far. No torch.

What a rank keeps of each parameter, its fragment, gets a slot in one row of elements; slots begin at multiples of
`UNIT`, so that a fragment's values in any precision begin at a multiple of what a disk wants. The row is cut into
chunks, and a chunk is what is read, updated and written together: how much memory that takes depends on the size of a
chunk and not on the model. A share of the chunks is far, on the host or the disk; the others stay near.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

UNIT = 2048
"""Elements: 4 KiB in the narrowest precision, 2 bytes."""


@dataclass(frozen=True)
class Slot:
    """Place of one fragment.

    Attributes:
        name: of the parameter.
        group: of the optimizer; a chunk holds slots of one group alone.
        base: first element in the row.
        numel: elements of the fragment.
    """

    name: str
    group: int
    base: int
    numel: int


@dataclass(frozen=True)
class Chunk:
    """A stretch of the row.

    Attributes:
        index: its place among all chunks.
        group: of the optimizer.
        base: first element in the row.
        size: elements.
        far: it does not stay near.
        at: elements of the chunks before it that are as far.
    """

    index: int
    group: int
    base: int
    size: int
    far: bool
    at: int


@dataclass(frozen=True)
class Span:
    """A stretch that a slot and a chunk share: where it begins in each, and its elements."""

    slot: Slot
    chunk: Chunk
    in_slot: int
    in_chunk: int
    numel: int


class Row:
    """All slots and chunks of a rank.

    Args:
        fragments: (name, group, numel) of each, groups in order.
        chunk: elements of a chunk at most; a multiple of `UNIT`.
        share: of the elements that are far, as exactly as chunks allow, evenly spread.
    """

    def __init__(self, fragments: Sequence[tuple[str, int, int]], chunk: int, share: float) -> None:
        assert chunk % UNIT == 0 and 0.0 <= share <= 1.0, (chunk, share)
        self.slots: dict[str, Slot] = {}
        self.chunks: list[Chunk] = []
        self._totals = [0, 0]
        base = first = 0
        for at, (name, group, numel) in enumerate(fragments):
            self.slots[name] = Slot(name, group, base, numel)
            base += -(-numel // UNIT) * UNIT
            if at + 1 == len(fragments) or fragments[at + 1][1] != group:
                for start in range(first, base, chunk):
                    self._append(group, start, min(chunk, base - start), share)
                first = base
        self.size = base
        self._bases = [c.base for c in self.chunks]
        self._ordered = list(self.slots.values())
        self._starts = [s.base for s in self._ordered]

    def _append(self, group: int, base: int, size: int, share: float) -> None:
        far = self._totals[True] + size / 2 <= share * (base + size)
        self.chunks.append(Chunk(len(self.chunks), group, base, size, far, self._totals[far]))
        self._totals[far] += size

    @property
    def near(self) -> int:
        """Elements of all near chunks."""
        return self._totals[False]

    @property
    def far(self) -> int:
        """Elements of all far chunks."""
        return self._totals[True]

    @property
    def largest(self) -> int:
        """Elements of the largest chunk."""
        return max((c.size for c in self.chunks), default=0)

    def of_slot(self, slot: Slot, start: int = 0, numel: int | None = None) -> Iterator[Span]:
        """The spans of a stretch of a slot, in order; all of it by default."""
        at, end = slot.base + start, slot.base + start + (slot.numel - start if numel is None else numel)
        index = bisect.bisect_right(self._bases, at) - 1
        while at < end:
            chunk = self.chunks[index]
            size = min(end, chunk.base + chunk.size) - at
            yield Span(slot, chunk, at - slot.base, at - chunk.base, size)
            at, index = at + size, index + 1

    def of_chunk(self, chunk: Chunk) -> Iterator[Span]:
        """The spans of all slots that lie in a chunk, in order."""
        end = chunk.base + chunk.size
        for slot in self._ordered[bisect.bisect_right(self._starts, chunk.base) - 1 :]:
            if slot.base >= end:
                break
            low, high = max(slot.base, chunk.base), min(slot.base + slot.numel, end)
            if low < high:
                yield Span(slot, chunk, low - slot.base, low - chunk.base, high - low)
