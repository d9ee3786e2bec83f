"""The fabric as `ibnetdiscover` (infiniband-diags) found it: switches, host ports and who is cabled to whom.

Rails are read off the hosts: with k network devices on each, device i of all hosts of a unit is on one leaf if the
fabric is rail-optimized. Names of switches are not used for it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hpctrain.cluster.fabric import Fabric
from hpctrain.cluster.hostlist import natural
from hpctrain.cluster.slurmconf import some
from hpctrain.cluster.switches import uneven, units
from hpctrain.errors import ConfigError

_HEAD = re.compile(r'^(Switch|Ca|Rt)\s+\d+\s+"([SHR]-[0-9a-fA-F]+)"(?:\s*#\s*"([^"]*)")?')
_PORT = re.compile(r'^\[\d+\](?:\([0-9a-fA-F]+\))?\s+"([SHR]-[0-9a-fA-F]+)"\[\d+\](?:\([0-9a-fA-F]+\))?(.*)')
_FOREIGN = ("aggregation node", "technologies", "node description")
"""Parts of a description that is no host's: switches' own aggregation nodes, and what a device is called as long as no
host has named it."""


@dataclass
class _Net:
    """What a file says: descriptions by GUID, and cables from switches."""

    names: dict[str, str] = field(default_factory=dict)
    switches: dict[str, None] = field(default_factory=dict)
    cables: dict[tuple[str, str], None] = field(default_factory=dict)
    lost: list[int] = field(default_factory=list)


def from_ibnetdiscover(text: str, source: str = "ibnetdiscover") -> Fabric:
    """The fabric in the output of ibnetdiscover.

    Raises:
        ConfigError: there is no switch with hosts in it.
    """
    net = _parse(text)
    hosts, unnamed = _hosts(net)
    if not hosts:
        raise ConfigError("fabric", source, "no switch in it has a port with the name of a host", "run ibnetdiscover")
    problems = [f"line {net.lost[0]} and {len(net.lost) - 1} more: not understood"] if len(net.lost) > 1 else []
    problems += [f"line {net.lost[0]}: not understood"] if len(net.lost) == 1 else []
    labels = _labels(net)
    above = _above(net, hosts)
    if strange := sorted({host for host, ports in hosts.items() if all(s not in above[0] for s in ports.values())}):
        problems.append(f"{some(strange)}: on switches that are no leaves: not counted")
    on_leaves = {h: {d: s for d, s in ports.items() if s in above[0]} for h, ports in hosts.items()}
    leaves = _railed({h: ports for h, ports in on_leaves.items() if ports}, labels, problems)
    if unnamed:
        problems.append(f"{unnamed} ports of leaves carry no host's name: left out")
    if "localhost" in leaves:
        problems.append("a host calls itself localhost: its own name is not known")
    rails = max(map(len, leaves.values()))
    if rails > 1:
        problems += uneven(leaves)
    parents = {labels[s]: tuple(labels[p] for p in up) for s, up in above[1].items() if up}
    kind = "single" if len(above[0]) == 1 else "rails" if rails > 1 and _several(leaves) else "tree"
    return Fabric(leaves=leaves, parents=parents, kind=kind, sources=(source,), problems=tuple(problems))


def _several(leaves: Mapping[str, Sequence[str]]) -> bool:
    return any(len(set(filter(None, mine))) > 1 for mine in leaves.values())


def _parse(text: str) -> _Net:
    net, here = _Net(), ""
    for number, line in enumerate(text.splitlines(), 1):
        if head := _HEAD.match(line):
            here = head[2]
            if head[1] == "Switch":
                net.switches[here] = None
            if head[3]:
                net.names.setdefault(here, head[3])
        elif port := _PORT.match(line):
            there = port[1]
            described = re.match(r'\s*#\s*"([^"]*)"', port[2])
            if described and here.startswith("S-"):
                net.names.setdefault(there, described[1])
            if here and (here[0] == "S" or there[0] == "S"):
                a, b = (here, there) if here[0] == "S" else (there, here)
                net.cables[a, b] = None
                net.switches[a] = None
        elif line.startswith(("[", "Switch", "Ca")) or (('"H-' in line or '"S-' in line) and not line.startswith("#")):
            net.lost.append(number)
        elif not line.strip() or line.startswith("vendid"):
            here = ""
    return net


def _hosts(net: _Net) -> tuple[dict[str, dict[str, str]], int]:
    """Of each host, the switch of each of its devices; and how many ports have no host's name."""
    hosts: dict[str, dict[str, str]] = {}
    unnamed = 0
    for switch, there in net.cables:
        if there[0] != "H":
            continue
        described = net.names.get(there, "")
        words = described.split()
        if "aggregation node" in described.lower():
            continue
        if not 1 <= len(words) <= 2 or any(part in described.lower() for part in _FOREIGN):
            unnamed += 1
            continue
        device, ports = words[1] if len(words) == 2 else "", hosts.setdefault(words[0], {})
        while device in ports and ports[device] != switch:  # a second port of it, or of a host of the same name
            device += "'"
        ports[device] = switch
    return hosts, unnamed


