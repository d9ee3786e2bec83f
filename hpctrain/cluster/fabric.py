"""The switches between nodes, as far as the order of ranks cares.

A host hangs on one leaf for each of its rails (Slurm's topology/tree knows one leaf a host, a rail-optimized fabric as
many as rails); switches have parents, as many as they have ways up. An NVLink domain is wider than a host on NVL72
racks, and is what Slurm calls a block.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Fabric:
    """A fabric.

    Attributes:
        leaves: of each host, the leaf switch of each rail in order of rails; "" where the host has no port on it.
        parents: of each switch below the top, the switches one level up.
        domains: of each host, the NVLink domain that it shares with other hosts; hosts without one are not in it.
        kind: how it was meant: tree, block, rails (each rail has leaf switches of its own), dragonfly, single.
        sources: what it was read from, in words.
        problems: what is missing, damaged or contradictory, a sentence each.
        one_leaf: its source knows one leaf a host, which may stand for those of several rails.
    """

    leaves: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    parents: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    domains: Mapping[str, str] = field(default_factory=dict)
    kind: str = "tree"
    sources: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    one_leaf: bool = False

    @property
    def rails(self) -> int:
        """Leaves of the host that has most of them."""
        return max(map(len, self.leaves.values()), default=0)
