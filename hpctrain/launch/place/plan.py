"""Where each rank of a job goes and what it is there, as far as that is known before there is an allocation. Pure.

The table itself is `cluster/ranktable.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from hpctrain.cluster.cpus import format_list
from hpctrain.cluster.ranktable import Place, RankTable, rank_table
from hpctrain.config.schema import RunConfig
from hpctrain.layout.layout import AXES, Layout


def rank_plan(config: RunConfig) -> RankTable:
    """All ranks in order. Nodes are filled one after the other, as `srun --distribution=block` does; their names are
    not known yet."""
    nodes, per_node = config.cluster.nodes, config.cluster.gpus_per_node
    layout = Layout.of(config.parallel, nodes * per_node)
    return rank_table(layout, [f"node{i}" for i in range(nodes)], per_node=per_node, order="given")


def rows(places: Iterable[Place]) -> list[dict[str, Any]]:
    """For JSON, of a job whose nodes are not known: rank, index of the node, place on it, coordinates."""
    return [{key: getattr(place, key) for key in ("rank", "node", "local_rank", *AXES)} for place in places]


def known_rows(table: RankTable) -> list[dict[str, Any]]:
    """For JSON, of a job whose nodes are known or can be foreseen: what is known of each rank."""
    full = [{**place.plain(), "cpus": format_list(place.cpus)} for place in table]
    always = ("rank", "host", "local_rank", *AXES, "gpu")
    known = [key for key in full[0] if key != "node" and any(row[key] not in ("", None) for row in full)]
    return [{key: row[key] for key in dict.fromkeys((*always, *known))} for row in full]


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
