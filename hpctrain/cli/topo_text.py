"""Nodes, switches and rank tables in lines of text, and as data for JSON. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hpctrain.cli.tables import columns
from hpctrain.cluster import nodefile
from hpctrain.cluster.affinity import differences, near
from hpctrain.cluster.binding import near_cpus
from hpctrain.cluster.cpus import format_list
from hpctrain.cluster.fabric import Fabric
from hpctrain.cluster.hostlist import fold
from hpctrain.cluster.linkbytes import LINKS
from hpctrain.cluster.node import Gpu, Node
from hpctrain.cluster.ranktable import RankTable
from hpctrain.cluster.switches import units
from hpctrain.layout.layout import AXES

HOSTS_SHOWN = 32
"""Above that, a rank table has one line a unit of switches."""
NAMED = 4
"""Names of switches that are listed one by one."""
UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def kinds(nodes: Sequence[Node]) -> list[tuple[list[str], Node]]:
    """Nodes in groups that are alike but for what is each one's own: their names, and the first of them."""
    groups: dict[str, tuple[list[str], Node]] = {}
    for node in nodes:
        said = nodefile.plain(node)
        own = ("name", "sources")
        same = repr({key: _without_own(value) for key, value in said.items() if key not in own})
        groups.setdefault(same, ([], node))[0].append(node.name)
    return list(groups.values())


def _without_own(value: Any) -> Any:
    """Records without what no two devices share."""
    if not isinstance(value, list):
        return value
    return [
        {k: v for k, v in one.items() if k not in ("uuid", "guid")} if isinstance(one, dict) else one for one in value
    ]


def node_lines(node: Node, names: Sequence[str] = ()) -> Iterator[str]:
    """A node, or one of several that are alike."""
    yield f"{fold(names or [node.name]) if node.name else 'this node'}: {_summary(node)}"
    if node.sources:
        yield f"read from {' and '.join(node.sources)}"
    for rows in (_gpus(node), _nics(node), _numas(node)):
        if rows:
            yield ""
            yield from columns(rows)
    yield from _problems(node.problems)


def _summary(node: Node) -> str:
    names = {gpu.name for gpu in node.gpus if gpu.name}
    gpus = f"{len(node.gpus)} x {names.pop()}" if len(names) == 1 else f"{len(node.gpus)} GPUs"
    numas = [numa for numa in node.numas if not numa.of_gpu]
    parts = [gpus, f"{len(node.nics)} NICs of which {len(node.rails)} rails", f"{len(numas)} NUMA nodes"]
    return ", ".join(parts) + (", of which the source shows a part" if node.partial else "")


def _gpus(node: Node) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for entry in near(node):
        gpu = entry.gpu
        links = [n for pair, n in node.nvlinks.items() if gpu.key in pair]
        spread = (
            f"{min(links)}" if links and min(links) == max(links) else f"{min(links)}-{max(links)}" if links else ""
        )
        rows.append(
            {
                "gpu": gpu.key,
                "address": gpu.pci,
                "NUMA": entry.numa,
                "CPUs": format_list(entry.cpus),
                "NVLinks": f"{spread} x {len(links)}" if links else "",
                "distance": entry.distance.name if entry.nics else "",
                "NICs": " ".join(nic.name for nic in entry.nics),
                "NCCL takes": " ".join(nic.name for nic in entry.picks),
            }
        )
    return _filled(rows)


def _nics(node: Node) -> list[dict[str, object]]:
    rails = [nic.name for nic in node.rails]
    return _filled(
        [
            {
                "NIC": nic.name,
                "interface": nic.interface if nic.interface != nic.name else "",
                "address": nic.pci,
                "NUMA": nic.numa,
                "link": " ".join(filter(None, [nic.link_layer, f"{nic.rate_gbit:g} Gbit/s" if nic.rate_gbit else ""])),
                "state": nic.state,
                "role": f"rail {rails.index(nic.name)}" if nic.name in rails else nic.role,
                "why": nic.why,
            }
            for nic in node.nics
        ]
    )


def _numas(node: Node) -> list[dict[str, object]]:
    near_by: dict[int | None, list[str]] = {}
    for gpu in node.gpus:
        near_by.setdefault(near_cpus(node, gpu)[0], []).append(gpu.key)
    return _filled(
        [
            {
                "NUMA": numa.index,
                "CPUs": format_list(numa.cpus),
                "memory": size(numa.memory_bytes) if numa.memory_bytes else "",
                "near": "memory of a GPU" if numa.of_gpu else " ".join(near_by.get(numa.index, [])),
            }
            for numa in node.numas
        ]
    )


