"""Where every rank of a job is: host, GPU, CPUs, NIC, rail and leaf switch; and what its order costs the fabric.

A pure function of nodes, fabric and layout. Columns are arrays; a row is made when it is asked for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from hpctrain.cluster import ordering
from hpctrain.cluster.binding import cpu_sets, near_cpus
from hpctrain.cluster.fabric import Fabric
from hpctrain.cluster.linkbytes import LINKS, Ints, LinkBytes, sends
from hpctrain.cluster.node import Cpus, Node
from hpctrain.cluster.slots import Slots, slots_of
from hpctrain.cluster.slurmconf import some
from hpctrain.cluster.unfold import Domains, Leaves, unfolded
from hpctrain.config.schema import RunConfig
from hpctrain.errors import ConfigError
from hpctrain.layout.layout import Layout


@dataclass(frozen=True)
class Place:
    """One rank.

    Attributes:
        node: index of its host in `RankTable.hosts`.
        local_rank: its position among the ranks of its host, as SLURM_LOCALID counts.
        pp, dp, cp, tp: coordinates on the parallel axes.
        gpu: by index in the order of PCI addresses; without GPUs, its slot on the host.
        uuid, pci: of the GPU; "" if not known.
        cpus: it is to run on; empty: not known, so it is not bound.
        numa: NUMA node of these CPUs; None if not known.
        nic: it sends by, as NCCL names it; "" if not known.
        rail: by index.
        leaf: switch that the rail hangs on; "" if no fabric is known.
    """

    rank: int
    node: int
    local_rank: int
    pp: int
    dp: int
    cp: int
    tp: int
    host: str = ""
    gpu: int = 0
    uuid: str = ""
    pci: str = ""
    cpus: Cpus = ()
    numa: int | None = None
    nic: str = ""
    rail: int = 0
    leaf: str = ""

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True)
class RankTable(Sequence[Place]):
    """Places of all ranks.

    Attributes:
        hosts: in the order of their first ranks.
        node, local_rank, gpu, rail, leaf: of each rank, as in `Place`; leaf is an index of `leaves`.
        bytes: that all ranks send in an optimizer step by kind of link; nominal numbers if there was no configuration.
        slurm: the same for orders that Slurm gives ranks on its own: "by name", and "by topology" where the fabric has
            an order of its own (SwitchAsNodeRank, and Slurm from 26.05).
        problems: what had to be taken for granted, a sentence each.
        fabric: between hosts, as nodes have unfolded it.
        slots, at: the places there were, and which of them each rank has. All three are None in a table from a file.
    """

    layout: Layout
    hosts: tuple[str, ...]
    node: Ints
    local_rank: Ints
    gpu: Ints
    rail: Ints
    leaf: Ints
    leaves: tuple[str, ...]
    nodes: Mapping[str, Node] | Node | None
    bytes: LinkBytes
    slurm: Mapping[str, LinkBytes] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    fabric: Fabric | None = None
    slots: Slots | None = None
    at: Ints | None = None

    def __len__(self) -> int:
        return len(self.node)

    def __getitem__(self, rank: Any) -> Any:
        """The place of a rank, or of a slice of them."""
        if isinstance(rank, slice):
            return [self[r] for r in range(len(self))[rank]]
        rank = range(len(self))[rank]
        index, gpu, rail = int(self.node[rank]), int(self.gpu[rank]), int(self.rail[rank])
        host, local = self.hosts[index], int(self.local_rank[rank])
        at = self.layout.coordinates(rank)
        leaf = self.leaves[self.leaf[rank]]
        node = self.described(host)
        found = {} if node is None else _of_node(node, gpu, rail, self.cpus(host), local)
        return Place(
            rank, index, local, at["pp"], at["dp"], at["cp"], at["tp"], host, gpu, rail=rail, leaf=leaf, **found
        )

    def __iter__(self) -> Iterator[Place]:
        return (self[rank] for rank in range(len(self)))

    def described(self, host: str) -> Node | None:
        """What is known about a host."""
        return self.nodes.get(host) if isinstance(self.nodes, Mapping) else self.nodes

    def ranks_of(self, host: str) -> Ints:
        """Ranks of a host, ascending: by local rank."""
        start, end = self._bounds[self.hosts.index(host)], self._bounds[self.hosts.index(host) + 1]
        return self._by_node[start:end]

    def gpus_of(self, host: str) -> tuple[int, ...]:
        """The GPU of each local rank of a host."""
        return tuple(self.gpu[self.ranks_of(host)].tolist())

    def cpus(self, host: str) -> tuple[Cpus, ...]:
        """The CPUs of each local rank of a host; empty where they are not known."""
        gpus, node = self.gpus_of(host), self.described(host)
        key = (id(node), gpus)
        if key not in self._cpus:
            self._cpus[key] = ((),) * len(gpus) if node is None else cpu_sets(node, gpus)
        return self._cpus[key]

    @property
    def in_blocks(self) -> bool:
        """Whether hosts are filled one after the other, as `srun --distribution=block` does with this order of hosts;
        else every task has its line in SLURM_HOSTFILE (`--distribution=arbitrary`)."""
        return bool((np.diff(self.node) >= 0).all())

    def link(self, a: int, b: int) -> str:
        """The kind of link between two ranks, one of `LINKS`. Not of a table that was read from a file."""
        assert self.slots is not None and self.at is not None, "made here"
        return LINKS[int(self.slots.links(self.at[a : a + 1], self.at[b : b + 1])[0])]

    def against_slurm(self) -> list[str]:
        """By how much this order beats those that Slurm gives on its own, a sentence each."""
        return [f"{name}: {self.bytes.against(other)}" for name, other in self.slurm.items()]

    def host_file(self) -> list[str]:
        """The host of every rank: the lines of SLURM_HOSTFILE."""
        return [self.hosts[i] for i in self.node.tolist()]

    @cached_property
    def _by_node(self) -> Ints:
        return np.argsort(self.node, kind="stable")

    @cached_property
    def _bounds(self) -> Ints:
        return np.searchsorted(self.node[self._by_node], np.arange(len(self.hosts) + 1))

    @cached_property
    def _cpus(self) -> dict[tuple[int, tuple[int, ...]], tuple[Cpus, ...]]:
        return {}


def _of_node(node: Node, gpu: int, rail: int, cpus: Sequence[Cpus], local: int) -> dict[str, Any]:
    """What a node says about one of its ranks."""
    nics, found = node.rails, {g.index: g for g in node.gpus}.get(gpu)
    out: dict[str, Any] = {"cpus": cpus[local], "nic": nics[rail].name if rail < len(nics) else ""}
    if found is not None:
        out |= {"uuid": found.uuid, "pci": found.pci, "numa": near_cpus(node, found)[0]}
    return out


def _too_few(hosts: Sequence[str], nodes: Mapping[str, Node] | Node | None, places: Ints) -> list[str]:
    """What is taken for granted of hosts whose nodes tell of some GPUs, and of fewer than they have places."""
    each = np.bincount(places, minlength=len(hosts)).tolist()
    known = [nodes if isinstance(nodes, Node) else (nodes or {}).get(host) for host in hosts]
    gpus = [len(node.gpus) if node is not None else 0 for node in known]
    short = [i for i in range(len(hosts)) if 0 < gpus[i] < each[i]]
    if not short:
        return []
    who, first = some(hosts[i] for i in short), short[0]
    seen = f"{gpus[first]} GPUs are known where {each[first]} ranks go"
    return [f"{who}: {seen}; of the others GPU i is taken to be near rail i"]


def rank_table(
    layout: Layout,
    hosts: Sequence[str],
    nodes: Mapping[str, Node] | Node | None = None,
    fabric: Fabric | None = None,
    *,
    per_node: int | None = None,
    rails: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
    config: RunConfig | None = None,
    order: str = "best",
    leaves: Leaves = "auto",
    domains: Domains = "auto",
) -> RankTable:
    """The table of a job.

    Args:
        hosts: of the allocation, as Slurm lists them.
        nodes: what is known about each, or one that all are like.
        fabric: between them; None: every rail is taken to be one switch.
        per_node: ranks on a node; None: as many as it has GPUs.
        rails: of each GPU the rail it is near, for every host or the same for all; None: GPU i is near rail i, and
            counting starts again after the last rail.
        config: what trains, so that bytes are those of its steps; None: they are nominal.
        order: "best"; or "hosts": hosts in their order, and the best of GPUs on them; or "given": both in their order.
        leaves, domains: what the site says of a fabric that Slurm describes (`unfold.py`).

    Raises:
        ConfigError: the hosts have too few places for the ranks of the layout, or one is listed twice.
    """
    if len(set(hosts)) != len(hosts):
        twice = next(host for host, times in Counter(hosts).items() if times > 1)
        raise ConfigError("hosts", twice, "a host is in the allocation once")
    told = fabric.problems if fabric is not None else ()
    fabric = unfolded(fabric, nodes, leaves, domains, per_node or 0)
    assumed = [said for said in fabric.problems if said not in told] if fabric is not None else []
    slots = slots_of(hosts, _rails(hosts, nodes, fabric, per_node, rails, layout), fabric)
    slots = replace(slots, problems=(*slots.problems, *assumed, *_too_few(hosts, nodes, slots.node)))
    if len(slots.node) < layout.world:
        raise ConfigError(
            "cluster.nodes",
            len(hosts),
            f"{layout.world} ranks do not fit on {len(hosts)} nodes with {len(slots.node)} places",
            "ask for more nodes, or make an axis smaller",
        )
    traffic = sends(layout, config)
    if order == "given":
        at = np.arange(layout.world, dtype=np.int64)
        counted = slots.count(at, traffic)
    else:
        at, counted = ordering.best(slots, layout, fabric, traffic, fixed=order == "hosts")
    own = {"by name": slots.count(ordering.slurm_order(slots, layout.world), traffic)}
    if fabric is not None and fabric.leaves:
        mine = set(hosts)
        listed = [host for host in fabric.leaves if host in mine]
        if len(listed) == len(hosts):
            own["by topology"] = slots.count(ordering.slurm_order(slots, layout.world, listed), traffic)
    return _table(layout, slots, at, nodes, fabric, counted, own)


def _table(
    layout: Layout,
    slots: Slots,
    at: Ints,
    nodes: Mapping[str, Node] | Node | None,
    fabric: Fabric | None,
    counted: LinkBytes,
    own: Mapping[str, LinkBytes],
) -> RankTable:
    node = slots.node[at]
    used, first = np.unique(node, return_index=True)
    used = used[np.argsort(first)]
    renamed = np.full(len(slots.hosts), -1, dtype=np.int64)
    renamed[used] = np.arange(len(used))
    mine = renamed[node]
    by_node = np.argsort(mine, kind="stable")
    starts = np.searchsorted(mine[by_node], np.arange(len(used)))
    local = np.empty(len(at), dtype=np.int64)
    local[by_node] = np.arange(len(at)) - starts[mine[by_node]]
    hosts = tuple(slots.hosts[i] for i in used.tolist())
    columns = (mine, local, slots.gpu[at], slots.nic[at], slots.leaf[at])
    return RankTable(layout, hosts, *columns, slots.leaves, nodes, counted, own, slots.problems, fabric, slots, at)


def _rails(
    hosts: Sequence[str],
    nodes: Mapping[str, Node] | Node | None,
    fabric: Fabric | None,
    per_node: int | None,
    rails: Sequence[int] | Mapping[str, Sequence[int]] | None,
    layout: Layout,
) -> list[tuple[int, ...]]:
    """Of each host, the rail of each GPU that gets a rank."""
    if rails is not None and not isinstance(rails, Mapping):
        return [tuple(rails)[:per_node]] * len(hosts)
    out: list[tuple[int, ...]] = []
    cache: dict[int, tuple[int, ...]] = {}
    for host in hosts:
        if isinstance(rails, Mapping) and host in rails:
            out.append(tuple(rails[host])[:per_node])
            continue
        node = nodes.get(host) if isinstance(nodes, Mapping) else nodes
        if id(node) not in cache:
            number = per_node or (len(node.gpus) if node is not None else 0) or -(-layout.world // len(hosts))
            wide = (len(node.rails) if node is not None else 0) or (fabric.rails if fabric is not None else 0) or 1
            cache[id(node)] = tuple(i % wide for i in range(number))
        out.append(cache[id(node)])
    return out
