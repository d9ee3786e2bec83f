"""Switches above each other: without rings, and units of leaves that hold the same hosts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hpctrain.cluster.slurmconf import some

Edge = tuple[str, str]


def without_rings(down: Mapping[str, Sequence[str]], leaves: set[str]) -> tuple[dict[str, tuple[str, ...]], list[Edge]]:
    """Of each switch those above it, and which pairs of child and parent were left out as they go round.

    Of two switches above each other, the one that is nearer to hosts is below.
    """
    edges = list(dict.fromkeys((child, parent) for parent, below in down.items() for child in below))
    inside = _in_rings(edges)
    height = _heights(down, leaves)
    far = len(down) + 1
    cut = [
        (c, p) for c, p in edges if (c in inside and p in inside and height.get(c, far) >= height.get(p, far)) or c == p
    ]
    kept = [edge for edge in edges if edge not in set(cut)]
    if still := _in_rings(kept):
        more = [(c, p) for c, p in kept if c in still and p in still]
        cut, kept = cut + more, [edge for edge in kept if edge not in set(more)]
    parents: dict[str, tuple[str, ...]] = {}
    for child, parent in kept:
        parents[child] = (*parents.get(child, ()), parent)
    return parents, cut


def _heights(down: Mapping[str, Sequence[str]], leaves: set[str]) -> dict[str, int]:
    """Steps from a switch down to the nearest one with hosts."""
    above: dict[str, list[str]] = {}
    for parent, below in down.items():
        for child in below:
            above.setdefault(child, []).append(parent)
    height, level, layer = dict.fromkeys(leaves, 0), 0, list(leaves)
    while layer:
        level += 1
        layer = [p for p in dict.fromkeys(p for name in layer for p in above.get(name, ())) if p not in height]
        height.update(dict.fromkeys(layer, level))
    return height


def _in_rings(edges: Sequence[Edge]) -> set[str]:
    """Switches on rings, or between two of them."""
    left = set(edges)
    while True:
        children, parents = {c for c, _ in left}, {p for _, p in left}
        kept = {(c, p) for c, p in left if c in parents and p in children}
        if len(kept) == len(left):
            return {name for edge in kept for name in edge}
        left = kept


def units(leaves: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """Hosts in groups that hang together by leaf switches, in the order of their first hosts."""
    root: dict[str, str] = {}

    def find(name: str) -> str:
        while root.setdefault(name, name) != name:
            root[name] = root[root[name]]
            name = root[name]
        return name

    for mine in leaves.values():
        named = [leaf for leaf in mine if leaf]
        for leaf in named[1:]:
            root[find(leaf)] = find(named[0])
    out: dict[str, list[str]] = {}
    for host, mine in leaves.items():
        first = next((leaf for leaf in mine if leaf), f"?{host}")
        out.setdefault(find(first), []).append(host)
    return list(out.values())


def uneven(leaves: Mapping[str, Sequence[str]]) -> list[str]:
    """Where the rails of a unit do not hold the same hosts, a sentence each.

    Slurm's tree knows one leaf a host, so the rails of a unit are one leaf there. That is right only if they all hold
    the same hosts.
    """
    out: list[str] = []
    for members in units(leaves):
        rails = max(len(leaves[host]) for host in members)
        for rail in range(rails):
            on: dict[str, list[str]] = {}
            for host in members:
                on.setdefault(leaves[host][rail] if rail < len(leaves[host]) else "", []).append(host)
            without = on.pop("", [])
            if without and not on:
                out.append(f"rail {rail}: none of the {len(members)} hosts around {members[0]} has a port on it")
            elif without:
                out.append(f"rail {rail}: {some(without)} of the hosts around {members[0]} without a port on it")
            if len(on) > 1:
                out.append(f"rail {rail}: the hosts around {members[0]} are on the leaves {some(on)}")
    return out
