"""Places where ranks can be: slots of hosts, each with its rail, leaf switch and NVLink domain, as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hpctrain.cluster.fabric import Fabric
from hpctrain.cluster.linkbytes import LINKS, Floats, Ints, LinkBytes, Sends
from hpctrain.cluster.slurmconf import some

Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Slots:
    """Slots of hosts, in the order of hosts and then of GPUs.

    Attributes:
        hosts: their names, in the order in which they were given.
        node, gpu, rail, leaf, domain: of each slot, its host by index; its GPU there; the rail it sends by; its leaf
            switch and NVLink domain by index.
        leaves: names of leaf switches.
        parents: of each leaf, the switches above it.
        nic: of each slot, its rail among the NICs of its host. That is another where one leaf, as Slurm's tree
            has it, stands for all its rails.
        problems: what had to be taken for granted, a sentence each.
    """

    hosts: tuple[str, ...]
    node: Ints
    gpu: Ints
    rail: Ints
    leaf: Ints
    domain: Ints
    leaves: tuple[str, ...]
    parents: tuple[frozenset[str], ...]
    nic: Ints
    problems: tuple[str, ...] = ()

    def links(self, a: Ints, b: Ints) -> Ints:
        """The kind of link between slots, as an index of `LINKS`."""
        first, second = self.leaf[a], self.leaf[b]
        sets, near = self._parent_sets
        link = np.where(near[sets[first], sets[second]], LINKS.index("spine"), LINKS.index("core"))
        link[self.rail[a] != self.rail[b]] = LINKS.index("cross_rail")
        link[first == second] = LINKS.index("leaf")
        link[self.domain[a] == self.domain[b]] = LINKS.index("nvlink")
        return link

    @cached_property
    def _parent_sets(self) -> tuple[Ints, Bools]:
        """Of each leaf which set of switches is above it, and which of these sets have one in common."""
        unique = {parents: i for i, parents in enumerate(dict.fromkeys(self.parents))}
        names = {name: i for i, name in enumerate({n for parents in unique for n in sorted(parents)})}
        above = np.zeros((len(unique), max(1, len(names))), dtype=np.float32)
        for parents, i in unique.items():
            above[i, [names[name] for name in parents]] = 1
        return np.array([unique[p] for p in self.parents], dtype=np.int64), above @ above.T > 0

    def count(self, at: Ints, sends: Sequence[Sends]) -> LinkBytes:
        """Bytes by axis and kind of link when rank r is in slot `at[r]`."""
        by_axis: dict[str, Floats] = {}
        relayed = 0.0
        present = self._rails_of_domains()
        for one in sends:
            a, b = at[one.source], at[one.target]
            link = self.links(a, b)
            counted = np.bincount(link, weights=one.bytes, minlength=len(LINKS))
            by_axis[one.axis] = by_axis.get(one.axis, np.zeros(len(LINKS))) + counted
            cross = link == LINKS.index("cross_rail")
            relayed += float(one.bytes[cross][present[self.domain[a[cross]], self.rail[b[cross]]]].sum())
        return LinkBytes({axis: dict(zip(LINKS, map(float, row))) for axis, row in by_axis.items()}, relayed)

    def _rails_of_domains(self) -> Bools:
        """Of each NVLink domain, the rails that its GPUs have."""
        present = np.zeros((int(self.domain.max()) + 1, int(self.rail.max()) + 1), dtype=np.bool_)
        present[self.domain, self.rail] = True
        return present


def slots_of(hosts: Sequence[str], rails: Sequence[tuple[int, ...]], fabric: Fabric | None) -> Slots:
    """The slots of hosts.

    Args:
        hosts: names.
        rails: of each host, the rail of each of its GPUs.
        fabric: None: every rail, of all hosts, is one switch.
    """
    number = max((max(row, default=0) for row in rails), default=0) + 1
    known = fabric if fabric is not None and fabric.leaves else None
    everywhere = tuple(f"rail{i}" for i in range(number))
    leaf_ids: dict[str, int] = {}
    domain_ids: dict[str, int] = {}
    ports: dict[tuple[tuple[str, ...], tuple[int, ...]], list[tuple[int, int, int]]] = {}
    port: list[tuple[int, int, int]] = []
    domain: list[int] = []
    missing: list[str] = []
    for host, row in zip(hosts, rails):
        leaves = everywhere if known is None else known.leaves.get(host, ())
        if not any(leaves):
            missing.append(host)
            leaves = (f"?{host}",)
        if (leaves, row) not in ports:
            used = [_port(leaves, r) for r in row]
            own = row if len(leaves) == 1 else used
            ports[leaves, row] = [(r, leaf_ids.setdefault(leaves[r], len(leaf_ids)), n) for r, n in zip(used, own)]
        port += ports[leaves, row]
        name = fabric.domains.get(host) if fabric is not None else None
        domain.append(domain_ids.setdefault(f"host {host}" if name is None else name, len(domain_ids)))
    counts = [len(row) for row in rails]
    problems = [] if known else ["no fabric is known: every rail is taken to be one switch for all nodes"]
    if missing:
        problems.append(f"the fabric does not hold {some(missing)}: taken to be far from all others")
    ports_of = np.array(port, dtype=np.int64).reshape(-1, 3)
    parents = known.parents if known is not None else {}
    return Slots(
        tuple(hosts),
        np.repeat(np.arange(len(hosts), dtype=np.int64), counts),
        np.array([i for n in counts for i in range(n)], dtype=np.int64),
        ports_of[:, 0].copy(),
        ports_of[:, 1].copy(),
        np.repeat(np.array(domain, dtype=np.int64), counts),
        tuple(leaf_ids),
        tuple(frozenset(parents.get(name, ())) for name in leaf_ids),
        ports_of[:, 2].copy(),
        tuple(problems),
    )


def _port(leaves: Sequence[str], rail: int) -> int:
    """The rail that a GPU sends by: its own, or the next one that its host has a port on."""
    return next(r % len(leaves) for r in range(rail, rail + len(leaves)) if leaves[r % len(leaves)])
