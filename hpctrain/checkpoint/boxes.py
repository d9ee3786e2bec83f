"""Whether boxes cover a logical tensor exactly once, and how that is said. No files."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from hpctrain.checkpoint.manifest import Entry
from hpctrain.layout.boxes import Region, meet, within
from hpctrain.layout.placement import Index


def text(start: Index, shape: Index) -> str:
    """A region as it is written in Python: `[0:4, 2:8]`."""
    return "[" + ", ".join(f"{a}:{a + n}" for a, n in zip(start, shape)) + "]"


def first_overlap(regions: Sequence[Region]) -> tuple[Region, Region] | None:
    """Two regions that share elements; None where there are none.

    Sorted by their first row, each is compared only with those that begin before it ends, so that pieces cut
    along the first dim, which are the many ones, cost next to nothing.
    """
    order = sorted(r for r in regions if math.prod(r[1]))
    for i, a in enumerate(order):
        for b in order[i + 1 :]:
            if a[0] and b[0][0] >= a[0][0] + a[1][0]:
                break
            if meet(a, b) is not None:
                return a, b
    return None


def missing(whole: Region, parts: Iterable[Region]) -> tuple[int, Index] | None:
    """How many elements of a region are in no part, and the first of them; None where all are covered.

    Costs a byte an element: for the rare case that counting has not settled.
    """
    covered = np.zeros(whole[1], dtype=bool)
    for part in parts:
        common = meet(whole, part)
        if common is not None:
            covered[within(common, whole[0])] = True
    holes = int(covered.size - np.count_nonzero(covered))
    if not holes:
        return None
    first = np.unravel_index(int(np.argmin(covered)), covered.shape) if covered.ndim else ()
    return holes, tuple(int(i) + s for i, s in zip(first, whole[0]))


def by_tensor(entries: Iterable[Entry]) -> dict[tuple[str, str], list[Entry]]:
    """Entries of each (name, kind)."""
    tensors: dict[tuple[str, str], list[Entry]] = defaultdict(list)
    for entry in entries:
        tensors[entry.name, entry.kind].append(entry)
    return dict(tensors)


def incomplete(entries: Iterable[Entry]) -> list[str]:
    """What is wrong with a set of pieces that should cover every tensor exactly once; empty if nothing."""
    found = []
    for (name, kind), pieces in by_tensor(entries).items():
        fault = _fault(pieces)
        if fault:
            found.append(f"{kind} of {name}: {fault}")
    return found


def _fault(pieces: list[Entry]) -> str:
    shape = pieces[0].global_shape
    for what in ("global_shape", "dtype"):
        values = {getattr(p, what) for p in pieces}
        if len(values) > 1:
            return f"its pieces disagree on its {what.replace('_', ' ')}: {' and '.join(map(str, sorted(values)))}"
    for p in pieces:
        inside = len(p.start) == len(p.shape) == len(shape)
        if not inside or any(a < 0 or a + n > size for a, n, size in zip(p.start, p.shape, shape)):
            return f"piece {text(p.start, p.shape)} is not inside shape {list(shape)}"
    regions = [(p.start, p.shape) for p in pieces]
    double = first_overlap(regions)
    if double is not None:
        return f"pieces {text(*double[0])} and {text(*double[1])} overlap"
    have, want = sum(math.prod(p.shape) for p in pieces), math.prod(shape)
    return "" if have == want else f"its pieces hold {have} of {want} elements"
