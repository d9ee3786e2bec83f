"""Where each rank of a job goes and what it is there. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hpctrain.config.schema import RunConfig
from hpctrain.layout.layout import AXES, Layout


@dataclass(frozen=True)
class Place:
    """One rank: the index of its node, its position there, and its coordinates on the parallel axes."""

    rank: int
    node: int
    local_rank: int
    pp: int
    dp: int
    cp: int
    tp: int

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def rank_plan(config: RunConfig) -> tuple[Place, ...]:
    """All ranks in order. Nodes are filled one after the other, as `srun --distribution=block` does."""
    nodes, per_node = config.cluster.nodes, config.cluster.gpus_per_node
    layout = Layout.of(config.parallel, nodes * per_node)
    return tuple(Place(rank, *divmod(rank, per_node), **layout.coordinates(rank)) for rank in range(nodes * per_node))


def summary(places: Sequence[Place]) -> list[dict[str, str]]:
    """The plan with one row a node: its ranks, and the coordinates that occur there."""
    by_node: dict[int, list[Place]] = {}
    for place in places:
        by_node.setdefault(place.node, []).append(place)
    return [
        {
            "node": str(node),
            "ranks": _span([p.rank for p in here]),
            **{axis: _span([getattr(p, axis) for p in here]) for axis in AXES},
        }
        for node, here in by_node.items()
    ]


def _span(numbers: Sequence[int]) -> str:
    """`0-3`, `2`, or `0,2,4`."""
    unique = sorted(set(numbers))
    if len(unique) > 1 and unique == list(range(unique[0], unique[-1] + 1)):
        return f"{unique[0]}-{unique[-1]}"
    return ",".join(map(str, unique))