def _filled(rows: list[dict[str, object]]) -> list[dict[str, object]]:
    """Rows without columns that are empty in all."""
    kept = [key for key in (rows[0] if rows else ()) if any(row[key] not in ("", None) for row in rows)]
    return [{key: row[key] for key in kept} for row in rows]


def _problems(problems: Sequence[str]) -> Iterator[str]:
    if problems:
        yield ""
        yield from (f"! {said}" for said in problems)


def unlike_lines(nodes: Sequence[Node]) -> Iterator[str]:
    """Where nodes do not have the map of most."""
    for name, found in differences(nodes).items():
        yield from (f"! {name}: {words}" for words in found.values())


def fabric_lines(fabric: Fabric) -> Iterator[str]:
    """Switches: units of hosts, and the leaves of each."""
    leaves = {leaf for mine in fabric.leaves.values() for leaf in mine if leaf}
    above = {parent for parents in fabric.parents.values() for parent in parents}
    parts = [f"{len(fabric.leaves)} hosts", f"{len(leaves)} leaves", f"{len(above)} switches above them"]
    domains = set(fabric.domains.values())
    parts += [f"{len(domains)} NVLink domains of several hosts"] if domains else []
    yield f"fabric ({fabric.kind}): {', '.join(parts)}"
    if fabric.sources:
        yield f"read from {' and '.join(fabric.sources)}"
    rows = [_unit(i, hosts, fabric) for i, hosts in enumerate(units(fabric.leaves))]
    if rows:
        yield ""
        yield from columns(rows[:HOSTS_SHOWN])
    if len(rows) > HOSTS_SHOWN:
        yield f"and {len(rows) - HOSTS_SHOWN} more units"
    yield from _problems(fabric.problems)


def _unit(index: int, hosts: Sequence[str], fabric: Fabric) -> dict[str, object]:
    mine = list(dict.fromkeys(leaf for host in hosts for leaf in fabric.leaves[host] if leaf))
    up = list(dict.fromkeys(parent for leaf in mine for parent in fabric.parents.get(leaf, ())))
    return {"unit": index, "hosts": fold(hosts, sort=True), "leaves": _few(mine), "under": _few(up)}


def _few(names: Sequence[str]) -> str:
    return " ".join(names) if len(names) <= NAMED else f"{names[0]} .. {names[-1]} ({len(names)})"


def table_lines(table: RankTable, ranks: bool = False) -> Iterator[str]:
    """A rank table: a line a host, or a unit of switches, or with `ranks` a rank; then bytes, and what was assumed."""
    yield f"{table.layout.describe()} on {len(table.hosts)} hosts"
    if ranks:
        rows = _filled([{**row, "host": row["host"]} for row in rank_rows(table)])
    elif len(table.hosts) <= HOSTS_SHOWN:
        rows = _filled([_group(table, [host]) for host in table.hosts])
    else:
        rows = _filled([_group(table, hosts) for hosts in _by_leaves(table)])
    yield ""
    yield from columns(rows)
    yield ""
    yield from byte_lines(table)
    yield from _problems(table.problems)


def rank_rows(table: RankTable) -> list[dict[str, object]]:
    """A row a rank, for people."""
    rows: list[dict[str, object]] = []
    for place in table:
        at = {axis: getattr(place, axis) for axis in AXES if getattr(table.layout, axis) > 1}
        gpu = {"gpu": place.gpu, "address": place.pci, "NUMA": place.numa, "CPUs": format_list(place.cpus)}
        net = {"NIC": place.nic, "rail": place.rail, "leaf": place.leaf}
        rows.append({"rank": place.rank, "host": place.host, "local": place.local_rank, **at, **gpu, **net})
    return rows


def _by_leaves(table: RankTable) -> list[list[str]]:
    """Hosts in runs that hang on the same leaves, in the order of ranks."""
    runs: list[tuple[tuple[int, ...], list[str]]] = []
    for host in table.hosts:
        leaves = tuple(sorted(set(table.leaf[table.ranks_of(host)].tolist())))
        if not runs or runs[-1][0] != leaves:
            runs.append((leaves, []))
        runs[-1][1].append(host)
    return [hosts for _, hosts in runs]


