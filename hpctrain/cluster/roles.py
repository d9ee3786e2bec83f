"""What each NIC of a node is for, by several signals; that it cannot be told is an answer.

No one signal will do: the matrix of `nvidia-smi` says SYS everywhere on some machines, PCI is flat in others, names and
indices are in any order. A NIC near GPUs is a rail unless something speaks against it; without near ones, an even
spread over GPUs does; failing that, being the only kind of fabric port there is.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from hpctrain.cluster import pci
from hpctrain.cluster.hostlist import natural
from hpctrain.cluster.node import Distance, Nic, Node, Role

FABRIC = ("infiniband", "efa", "slingshot", "omnipath")
FAST = 100
"""Gbit/s from which an Ethernet port with verbs counts as a fabric port."""
MANY = 8
"""More NICs than this as near to one GPU are virtual functions, unless a source says that they are none."""
_MANAGEMENT = re.compile(r"(mgmt|mgt|bmc|oob|idrac|ilo|usb)|^(eno|eth0$|em\d)", re.IGNORECASE)
Verdict = tuple[Role, str]


def assign_roles(node: Node) -> Node:
    """The node with a role and a reason for each NIC, rails first and in the order of GPUs.

    Rail i is the NIC of the first GPU that has it nearest: positions, not names, are cabled alike on all nodes.
    """
    told = {nic.name: (nic.role, nic.why) for nic in node.nics if nic.role != "unknown"}
    verdicts: dict[str, Verdict] = dict(told)
    verdicts.update({name: v for name, v in _against(node).items() if name not in told})
    candidates = [nic for nic in node.nics if nic.name not in verdicts]
    problems: list[str] = []
    if not told:
        found, problems = _rails(node, candidates)
        verdicts.update(found)
    rails = [nic for nic in node.nics if verdicts.get(nic.name, ("",))[0] == "rail"]
    for nic in candidates:
        if nic.name not in verdicts:
            verdicts[nic.name] = _other(node, nic, rails)
    judged = [replace(nic, role=verdicts[nic.name][0], why=verdicts[nic.name][1]) for nic in node.nics]
    problems += [f"rail {nic.name} is down" for nic in judged if nic.role == "rail" and nic.state == "down"]
    order = {nic.name: i for i, nic in enumerate(node.nics)} if told else {}
    by_name = {name: i for i, name in enumerate(natural(nic.name for nic in node.nics))}
    judged.sort(
        key=lambda nic: (
            nic.role != "rail",
            order.get(nic.name, 0),
            _first_gpu(node, nic, rails),
            pci.order(nic.pci),
            by_name[nic.name],
        )
    )
    return replace(node, nics=tuple(judged), problems=tuple(dict.fromkeys([*node.problems, *problems])))


def nearest(node: Node, gpu: str, nics: Iterable[Nic]) -> tuple[Distance, list[Nic]]:
    """The least distance of a GPU to any of the NICs, and the NICs at it, none if it is unknown."""
    measured = [(node.distance(gpu, nic.name), nic) for nic in nics]
    best = min((d for d, _ in measured), default=Distance.UNKNOWN)
    return best, [nic for d, nic in measured if d is best] if best is not Distance.UNKNOWN else []


def _first_gpu(node: Node, nic: Nic, rails: Sequence[Nic]) -> int:
    """The first GPU that has a rail nearest; beyond all GPUs if none has."""
    mine = (gpu.index for gpu in node.gpus if any(n.name == nic.name for n in nearest(node, gpu.key, rails)[1]))
    return min(mine, default=1 << 16)


def _against(node: Node) -> dict[str, Verdict]:
    """What speaks against a NIC before distances are looked at."""
    verbs = [nic for nic in node.nics if nic.verbs]
    solid = [nic for nic in verbs if not nic.virtual]
    routed = [nic for nic in node.nics if nic.default_route]
    verdicts: dict[str, Verdict] = {}
    for nic in node.nics:
        label = nic.interface or nic.name
        if nic.verbs is False and verbs:
            like = bool(nic.default_route) or bool(_MANAGEMENT.search(label))
            how = "the default route leaves by it" if nic.default_route else "its name is one of management"
            verdicts[nic.name] = (
                "management" if like else "unknown",
                "no verbs reach it, others have them" + (f"; {how}" if like else ""),
            )
        elif nic.virtual and solid:
            verdicts[nic.name] = ("unknown", "a virtual function beside devices that are none")
        elif nic.bond and nic.bond != nic.name and any(n.name != nic.name and not n.bond for n in verbs):
            role: Role = "management" if nic.default_route else "unknown"
            verdicts[nic.name] = (role, f"a port of {nic.bond}, and others are in no bond")
        elif nic.default_route and len(verbs) > len(routed):
            verdicts[nic.name] = ("management", "the default route leaves by it")
        elif nic.verbs is not False and (bad := _slow(nic, node)):
            verdicts[nic.name] = bad
    return verdicts


def _slow(nic: Nic, node: Node) -> Verdict | None:
    """A port of less than half the rate that most near ports have."""
    near = [n.rate_gbit for n in node.nics if n.rate_gbit and n.verbs and n.state != "down"]
    if not near or not nic.rate_gbit or nic.state == "down":
        return None
    best = max(near)
    if nic.rate_gbit * 2 >= best:
        return None
    role: Role = "management" if nic.link_layer == "ethernet" and nic.rate_gbit <= 25 else "unknown"
    return role, f"{nic.rate_gbit:g} Gbit/s, others have {best:g}"


def _rails(node: Node, candidates: Sequence[Nic]) -> tuple[dict[str, Verdict], list[str]]:
    near = {gpu.key: nearest(node, gpu.key, candidates) for gpu in node.gpus}
    near = {gpu: found for gpu, found in near.items() if found[1]}
    strong = {gpu: (d, nics) for gpu, (d, nics) in near.items() if d <= Distance.PXB}
    if strong:
        return _near_rails(node, strong)
    if near and (even := _even(near, candidates)):
        return even, []
    return _only_kind(node, candidates), []


def _near_rails(node: Node, near: Mapping[str, tuple[Distance, list[Nic]]]) -> tuple[dict[str, Verdict], list[str]]:
    """Rails by PCI: NICs that a GPU has nearest, at most several bridges away, alike in number for all GPUs."""
    verdicts: dict[str, Verdict] = {}
    groups = {gpu: _thin(nics, verdicts) for gpu, (_, nics) in near.items()}
    counts = Counter(len(nics) for nics in groups.values())
    most = max(counts.values())
    usual = min(n for n, times in counts.items() if times == most)
    problems = []
    if usual > MANY and any(nic.virtual is None for nics in groups.values() for nic in nics):
        crowd = {nic.name: gpu for gpu, nics in groups.items() for nic in nics}
        why = "NICs as near to {}: some are virtual functions, and which of them is not known"
        verdicts.update({name: ("unknown", f"one of {usual} " + why.format(gpu)) for name, gpu in crowd.items()})
        return verdicts, [f"{usual} {why.format('each GPU')}"]
    for gpu, nics in groups.items():
        if len(nics) > usual:
            nics = _without_ports(nics, usual, verdicts)
        if len(nics) > usual and len(counts) > 1:
            problems.append(
                f"{gpu} has {len(nics)} NICs at {near[gpu][0].name} where others have {usual}: "
                "which of them is its rail cannot be told"
            )
            for nic in nics:
                verdicts[nic.name] = ("unknown", f"one of {len(nics)} NICs as near to {gpu}; other GPUs have {usual}")
        groups[gpu] = nics
    main, tied = _main_layer(groups.values())
    if tied:
        problems.append(f"near GPUs are as many NICs of {tied}: which of them are rails cannot be told")
        for nic in (nic for nics in groups.values() for nic in nics):
            verdicts.setdefault(nic.name, ("unknown", f"near GPUs are as many NICs of {tied}"))
    for gpu, nics in groups.items():
        for nic in nics:
            if nic.name in verdicts and verdicts[nic.name][0] != "rail":
                continue
            if nic.link_layer and nic.link_layer != main:
                verdicts[nic.name] = ("unknown", f"{nic.link_layer}, where most near NICs are {main}")
                continue
            others = [g for g, same in groups.items() if any(n.name == nic.name for n in same)]
            verdicts[nic.name] = ("rail", f"{near[gpu][0].name} to {', '.join(others)}" + _extras(nic))
    return verdicts, problems


def _main_layer(groups: Iterable[Sequence[Nic]]) -> tuple[str, str]:
    """The link layer that most GPUs' near NICs have, "" where none is known; and in words those of a tie."""
    layers = Counter(nic.link_layer for nics in groups for nic in nics if nic.link_layer)
    most = [layer for layer, times in layers.items() if times == max(layers.values())]
    return (most[0], "") if len(most) == 1 else ("", " and of ".join(most))


