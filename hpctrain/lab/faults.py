"""Faults on purpose, beside the death of a node (`nodes.kill_node`), and the way back from all of them."""

from __future__ import annotations

from hpctrain.errors import LabError
from hpctrain.lab import fabric, folder, machines, nodes
from hpctrain.lab.client import Cluster
from hpctrain.lab.fabric import Link
from hpctrain.lab.spec import SPINE, LabSpec

REASON = "hpctrain lab drain"


def targets(spec: LabSpec, text: str) -> list[Link]:
    """Links to leaves by name: `n3` is all of a node, `rail1` that of every node, `n3:rail1` one; so also `spine`.

    Raises:
        LabError: there is no such link, or the lab has no rails.
    """
    fabric.check(spec)
    every = [link for name in (*spec.node_names, SPINE) for link in fabric.links(spec, name) if link.rail is not None]
    found = [link for link in every if text in (link.machine, link.interface, str(link))]
    if not found:
        raise LabError(
            f"the lab has no link {text!r}: name a node (n0 to n{spec.nodes - 1}), a rail (rail0 to "
            f"rail{spec.rails - 1}), one link (n0:rail0), or spine."
        )
    return found


def link_down(spec: LabSpec, target: str) -> None:
    """Take the carrier from links, as if their cables were pulled.

    Raises:
        LabError: there are none of that name.
    """
    with folder.locked(spec.folder):
        fabric.unplug(spec, [link for link in targets(spec, target) if machines.init(spec, link.machine)])


def slow(spec: LabSpec, target: str, mbit: int) -> None:
    """Limit links to another rate, Mbit/s each way.

    Raises:
        LabError: there are none of that name, or no such rate.
    """
    if not 1 <= mbit <= 10_000:
        raise LabError(f"a link cannot have {mbit} Mbit/s: choose from 1 to 10000.")
    with folder.locked(spec.folder):
        fabric.shape(spec, [link for link in targets(spec, target) if machines.init(spec, link.machine)], mbit)


def drain_node(cluster: Cluster, name: str) -> None:
    """Have Slurm give no more jobs to a node, as its administrator would.

    Raises:
        LabError: there is no such node.
    """
    nodes.known(cluster.spec, name)
    cluster.run(["scontrol", "update", f"nodename={name}", "state=drain", f"reason={REASON}"])


def heal(cluster: Cluster) -> list[str]:
    """Undo every fault: dead nodes come back, drained ones are resumed, links are as they were when the lab came up.

    Returns:
        What was found, a few words each.

    Raises:
        LabError: a node does not come back.
    """
    spec = cluster.spec
    with folder.locked(spec.folder):
        found = [said.replace(" is ", " was ") for said in fabric.amiss(spec)]
        lost = nodes.lost(spec)
        for name in (*spec.node_names, SPINE) if spec.rails else ():
            if machines.init(spec, name):
                fabric.configure(spec, name)
        nodes.revive(spec, lost)
        drained = [name for name, state in cluster.node_states().items() if state.startswith("drain")]
        for name in drained:
            cluster.run(["scontrol", "update", f"nodename={name}", "state=resume"])
        if drained:
            nodes.await_usable(spec, drained)
    return [*(f"{name} was dead" for name in lost), *(f"{name} was drained" for name in drained), *found]
