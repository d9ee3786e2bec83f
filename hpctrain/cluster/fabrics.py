"""Fabrics that are generated, to plan for what is not there; and a fabric written as topology.conf."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from hpctrain.cluster.fabric import Fabric
from hpctrain.cluster.hostlist import fold, natural
from hpctrain.cluster.switches import units
from hpctrain.errors import ConfigError


def single(hosts: Sequence[str], rails: int = 1) -> Fabric:
    """One switch, or one for each rail."""
    names = ("switch",) if rails == 1 else tuple(f"switch{r}" for r in range(rails))
    return Fabric(leaves=dict.fromkeys(hosts, names), kind="single", sources=("generated: single switch",))


def fat_tree(hosts: Sequence[str], per_leaf: int, leaves_per_pod: int = 0, oversubscription: int = 1) -> Fabric:
    """Two levels, or three if there are pods: leaf switches, spines of a pod, cores.

    Args:
        per_leaf: hosts on a leaf.
        leaves_per_pod: leaves under the same spines; 0: all.
        oversubscription: hosts on a leaf for each of its ways up; so many fewer spines there are.
    """
    _positive(per_leaf=per_leaf, oversubscription=oversubscription)
    _positive(leaves_per_pod=leaves_per_pod or 1)
    spines = max(1, per_leaf // oversubscription)
    leaves = {host: (f"leaf{i // per_leaf}",) for i, host in enumerate(hosts)}
    parents: dict[str, tuple[str, ...]] = {}
    for i in range(-(-len(hosts) // per_leaf)):
        pod = f"pod{i // leaves_per_pod}" if leaves_per_pod else ""
        up = tuple(f"{pod}spine{s}" for s in range(spines))
        parents[f"leaf{i}"] = up
        if pod:
            parents |= {spine: (f"core{s}",) for s, spine in enumerate(up)}
    return Fabric(leaves=leaves, parents=parents, kind="tree", sources=("generated: fat tree",))


def rail_optimized(hosts: Sequence[str], rails: int = 8, unit: int = 32, units_per_pod: int = 0) -> Fabric:
    """A leaf for each rail of a unit of hosts; spines above all, or of each rail and pod below cores of the rail.

    The names are the reference's: a leaf is `leaf<rail>-<unit>` (NVIDIA's HGX reference architecture calls the group of
    hosts a scalable unit).

    Args:
        unit: hosts under one set of leaves.
        units_per_pod: units under the same spines, for three levels; 0: two levels.
    """
    _positive(rails=rails, unit=unit)
    leaves = {host: tuple(f"leaf{r}-{i // unit}" for r in range(rails)) for i, host in enumerate(hosts)}
    parents: dict[str, tuple[str, ...]] = {}
    for u in range(-(-len(hosts) // unit)):
        for r in range(rails):
            spine = f"spine{r}-{u // units_per_pod}" if units_per_pod else "spine"
            parents[f"leaf{r}-{u}"] = (spine,)
            if units_per_pod:
                parents[spine] = (f"core{r}",)
    return Fabric(leaves=leaves, parents=parents, kind="rails", sources=("generated: rail-optimized",))


def dragonfly(hosts: Sequence[str], per_router: int, routers_per_group: int) -> Fabric:
    """Routers with hosts, all connected within a group, and groups with each other (Kim et al., 2008,
    doi 10.1109/ISCA.2008.19). What connects them is written as a switch above them."""
    _positive(per_router=per_router, routers_per_group=routers_per_group)
    leaves = {host: (f"router{i // per_router}",) for i, host in enumerate(hosts)}
    parents: dict[str, tuple[str, ...]] = {}
    for i in range(-(-len(hosts) // per_router)):
        group = f"group{i // routers_per_group}"
        parents |= {f"router{i}": (group,), group: ("global",)}
    return Fabric(leaves=leaves, parents=parents, kind="dragonfly", sources=("generated: dragonfly",))


def nvl72(hosts: Sequence[str], rails: int = 4, trays: int = 18) -> Fabric:
    """Racks that are one NVLink domain of 18 trays with four GPUs each; every rack is a unit of rails."""
    plain = rail_optimized(hosts, rails, trays)
    domains = {host: f"rack{i // trays}" for i, host in enumerate(hosts)}
    return Fabric(plain.leaves, plain.parents, domains, "rails", ("generated: NVL72 racks",))


GENERATED = "single, tree:32, tree:32:4, rails:32, rails:32:8, dragonfly:4:8 or nvl72"
"""Words for fabrics: hosts of a leaf or unit, leaves or units of a pod; hosts of a router, routers of a group."""


def generated(words: str, hosts: Sequence[str], rails: int = 8) -> Fabric | None:
    """A fabric in a few words, `GENERATED`; None where they are no such words.

    Args:
        rails: of each host, where the kind has rails.

    Raises:
        ConfigError: numbers are missing or senseless.
    """
    kind, *numbers = words.split(":")
    least = {"single": (0, 0), "tree": (1, 2), "rails": (1, 2), "dragonfly": (2, 2), "nvl72": (0, 0)}
    if kind not in least:
        return None
    fewest, most = least[kind]
    if not fewest <= len(numbers) <= most or not all(n.isdecimal() and int(n) for n in numbers):
        raise ConfigError("fabric", words, f"must be like {GENERATED}")
    sizes = list(map(int, numbers))
    if kind == "single":
        return single(hosts, rails)
    if kind == "tree":
        return fat_tree(hosts, *sizes)
    if kind == "rails":
        return rail_optimized(hosts, rails, *sizes)
    return dragonfly(hosts, *sizes) if kind == "dragonfly" else nvl72(hosts, rails)


def _positive(**numbers: int) -> None:
    for name, number in numbers.items():
        if number < 1:
            raise ConfigError(f"fabric.{name}", number, "a number above 0")


def topology_conf(fabric: Fabric, kind: str = "") -> str:
    """A fabric as Slurm's topology.conf.

    Slurm's tree knows one leaf a host, so all the leaves of a host are one there, named by the first of them, and so
    are their spines. Hosts of one leaf that differ in others keep together.

    Args:
        kind: tree or block; "": block if there are NVLink domains over several hosts.
    """
    several = len(set(fabric.domains.values())) < len(fabric.domains)
    kind = kind or ("block" if fabric.kind == "block" or several else "tree")
    if kind == "block":
        return _blocks(fabric)
    if kind != "tree":
        raise ConfigError("topology", kind, "tree or block")
    return _tree(fabric)


def _blocks(fabric: Fabric) -> str:
    blocks: dict[str, list[str]] = {}
    for host, domain in fabric.domains.items():
        blocks.setdefault(_word(domain), []).append(host)
    if not blocks:
        raise ConfigError("topology", "block", "a fabric with NVLink domains", "write it as tree")
    lines = [f"BlockName={name} Nodes={fold(hosts, sort=True)}" for name, hosts in blocks.items()]
    return "\n".join([*lines, f"BlockSizes={min(map(len, blocks.values()))}", ""])


def _tree(fabric: Fabric) -> str:
    """Leaves merged by host; a level above are the sets of switches that they share."""
    below: dict[str, list[str]] = {}
    above: dict[str, tuple[str, ...]] = {}
    for host, mine in fabric.leaves.items():
        leaf = next((name for name in mine if name), "")
        if leaf:
            below.setdefault(_word(leaf), []).append(host)
            above.setdefault(_word(leaf), _up(fabric, filter(None, mine)))
    lines = [f"SwitchName={leaf} Nodes={fold(hosts, sort=True)}" for leaf, hosts in below.items()]
    for _ in range(8):
        groups = _grouped(above)
        if not groups:
            break
        names = _named(groups)
        lines += [f"SwitchName={names[up]} Switches={fold(natural(low))}" for up, low in groups.items()]
        above = {names[up]: _up(fabric, up) for up in groups}
    if len(above) > 1:
        lines.append(f"SwitchName=top Switches={fold(natural(above))}")
    return "\n".join([*lines, ""])


def _grouped(above: Mapping[str, tuple[str, ...]]) -> dict[tuple[str, ...], list[str]]:
    """Switches by what is above them; those that share one of these share all."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for members in units({name: up for name, up in above.items() if up}):
        up = tuple(natural({switch for name in members for switch in above[name]}))
        groups[up] = members
    return groups


def _named(groups: Iterable[tuple[str, ...]]) -> dict[tuple[str, ...], str]:
    """A name of its own for each set of switches: that of its first, with a number where several begin with it."""
    out: dict[tuple[str, ...], str] = {}
    for up in groups:
        name, n = _word(up[0]), 2
        while name in out.values():
            name, n = f"{_word(up[0])}-{n}x", n + 1
        out[up] = name
    return out


def _up(fabric: Fabric, names: Iterable[str]) -> tuple[str, ...]:
    return tuple(natural({parent for name in names for parent in fabric.parents.get(name, ())}))


def _word(name: str) -> str:
    """A name that is one word of a configuration file."""
    return "".join(char if char.isalnum() or char in "-_." else "_" for char in name)
