"""Where boxes of a tensor meet, and where what they share lies in each."""

from __future__ import annotations

from hpctrain.layout.placement import Index

Region = tuple[Index, Index]
"""Start and shape."""


def meet(a: Region, b: Region) -> Region | None:
    """What two regions share; None where that is nothing."""
    start = tuple(max(x, y) for x, y in zip(a[0], b[0]))
    stop = tuple(min(x + m, y + n) for x, m, y, n in zip(a[0], a[1], b[0], b[1]))
    if any(e <= s for s, e in zip(start, stop)):
        return None
    return start, tuple(e - s for s, e in zip(start, stop))


def within(region: Region, origin: Index) -> tuple[slice, ...]:
    """Slices of a region in an array that begins at `origin`."""
    return tuple(slice(s - o, s - o + n) for s, n, o in zip(region[0], region[1], origin))
