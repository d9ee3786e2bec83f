"""The rank table of one life of a job as a file: the batch script writes it, every rank reads its row.

By columns, since all ranks read all of it. What people read is `rank_table.json` in the run folder, a row a rank.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.cluster import nodefile
from hpctrain.cluster.cpus import format_list
from hpctrain.cluster.linkbytes import LINKS, LinkBytes, sends
from hpctrain.cluster.node import Node
from hpctrain.cluster.ranktable import RankTable
from hpctrain.config.schema import RunConfig
from hpctrain.errors import LaunchError
from hpctrain.layout.layout import Layout

RECORD = "rank_table.json"
"""In the run folder, for people: that of the latest life."""

_COLUMNS = ("node", "local_rank", "gpu", "rail", "leaf")


@dataclass(frozen=True)
class JobTable:
    """The rank table of one life of a job.

    Attributes:
        job, restart: which life.
        table: of its ranks.
        node: what its hosts are like; None if nothing is known.
        distribution: as srun was told: arbitrary, or block:block.
        topo_file: for NCCL; "" for none.
        cpus_per_task: that were asked for; 0: left to Slurm.
        exclusive: no other job is on its nodes.
        unfit: what is wrong with the first node, a sentence each.
        crosses: some rank sends to another rail of another host, or rails are not known to be apart.
    """

    job: str
    restart: int
    table: RankTable
    node: Node | None
    distribution: str = "block:block"
    topo_file: str = ""
    cpus_per_task: int = 0
    exclusive: bool = False
    unfit: tuple[str, ...] = ()
    crosses: bool = True

    def dump(self) -> str:
        """For the ranks."""
        table = self.table
        return json.dumps(
            {
                "job": self.job,
                "restart": self.restart,
                "layout": asdict(table.layout),
                "hosts": list(table.hosts),
                **{name: getattr(table, name).tolist() for name in _COLUMNS},
                "leaves": list(table.leaves),
                "bytes": _bytes(table.bytes),
                "slurm": {name: _bytes(counted) for name, counted in table.slurm.items()},
                "problems": list(table.problems),
                "described": None if self.node is None else nodefile.plain(self.node),
                "distribution": self.distribution,
                "topo_file": self.topo_file,
                "cpus_per_task": self.cpus_per_task,
                "exclusive": self.exclusive,
                "unfit": list(self.unfit),
                "crosses": self.crosses,
            }
        )

    def record(self) -> dict[str, Any]:
        """For people, and for programs that want to know where a rank was."""
        return {
            "job": self.job,
            "restart": self.restart,
            "distribution": self.distribution,
            "bytes": by_link(self.table),
            "problems": [*self.table.problems, *self.unfit],
            "ranks": rows(self.table),
        }


def rows(table: RankTable) -> list[dict[str, Any]]:
    """Places for JSON, CPUs as a list such as 0-13."""
    return [{**place.plain(), "cpus": format_list(place.cpus)} for place in table]


def by_link(table: RankTable) -> list[dict[str, Any]]:
    """Bytes that all ranks send in a step over each kind of link, in this order and in those that Slurm gives."""
    return [
        {
            "link": link,
            "this order": table.bytes.over(link),
            **{f"Slurm {name}": counted.over(link) for name, counted in table.slurm.items()},
        }
        for link in LINKS
    ]


def leaf_changes(table: RankTable) -> int:
    """How often the leaf switch changes from a host to the next in the order of ranks, over all rails at once."""
    first = np.unique(table.node, return_index=True)[1]
    order = table.leaf[np.sort(first)]
    return int((np.diff(order) != 0).sum())


def crosses_rails(table: RankTable, config: RunConfig | None = None) -> bool:
    """Whether some rank sends to another rail of another host, whatever the switches make of that."""
    for one in sends(table.layout, config):
        a, b = one.source, one.target
        away = (table.node[a] != table.node[b]) & (table.rail[a] != table.rail[b]) & (one.bytes > 0)
        if bool(away.any()):
            return True
    return False


def load(path: Path) -> JobTable | None:
    """The table in a file; None where there is none.

    Raises:
        LaunchError: the file is none.
    """
    try:
        text = path.read_text()
    except OSError:
        return None
    try:
        tree = json.loads(text)
        columns: dict[str, Any] = {name: np.array(tree[name], dtype=np.int64) for name in _COLUMNS}
        node = None if tree["described"] is None else nodefile.of_plain(tree["described"], str(path))
        layout = {**tree["layout"]}
        if layout["stage_layers"] is not None:
            layout["stage_layers"] = tuple(layout["stage_layers"])
        table = RankTable(
            Layout(**layout),
            tuple(tree["hosts"]),
            **columns,
            leaves=tuple(tree["leaves"]),
            nodes=node,
            bytes=_counted(tree["bytes"]),
            slurm={name: _counted(row) for name, row in tree["slurm"].items()},
            problems=tuple(tree["problems"]),
        )
        return JobTable(
            tree["job"],
            tree["restart"],
            table,
            node,
            tree["distribution"],
            tree["topo_file"],
            tree["cpus_per_task"],
            tree["exclusive"],
            tuple(tree["unfit"]),
            tree["crosses"],
        )
    except (ValueError, KeyError, TypeError) as error:
        raise LaunchError(f"{path} is no rank table ({error}): submit the job again.") from None


def _bytes(counted: LinkBytes) -> dict[str, Any]:
    return {"by_axis": {axis: dict(row) for axis, row in counted.by_axis.items()}, "relayed": counted.relayed}


def _counted(row: Mapping[str, Any]) -> LinkBytes:
    return LinkBytes(row["by_axis"], row["relayed"])
