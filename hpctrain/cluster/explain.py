"""Why a rank has the GPU, NIC and CPUs that it has, and why a NIC is a rail or none: in sentences. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hpctrain.cluster.affinity import Near, near
from hpctrain.cluster.binding import near_cpus
from hpctrain.cluster.cpus import format_list
from hpctrain.cluster.node import Distance, Gpu, Nic, Node
from hpctrain.cluster.ranktable import RankTable
from hpctrain.cluster.roles import nearest
from hpctrain.layout.layout import AXES

WORDS = {
    Distance.NVLINK: "over NVLink",
    Distance.C2C: "over a chip-to-chip link",
    Distance.PIX: "behind at most one PCIe bridge (PIX)",
    Distance.PXB: "behind several PCIe bridges (PXB)",
    Distance.PHB: "behind the same host bridge (PHB)",
    Distance.NODE: "on the same NUMA node (NODE)",
    Distance.SYS: "on another NUMA node (SYS)",
    Distance.UNKNOWN: "at a distance that no source says",
}
LINK_WORDS = {
    "nvlink": "NVLink",
    "leaf": "one leaf switch",
    "spine": "a switch above leaves",
    "core": "switches above leaves",
    "cross_rail": "another rail",
}


def of_gpu(node: Node, gpu: Gpu) -> list[str]:
    """Its NICs, CPUs and NVLinks."""
    entry = next(one for one in near(node) if one.gpu == gpu)
    first = entry.picks[0] if entry.picks else None
    out = [f"{gpu.key} of {_node(node)} is {_gpu(gpu)}.", *_nics_of(node, entry, first), _cpus_of(node, gpu)]
    links = {pair: n for pair, n in node.nvlinks.items() if gpu.key in pair}
    if links:
        counts = sorted(set(links.values()))
        spread = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        out.append(f"It has {spread} NVLinks to each of {len(links)} other GPUs.")
    return out


def of_nic(node: Node, nic: Nic) -> list[str]:
    """Its role and the signals for it; the GPUs that send by it."""
    rails = [rail.name for rail in node.rails]
    role = f"rail {rails.index(nic.name)}" if nic.name in rails else nic.role
    out = [f"{nic.name} of {_node(node)} is {_nic(nic)}."]
    verdict = {"unknown": "What it is for cannot be told"}.get(role, f"It is {role}")
    out.append(f"{verdict}: {nic.why or 'no signal says otherwise'}.")
    measured = {gpu.key: node.distance(gpu.key, nic.name) for gpu in node.gpus}
    for distance in sorted(set(measured.values())):
        mine = [key for key, d in measured.items() if d is distance]
        out.append(f"{_listed(mine)} {'is' if len(mine) == 1 else 'are'} {WORDS[distance]}.")
    sending = [entry.gpu.key for entry in near(node) if any(pick.name == nic.name for pick in entry.picks)]
    if nic.role == "rail":
        out.append(f"NCCL gives it to {_listed(sending)}." if sending else "NCCL gives it to no GPU first.")
    else:
        out.append("It is not in NCCL_IB_HCA: no rank sends by it.")
    return out


def of_rank(table: RankTable, rank: int) -> list[str]:
    """Its host, GPU, NIC, CPUs, and by which links its groups reach each other."""
    place, layout = table[rank], table.layout
    wide = [f"{axis} {getattr(place, axis)} of {getattr(layout, axis)}" for axis in AXES if getattr(layout, axis) > 1]
    out = [
        f"Rank {rank} of {len(table)} is {', '.join(wide) or 'the only one'}; on {place.host} it is local rank "
        f"{place.local_rank} of {len(table.ranks_of(place.host))}."
    ]
    node = table.described(place.host)
    gpu = None if node is None else next((g for g in node.gpus if g.index == place.gpu), None)
    if node is None or gpu is None:
        out.append(f"Its device is number {place.gpu} of the node; what the node is like is not known.")
        if place.cpus:
            out.append(f"It runs on CPUs {format_list(place.cpus)}: those of the node, shared by its ranks.")
    else:
        turn = "" if place.gpu == place.local_rank else ", as the order of ranks on the node is not that of GPUs"
        out.append(f"It computes on {gpu.key}, {_gpu(gpu)}{turn}.")
        entry = next(one for one in near(node) if one.gpu == gpu)
        out += _nics_of(node, entry, node.rails[place.rail] if place.rail < len(node.rails) else None)
        out.append(_bound(table, place.host, rank, node, gpu))
    if place.leaf:
        others = len(set(table.node[table.leaf == table.leaf[rank]].tolist())) - 1
        words = f"which {others} other hosts of this job have too" if others else "which no other host of this job has"
        out.append(f"Rail {place.rail} of {place.host} hangs on {place.leaf}, {words}.")
    out += _groups(table, rank)
    return out


def _groups(table: RankTable, rank: int) -> Iterator[str]:
    """By which links a rank reaches the next of its groups."""
    layout = table.layout
    for axis in AXES:
        if getattr(layout, axis) < 2:
            continue
        group = layout.group_of(rank, axis)
        step = group.index(rank) + 1
        if axis == "pp" and step == len(group):
            yield "It holds the last stage of its pipeline."
            continue
        after = group[step % len(group)]
        there = table[after]
        yield f"Next on {axis} is rank {after} on {there.host}, over {LINK_WORDS[table.link(rank, after)]}."


def _nics_of(node: Node, entry: Near, sends: Nic | None) -> list[str]:
    if sends is None:
        return [f"No NIC of {_node(node)} is known to be a rail, so it sends by whichever NCCL finds."]
    names = [nic.name for nic in entry.nics]
    rails = [rail.name for rail in node.rails]
    distance = node.distance(entry.gpu.key, sends.name)
    out = [f"It sends by {sends.name} (rail {rails.index(sends.name)}), which is {WORDS[distance]}."]
    if len(names) > 1:
        taken = _listed([pick.name for pick in entry.picks])
        out.append(f"{_listed(names)} are as near; NCCL takes {taken} for {entry.gpu.key}.")
    others = [nic for nic in node.rails if nic.name not in names]
    further, following = nearest(node, entry.gpu.key, others)
    if following:
        out.append(f"The next nearest {_are('rail', following)} {WORDS[further]}.")
    out.append(f"{sends.name} is a rail by these signals: {sends.why}.")
    closer = [nic for nic in entry.any_nics if nic.role != "rail" and entry.any_distance <= entry.distance]
    out += [f"{nic.name} is no farther, but is {_role(nic)}: {nic.why}." for nic in closer]
    return out


def _cpus_of(node: Node, gpu: Gpu) -> str:
    numa, cpus = near_cpus(node, gpu)
    if not cpus:
        return "Which CPUs are near it is not known, so a rank there is not bound."
    where = "its source names them" if numa is None else f"NUMA node {numa} is near it"
    memory = (
        f"; NUMA nodes {_listed(list(map(str, gpu.memory)))} are its own memory, without CPUs" if gpu.memory else ""
    )
    return f"Near are CPUs {format_list(cpus)}: {where}{memory}."


def _bound(table: RankTable, host: str, rank: int, node: Node, gpu: Gpu) -> str:
    numa, cpus = near_cpus(node, gpu)
    mine = table[rank].cpus
    if not mine:
        return "Which CPUs are near it is not known, so it is not bound."
    sharing = sum(1 for other in table.gpus_of(host) if _near(node, other) == (numa, cpus))
    where = f"those of NUMA node {numa}" if numa is not None else "those that are near"
    return (
        f"It runs on CPUs {format_list(mine)}, its part of {where} ({format_list(cpus)}), which {sharing} ranks share."
    )


def _near(node: Node, index: int) -> object:
    gpu = next((g for g in node.gpus if g.index == index), None)
    return None if gpu is None else near_cpus(node, gpu)


def _node(node: Node) -> str:
    return node.name or "the node"


def _gpu(gpu: Gpu) -> str:
    said = [gpu.name, f"at {gpu.pci}" if gpu.pci else "", gpu.uuid]
    return ", ".join(filter(None, said)) or "known by its number alone"


def _nic(nic: Nic) -> str:
    rate = f"{nic.rate_gbit:g} Gbit/s" if nic.rate_gbit else ""
    said = ["a port", nic.link_layer, rate, nic.state, f"at {nic.pci}" if nic.pci else "", nic.interface]
    return ", ".join(filter(None, said))


def _role(nic: Nic) -> str:
    return "not known to be a rail" if nic.role == "unknown" else f"for {nic.role}"


def _are(what: str, nics: Sequence[Nic]) -> str:
    names = _listed([nic.name for nic in nics])
    return f"{what}, {names}, is" if len(nics) == 1 else f"{what}s, {names}, are"


def _listed(names: Sequence[str]) -> str:
    """`a, b and c`; of many the first few and a count."""
    names = [*names[:6], f"{len(names) - 6} more"] if len(names) > 7 else list(names)
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}" if names else "none"
