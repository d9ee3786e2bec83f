"""Slurm's picture of a fabric, unfolded by what nodes are like.

topology/tree knows one leaf switch a host, so tools write the leaves of all its rails as one (topograph,
slurmibtopology). topology/block knows groups of hosts, which are NVLink domains on racks of GB200 and any other unit
elsewhere. Which it is stands in none of Slurm's files: nodes tell it, or a site does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Literal

from hpctrain.cluster.fabric import Fabric
from hpctrain.cluster.node import Node
from hpctrain.cluster.slurmconf import some

Leaves = Literal["auto", "separate", "shared"]
"""Leaf switches of the rails of a host of which one is told: a switch each, one for all, or not said."""

Domains = Literal["auto", "blocks", "hosts"]
"""NVLink domains: blocks of Slurm's topology, hosts, or as GPUs say."""

RACK = re.compile(r"\bGB[23]00\b")
"""Names of GPUs that are built into racks of one NVLink domain. Where NVML tells the domain, names do not count: the
same GPUs are on boards of four, too."""

Nodes = Mapping[str, Node] | Node | None


def unfolded(
    fabric: Fabric | None, nodes: Nodes, leaves: Leaves = "auto", domains: Domains = "auto", rails: int = 0
) -> Fabric | None:
    """The fabric with a leaf for each rail, and with those NVLink domains that nodes confirm.

    Args:
        nodes: what is known of each host, or of one that all are like.
        leaves, domains: what the site says.
        rails: of a host whose NICs are not known.

    Returns:
        the same where nothing has to be unfolded.
    """
    told = _cliques(nodes)
    if fabric is None:
        return Fabric(domains=told, sources=("NVML",)) if told else None
    return _railed(_linked(fabric, nodes, domains, told), nodes, leaves, rails)


def spans_nodes(node: Node) -> bool:
    """Whether NVLink leaves a node: NVML tells a clique of it, or else its GPUs are those of such racks."""
    told = [gpu.clique for gpu in node.gpus if gpu.clique is not None]
    return any(told) if told else any(RACK.search(gpu.name) for gpu in node.gpus)


def _each(nodes: Nodes) -> Iterator[Node]:
    if isinstance(nodes, Mapping):
        yield from nodes.values()
    elif nodes is not None:
        yield nodes


def _cliques(nodes: Nodes) -> dict[str, str]:
    """The clique of each host, where hosts were read one by one."""
    if not isinstance(nodes, Mapping):
        return {}
    found = {host: {gpu.clique for gpu in node.gpus} for host, node in nodes.items()}
    return {host: f"clique {next(iter(one))}" for host, one in found.items() if len(one) == 1 and all(one)}


def _linked(fabric: Fabric, nodes: Nodes, domains: Domains, told: Mapping[str, str]) -> Fabric:
    """Domains of Slurm's blocks, if they are any; those of NVML go before them."""
    if domains == "hosts":
        return replace(fabric, domains={})
    if fabric.kind != "block" or domains == "blocks" or not fabric.domains:
        return replace(fabric, domains={**fabric.domains, **told}) if told else fabric
    known = list(_each(nodes))
    if known and all(map(spans_nodes, known)):
        inside: dict[str, set[str]] = {}
        for host, clique in told.items():
            inside.setdefault(fabric.domains.get(host, ""), set()).add(clique)
        split = [block for block, cliques in inside.items() if block and len(cliques) > 1]
        said = (f"{some(split)}: blocks of several NVLink domains by NVML, which counts",) if split else ()
        return replace(fabric, domains={**fabric.domains, **told}, problems=(*fabric.problems, *said))
    why = "NVLink of these GPUs does not leave a node" if known else "what GPUs the nodes have is not known"
    said = (f"blocks are not taken for NVLink domains: {why} (nvlink_domains: blocks in a profile says that they are)",)
    return replace(fabric, domains=told, problems=(*fabric.problems, *said))


def _railed(fabric: Fabric, nodes: Nodes, leaves: Leaves, rails: int) -> Fabric:
    """A leaf for each rail of a host for which one is told."""
    wide = max((len(node.rails) for node in _each(nodes)), default=0) or (rails if leaves == "separate" else 0)
    if leaves == "shared" or not fabric.one_leaf or fabric.rails != 1 or wide < 2:
        return fabric
    named = {leaf: tuple(f"{leaf}/rail{r}" for r in range(wide)) for mine in fabric.leaves.values() for leaf in mine}
    above = {name: fabric.parents.get(leaf, ()) for leaf, names in named.items() for name in names}
    guess = (
        f"the {wide} rails of a host are taken to have leaf switches of their own, of which Slurm shows one "
        "(rail_leaves: separate or shared in a profile says what is right)"
    )
    return replace(
        fabric,
        leaves={host: named[mine[0]] for host, mine in fabric.leaves.items()},
        parents={**{name: up for name, up in fabric.parents.items() if name not in named}, **above},
        kind="rails" if leaves == "separate" else fabric.kind,
        problems=(*fabric.problems, *((guess,) if leaves == "auto" else ())),
    )