def _group(table: RankTable, hosts: Sequence[str]) -> dict[str, object]:
    ranks = [int(rank) for host in hosts for rank in table.ranks_of(host)]
    at = [table.layout.coordinates(rank) for rank in ranks]
    wide = [axis for axis in AXES if getattr(table.layout, axis) > 1]
    leaves = list(dict.fromkeys(table.leaves[i] for i in table.leaf[ranks].tolist()))
    orders = list(dict.fromkeys(table.gpus_of(host) for host in hosts))
    return {
        "hosts": fold(hosts),
        "ranks": span(ranks),
        **{axis: span([one[axis] for one in at]) for axis in wide},
        "GPUs in order of ranks": " or ".join(map(_order, orders[:2])),
        "leaves": _few(leaves),
    }


def _order(gpus: Sequence[int]) -> str:
    return span(gpus) if list(gpus) == sorted(gpus) else " ".join(map(str, gpus))


def byte_lines(table: RankTable) -> Iterator[str]:
    """Bytes of a step by kind of link, in this order and in those of Slurm; and by axis in this one."""
    others = {f"Slurm {name}": counted for name, counted in table.slurm.items()}
    rows: list[dict[str, object]] = []
    for link in LINKS:
        found = {name: counted.over(link) for name, counted in {"this order": table.bytes, **others}.items()}
        if any(found.values()):
            by_axis = {axis: size(row[link]) if row[link] else "" for axis, row in table.bytes.by_axis.items()}
            rows.append({"link": link, **{name: size(n) for name, n in found.items()}, **by_axis})
    if not rows:
        yield "one rank sends nothing"
        return
    yield "bytes that all ranks send in a step; the last columns are those of this order by axis"
    yield from columns(_filled(rows))
    mine = table.bytes.leaving
    parts = [f"{size(mine)} in this order"]
    for name, counted in others.items():
        times = f" ({counted.leaving / mine:.2g} x)" if mine and counted.leaving > mine * 1.005 else ""
        parts.append(f"{size(counted.leaving)} in {name}{times}")
    yield f"of these leave leaf switches: {', '.join(parts)}"


def table_plain(table: RankTable, ranks: bool) -> dict[str, Any]:
    """For JSON."""
    out: dict[str, Any] = {
        "layout": {axis: getattr(table.layout, axis) for axis in (*AXES, "ep", "etp")},
        "hosts": list(table.hosts),
        "in_blocks": table.in_blocks,
        "bytes": {"this order": _bytes(table.bytes.by_axis), **{k: _bytes(v.by_axis) for k, v in table.slurm.items()}},
        "relayed": table.bytes.relayed,
        "problems": list(table.problems),
    }
    if ranks:
        out["ranks"] = [{**place.plain(), "cpus": format_list(place.cpus)} for place in table]
    else:
        out["nodes"] = [{"host": host, "ranks": [int(r) for r in table.ranks_of(host)]} for host in table.hosts]
    return out


def _bytes(by_axis: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    return {axis: dict(row) for axis, row in by_axis.items()}


def node_plain(node: Node) -> dict[str, Any]:
    """For JSON: the node as its file has it, and what is near to each GPU."""
    nearby = [
        {
            "gpu": entry.gpu.key,
            "numa": entry.numa,
            "cpus": format_list(entry.cpus),
            "distance": entry.distance.name,
            "nics": [nic.name for nic in entry.nics],
            "nccl_takes": [nic.name for nic in entry.picks],
        }
        for entry in near(node)
    ]
    return {**nodefile.plain(node), "rails": [nic.name for nic in node.rails], "near": nearby}


def fabric_plain(fabric: Fabric) -> dict[str, Any]:
    """For JSON."""
    return {
        "kind": fabric.kind,
        "leaves": {host: list(mine) for host, mine in fabric.leaves.items()},
        "parents": {name: list(up) for name, up in fabric.parents.items()},
        "domains": dict(fabric.domains),
        "sources": list(fabric.sources),
        "problems": list(fabric.problems),
    }


def size(count: float) -> str:
    """Bytes with three digits: 1.32 TB."""
    unit = 0
    while count >= 999.5 and unit < len(UNITS) - 1:
        count, unit = count / 1000, unit + 1
    return f"{count:.3g} {UNITS[unit]}"


def span(numbers: Sequence[int]) -> str:
    """`0-3`, `2`, or `0,2,4`; of many that have gaps, the first few and how many."""
    text = format_list(tuple(sorted(set(numbers))))
    parts = text.split(",")
    return text if len(parts) <= 8 else f"{','.join(parts[:4])} .. {parts[-1]} ({len(set(numbers))})"


def device(node: Node, key: str) -> Gpu | None:
    """The GPU called gpu3."""
    return next((gpu for gpu in node.gpus if gpu.key == key.lower()), None)
