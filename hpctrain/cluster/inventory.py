"""What files say about a cluster, sorted by what they are: nodes, switches, gres.conf."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hpctrain.cluster import gres, readfabric
from hpctrain.cluster.fabric import Fabric
from hpctrain.cluster.gres import GresConf, read_gres
from hpctrain.cluster.merge import merge
from hpctrain.cluster.node import Node
from hpctrain.cluster.read import read_node, read_text, text_of
from hpctrain.cluster.readfabric import fabric_in
from hpctrain.cluster.roles import assign_roles
from hpctrain.errors import ConfigError

JOINT = "+"
"""Between files that are readings of one node."""


@dataclass(frozen=True)
class Inventory:
    """What was read.

    Attributes:
        nodes: each with a name of its own, and with roles for its NICs.
        fabric, gres: None where no file is one.
    """

    nodes: tuple[Node, ...] = ()
    fabric: Fabric | None = None
    gres: GresConf | None = None


def read_inventory(files: Sequence[str]) -> Inventory:
    """Read files of any kind.

    Args:
        files: paths; several with + between them are readings of one node, the most trusted first.

    Raises:
        ConfigError: one of them is nothing known, or two are fabrics.
    """
    readings: list[Node] = []
    fabrics: list[Fabric] = []
    conf: GresConf | None = None
    for name in files:
        if JOINT in name and not Path(name).exists():
            parts = [Path(part) for part in name.split(JOINT)]
            readings.append(_named(merge([read_node(part) for part in parts]), parts[0]))
            continue
        path = Path(name)
        if path.is_dir():
            readings.append(_named(read_node(path), path))
            continue
        text = text_of(path)
        if readfabric.looks_like(text):
            fabrics.append(fabric_in(text, path.name))
        elif gres.looks_like(text):
            found = read_gres(text)
            conf = found if conf is None else GresConf(conf.lines + found.lines, conf.problems + found.problems)
        else:
            readings.append(_named(read_text(text, path.name), path))
    if len(fabrics) > 1:
        raise ConfigError("files", " ".join(files), "two of them are fabrics", "give one")
    return Inventory(tuple(map(assign_roles, distinct(readings))), fabrics[0] if fabrics else None, conf)


def distinct(nodes: Iterable[Node]) -> list[Node]:
    """Nodes with names that are told apart: a number behind those that occur twice."""
    seen: dict[str, int] = {}
    out = []
    for node in nodes:
        seen[node.name] = seen.get(node.name, 0) + 1
        again = seen[node.name] > 1
        out.append(replace(node, name=f"{node.name}#{seen[node.name]}") if again else node)
    return out


def _named(node: Node, path: Path) -> Node:
    """The node with a name: its own, else that of its file."""
    return node if node.name else replace(node, name=path.name.split(".")[0] or path.name)
