"""Results that nobody measured."""

from __future__ import annotations

from hpctrain.comms.groups import Where
from hpctrain.comms.result import Result, Row
from hpctrain.comms.spec import Spec


def row(
    size: int = 1 << 20, seconds: float = 1e-3, ranks: int = 4, jitter: float = 0.0, iterations: int = 20, **kept
) -> Row:
    """A row whose iterations lie evenly between seconds (1 - jitter) and seconds (1 + jitter)."""
    steps = [seconds * (1 + jitter * (2 * i / max(1, iterations - 1) - 1)) for i in range(iterations)]
    fields = dict(operation="all_reduce", backend="gloo", groups="world", dtype="float32", placement="in_place")
    fields |= dict(reduction="sum", checked=2) | kept
    return Row(ranks=tuple(range(ranks)), size=size, count=size // 4, times=(tuple(steps),) * ranks, **fields)


def result(*rows: Row, **kept) -> Result:
    where = tuple(Where(f"n{rank // 2}", rank % 2, 100 + rank) for rank in range(4))
    spec = Spec(sizes=tuple(sorted({r.size for r in rows if r.size})) or (1,)).plain()
    times = dict(start="2026-01-02T03:04:05+00:00", end="2026-01-02T03:04:09+00:00")
    return Result(spec, rows, where, {"variables": {"NCCL_ALGO": "Ring"}}, library="NCCL 2.27.7", **(times | kept))