def _extras(nic: Nic) -> str:
    said = [nic.link_layer, f"{nic.rate_gbit:g} Gbit/s" if nic.rate_gbit else "", nic.state]
    return "".join(f", {word}" for word in said if word)


def _thin(nics: list[Nic], verdicts: dict[str, Verdict]) -> list[Nic]:
    """NICs as near to a GPU, without ports and virtual functions of a bond among them, and without those down."""
    bonds = [nic for nic in nics if nic.bond == nic.name]
    if bonds and len(bonds) < len(nics):
        for nic in nics:
            if nic not in bonds:
                verdicts[nic.name] = ("unknown", f"beside the bond {bonds[0].name}: a port or virtual function of it")
        nics = bonds
    up = [nic for nic in nics if nic.state != "down"]
    if up and len(up) < len(nics):
        for nic in nics:
            if nic.state == "down":
                verdicts[nic.name] = ("unknown", f"down, and {up[0].name} is as near")
        nics = up
    return nics


def _without_ports(nics: list[Nic], usual: int, verdicts: dict[str, Verdict]) -> list[Nic]:
    """Without cards of several ports, if that leaves as many as other GPUs have."""
    ports = Counter(pci.card(nic.pci) for nic in nics if nic.pci)
    single = [nic for nic in nics if nic.pci and ports[pci.card(nic.pci)] == 1]
    if len(single) != usual:
        return nics
    for nic in nics:
        if nic not in single:
            verdicts[nic.name] = ("unknown", "a port of a card with several, where other GPUs have one of one port")
    return single