def _labels(net: _Net) -> dict[str, str]:
    """Names of switches: their own without the prefix and model, with the module of a chassis; else the GUID."""
    wanted = {}
    for guid in net.switches:
        name, _, model = net.names.get(guid, "").split(";")[-1].partition(":")
        modules = model.split("/")[1:-1]
        wanted[guid] = "/".join([name.strip(), *modules])
    taken = Counter(wanted.values())
    return {guid: name if name and taken[name] == 1 else guid for guid, name in wanted.items()}


def _above(net: _Net, hosts: Mapping[str, Mapping[str, str]]) -> tuple[set[str], dict[str, list[str]]]:
    """Leaves, and of each switch those one level up.

    A leaf has hosts. A switch further up may have one too, that manages the fabric: then most switches around it have
    more hosts, and its own are less than a quarter of its cables, or of the hosts of each of these.
    """
    carried = Counter(switch for ports in hosts.values() for switch in ports.values())
    around: dict[str, list[str]] = {switch: [] for switch in net.switches}
    for a, b in net.cables:
        if b in around:
            around[a].append(b)
            around[b].append(a)
    around = {switch: list(dict.fromkeys(others)) for switch, others in around.items()}
    leaves = set()
    for switch, number in carried.items():
        others = around[switch]
        fuller = [carried[other] for other in others if carried[other] > number]
        few = number * 3 < len(others) or number * 4 <= min(fuller, default=0)
        if not few or len(fuller) * 2 <= len(others):
            leaves.add(switch)
    height, layer = dict.fromkeys(leaves, 0), sorted(leaves)
    while layer:
        layer = list(dict.fromkeys(o for s in layer for o in around[s] if o not in height))
        height.update(dict.fromkeys(layer, max(height.values()) + 1))
    up = {s: [o for o in others if height.get(o, 0) == height.get(s, 0) + 1] for s, others in around.items()}
    return leaves, up


def _railed(
    hosts: Mapping[str, Mapping[str, str]], labels: Mapping[str, str], problems: list[str]
) -> dict[str, tuple[str, ...]]:
    """Leaves of hosts in the order of rails."""
    rail_of = _device_rails(hosts)
    votes: dict[str, Counter[int]] = {}
    for host, ports in hosts.items():
        for device, switch in ports.items():
            votes.setdefault(switch, Counter())[rail_of[host][device]] += 1
    of_leaf = {s: v.most_common(1)[0][0] for s, v in votes.items() if v.most_common(1)[0][1] * 3 >= v.total() * 2}
    width = max((max(rails.values(), default=0) for rails in rail_of.values()), default=0) + 1
    out: dict[str, tuple[str, ...]] = {}
    managing, crossed = [], []
    for host in natural(hosts):
        ports, rails = hosts[host], rail_of[host]
        wrong = [d for d, s in ports.items() if of_leaf.get(s, rails[d]) != rails[d]]
        if wrong and len(wrong) == len(ports) < width:
            managing.append(host)
            continue
        crossed += [f"{host} {device}" for device in wrong]
        mine = [""] * width
        for device, switch in ports.items():
            rail = of_leaf.get(switch, rails[device])
            mine[rail if not mine[rail] else rails[device]] = labels[switch]
        out[host] = tuple(mine)
    if managing:
        problems.append(f"{some(managing)}: all devices on leaves of other rails: manages the fabric, not counted")
    if crossed:
        problems.append(f"{some(crossed)}: on the leaf of another rail than the same device of other hosts")
    return out


def _device_rails(hosts: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, int]]:
    """Of each host the rail that each device would be on by its name.

    Hosts with all their devices say in which order names are; one with fewer has the numbers of those. Where several
    kinds of hosts would do, that of its own unit does, and then the most frequent.
    """
    names = {host: tuple(natural(ports)) for host, ports in hosts.items()}
    width = max(map(len, names.values()))
    full = Counter(mine for mine in names.values() if len(mine) == width)
    near = {
        host: Counter(names[h] for h in unit)
        for unit in units({h: tuple(p.values()) for h, p in hosts.items()})
        for host in unit
    }
    out = {}
    for host, mine in names.items():
        fitting = [kind for kind in full if set(mine) <= set(kind)]
        fitting.sort(key=lambda kind: (-near[host][kind], -full[kind]))
        order = fitting[0] if fitting else mine
        out[host] = {device: order.index(device) for device in mine}
    return out
