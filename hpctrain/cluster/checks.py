"""What is amiss with nodes, switches and gres.conf: what, where, and how to mend it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hpctrain.cluster.affinity import differences, near, unfit
from hpctrain.cluster.fabric import Fabric
from hpctrain.cluster.gres import GresConf, mismatches
from hpctrain.cluster.inventory import Inventory
from hpctrain.cluster.node import Node
from hpctrain.cluster.switches import uneven

OWN = ("names of rails", "addresses of rails")
"""What nodes of one kind may have otherwise, as long as each is given its own."""

READ_ANEW = "read it anew, or give a further reading as FILE+FILE; if it is so, have the node looked at"


@dataclass(frozen=True)
class Finding:
    """Something amiss.

    Attributes:
        where: node or file.
        what, mend: in words.
        note: it costs nothing by itself.
    """

    where: str
    what: str
    mend: str
    note: bool = False


def findings(seen: Inventory) -> list[Finding]:
    """All that is amiss, in the order of nodes; the fabric and gres.conf last."""
    out = [found for node in seen.nodes for found in _of_node(node)]
    out += _unlike(seen.nodes)
    if seen.fabric is not None:
        out += _of_fabric(seen.fabric, seen.nodes)
    if seen.gres is not None:
        out += _of_gres(seen.gres, seen.nodes)
    return out


def _of_node(node: Node) -> Iterator[Finding]:
    if node.gpus:
        yield from (Finding(node.name, why, mend) for why, mend in unfit(node))
    for said in node.problems:
        yield Finding(node.name, said, "look at the port and its cable" if said.endswith(" is down") else READ_ANEW)
    if node.gpus and not node.rails:
        what = "none of its NICs is known to be a rail" if node.nics else "no NIC is known on it"
        yield Finding(node.name, what, "give a further reading of the node, as FILE+FILE", note=True)
    lost = [entry.gpu.key for entry in near(node) if not entry.cpus]
    if lost:
        what = f"the CPUs near {', '.join(lost)} are not known: ranks there are not bound"
        yield Finding(node.name, what, "give a further reading of the node, as FILE+FILE", note=True)


def _unlike(nodes: Sequence[Node]) -> Iterator[Finding]:
    for name, found in differences(nodes).items():
        for what, words in found.items():
            if what in OWN:
                yield Finding(name, words, "nothing: each node is bound by its own names", note=True)
            else:
                yield Finding(name, words, "leave the node out, or have it looked at")


def _of_fabric(fabric: Fabric, nodes: Sequence[Node]) -> Iterator[Finding]:
    where = " and ".join(fabric.sources) or "fabric"
    said = dict.fromkeys([*fabric.problems, *uneven(fabric.leaves)])
    yield from (Finding(where, what, "look at the cables, or mend the file") for what in said)
    hosts = set(fabric.leaves) | set(fabric.domains)
    known = [node for node in nodes if node.name in hosts]
    for node in nodes:
        if known and node.name not in hosts:
            yield Finding(node.name, "no switch of the fabric has it", "add it to the fabric, or leave it out")
        ports = [leaf for leaf in fabric.leaves.get(node.name, ()) if leaf]
        if len(ports) > 1 and node.rails and len(ports) != len(node.rails):
            what = f"it has {len(node.rails)} rails, and the fabric {len(ports)} ports of it"
            yield Finding(node.name, what, "look at its cables and at the roles of its NICs (hpctrain topo show)")


def _of_gres(conf: GresConf, nodes: Sequence[Node]) -> Iterator[Finding]:
    yield from (Finding("gres.conf", said, "mend the line") for said in conf.problems)
    for node in nodes:
        if node.gpus:
            masks = [entry.cpus for entry in near(node)]
            for said in mismatches(conf, node.name, len(node.gpus), masks):
                yield Finding(node.name, said, "make gres.conf say what is there, or have the missing GPU looked at")