def _even(near: Mapping[str, tuple[Distance, list[Nic]]], candidates: Sequence[Nic]) -> dict[str, Verdict]:
    """Rails where no NIC is behind a bridge of a GPU: those that spread evenly, every GPU nearer to its own."""
    sets = {gpu: frozenset(nic.name for nic in nics) for gpu, (_, nics) in near.items()}
    uses = Counter(name for names in sets.values() for name in names)
    if any(d >= Distance.SYS for d, _ in near.values()) or len({len(s) for s in sets.values()}) > 1:
        return {}
    if len(uses) < 2 and not any(nic.verbs for nic in candidates if nic.name in uses):
        return {}
    alike = len({(nic.link_layer, nic.rate_gbit) for nic in candidates if nic.name in uses}) == 1
    told = all(n.link_layer and (n.rate_gbit or n.state == "active") for n in candidates if n.name in uses)
    if len(set(uses.values())) > 1 or not alike or (len(set(sets.values())) < 2 and not told):
        return {}
    verdicts: dict[str, Verdict] = {}
    for nic in candidates:
        if nic.name in uses:
            gpus = [gpu for gpu, names in sets.items() if nic.name in names]
            word = near[gpus[0]][0].name
            why = f"{word} to {', '.join(gpus)}: no NIC is nearer, and they spread evenly"
            verdicts[nic.name] = ("rail", why + _extras(nic))
    return verdicts


def _only_kind(node: Node, candidates: Sequence[Nic]) -> dict[str, Verdict]:
    """Rails where distances tell nothing: all fabric ports there are, if they are alike."""
    ports = [
        nic
        for nic in candidates
        if nic.verbs and (nic.link_layer in FABRIC or (nic.rate_gbit or 0) >= FAST) and nic.state != "down"
    ]
    kinds = {(nic.link_layer, nic.rate_gbit) for nic in ports}
    others = [nic for nic in candidates if nic.verbs and nic not in ports and nic.state != "down"]
    uneven = len(ports) > 1 and any(
        node.distance(gpu.key, nic.name) < Distance.SYS for gpu in node.gpus for nic in ports
    )
    if len(kinds) != 1 or others or uneven:
        return {}
    what = "the only fabric port" if len(ports) == 1 else "fabric ports alike, and no others"
    return {nic.name: ("rail", f"{what}{_extras(nic)}; it is near no GPU in particular") for nic in ports}


def _other(node: Node, nic: Nic, rails: Sequence[Nic]) -> Verdict:
    """The verdict on a NIC that nothing speaks against and that is no rail."""
    unseen = [
        gpu.key for gpu in node.gpus if nic.name and node.distance(gpu.key, nic.name) is Distance.UNKNOWN and node.nics
    ]
    if not node.gpus:
        return "unknown", "no GPUs are known to which it could be near"
    if unseen:
        return "unknown", f"its distance to {', '.join(unseen)} is not known"
    if not rails:
        return "unknown", "no GPU has it nearer than others have, and nothing else tells"
    best = min(node.distance(gpu.key, nic.name) for gpu in node.gpus)
    far = f"no nearer than {best.name} to any GPU, which rails are"
    if nic.verbs and (nic.rate_gbit or 0) >= FAST and nic.state == "active" and nic.default_route is False:
        return "storage", f"{far}, though verbs reach it at {nic.rate_gbit:g} Gbit/s"
    return "unknown", f"{far}: no rail; storage or management cannot be told"
