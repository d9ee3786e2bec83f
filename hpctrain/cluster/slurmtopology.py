"""Slurm's picture of the fabric: topology.conf, topology.yaml (25.05) and `scontrol show topology`.

Keys and rules are those of Slurm's manual pages topology.conf(5) and topology.yaml(5).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import yaml

from hpctrain.cluster.fabric import Fabric
from hpctrain.cluster.hostlist import expand
from hpctrain.cluster.slurmconf import Line, commented, hosts, lines, some
from hpctrain.cluster.switches import without_rings
from hpctrain.errors import ConfigError

Children = dict[str, list[str]]


def from_conf(text: str, source: str = "topology.conf") -> Fabric:
    """The fabric in a topology.conf, or in what `scontrol show topology` prints.

    Raises:
        ConfigError: it names no switch and no block.
    """
    problems: list[str] = []
    down: Children = {}
    nodes: Children = {}
    blocks: Children = {}
    sizes: list[int] = []
    for line in lines(text):
        if "blocksizes" in line:
            sizes = _sizes(line.get("blocksizes").split(","), problems)
        if line.get("blocksize").isdecimal():  # of scontrol, which lists larger blocks too
            sizes += [size for size in _sizes([line.get("blocksize")], problems) if size not in sizes]
        if line.get("switchname").upper() == "DEFAULT" or "aggregatedblock" in line:
            continue
        if "switchname" in line:
            _switch(line, down, nodes, problems)
        elif "blockname" in line:
            _once(line, "blockname", blocks, problems, hosts(line, "nodes", problems))
        elif "blocksizes" not in line:
            problems.append(f"line {line.number} is neither a switch nor a block: left out")
    for key in ("SwitchName", "BlockName"):
        if out := commented(text, key):
            problems.append(f"{some(out)}: commented out, so the hosts there are not in the fabric")
    if blocks:
        if nodes or down:
            problems.append("there are switches and blocks: Slurm takes one of them, here the blocks")
        return _of_blocks(blocks, sizes, source, problems)
    return _of_tree(down, nodes, source, problems)


def _switch(line: Line, down: Children, nodes: Children, problems: list[str]) -> None:
    name, upper = line.get("switchname"), line.get("level") not in ("", "0")
    below = hosts(line, "switches", problems)
    attached = [] if upper else hosts(line, "nodes", problems)  # scontrol lists all below on every level
    if below and attached:
        problems.append(f"line {line.number}: {name} has Switches and Nodes, and Slurm takes one of them")
    if not below and not attached:
        problems.append(f"line {line.number}: {name} has neither Switches nor Nodes")
    if name in down:
        problems.append(f"line {line.number}: {name} is there twice; the first is taken")
        return
    down[name] = below
    if attached:
        nodes[name] = attached


def _once(line: Line, key: str, into: Children, problems: list[str], value: list[str]) -> None:
    name = line.get(key)
    if name in into:
        problems.append(f"line {line.number}: {name} is there twice; the first is taken")
        return
    if not value:
        problems.append(f"line {line.number}: {name} has no Nodes")
    into[name] = value


def _of_tree(down: Children, nodes: Children, source: str, problems: list[str]) -> Fabric:
    if not nodes:
        raise _empty(source, problems)
    unknown = sorted({child for below in down.values() for child in below if child not in down})
    if unknown:
        problems.append(f"{some(unknown)}: named under Switches= but not defined")
    leaves: dict[str, list[str]] = {}
    for switch, attached in nodes.items():
        for host in dict.fromkeys(attached):
            leaves.setdefault(host, []).append(switch)
    if several := [host for host, on in leaves.items() if len(on) > 1]:
        problems.append(f"{some(several)}: on more than one leaf switch")
    parents, cut = without_rings({s: [c for c in below if c in down] for s, below in down.items()}, set(nodes))
    if cut:
        problems.append(f"{some(f'{child} under {parent}' for child, parent in cut)}: goes round in a ring; left out")
    tops = [s for s in down if not parents.get(s)]
    if len(tops) > 1 and not _share_all(tops, down):
        problems.append(f"{some(tops)}: no switch connects them; what is under different ones is taken to be far apart")
    return Fabric(
        leaves={host: tuple(on) for host, on in leaves.items()},
        parents=parents,
        kind="single" if len(down) == 1 else "tree",
        one_leaf=True,
        sources=(source,),
        problems=tuple(problems),
    )


def _empty(source: str, problems: Sequence[str]) -> ConfigError:
    why = f" ({problems[-1]})" if problems else ""
    return ConfigError(
        "fabric", source, f"no switch and no block in it has nodes{why}", "give SwitchName= or BlockName= with Nodes="
    )


def _share_all(tops: Sequence[str], down: Mapping[str, Sequence[str]]) -> bool:
    """Whether switches at the top stand beside each other above the same ones."""
    return len({frozenset(down[top]) for top in tops}) == 1 and bool(down[tops[0]])


def _sizes(values: Iterable[Any], problems: list[str]) -> list[int]:
    listed = [str(value).strip() for value in values]
    sizes = [int(value) for value in listed if value.isdigit() and 0 < int(value) < 1 << 31]
    if len(sizes) < len(listed):
        problems.append(f"BlockSizes={','.join(listed)}: sizes are numbers above 0")
    base = sizes[0] if sizes else 1
    if wrong := [s for s in sizes if s % base or (s // base) & (s // base - 1)]:
        problems.append(f"BlockSizes={','.join(listed)}: {wrong[0]} is not {base} times a power of two")
    return sizes


def _of_blocks(blocks: Children, sizes: Sequence[int], source: str, problems: list[str]) -> Fabric:
    """A block is an NVLink domain and, as nothing is said of switches, a leaf; larger sizes are levels above."""
    domains: dict[str, str] = {}
    for block, names in blocks.items():
        for host in names:
            if domains.setdefault(host, block) != block:
                problems.append(f"{host}: in the blocks {domains[host]} and {block}; the first is taken")
    if not domains:
        raise _empty(source, problems)
    base = min(sizes, default=1)
    if small := [block for block, names in blocks.items() if len(set(names)) < base]:
        problems.append(f"{some(small)}: fewer than the {base} nodes of the smallest block size")
    parents: dict[str, tuple[str, ...]] = {}
    below = {block: [block] for block in blocks}
    for size in sorted({s // base for s in sizes if s > base}):
        level: dict[str, list[str]] = {}
        for i, block in enumerate(blocks):
            level.setdefault(f"blocks {i // size * size + 1}-{i // size * size + size}", []).append(block)
        for name, members in level.items():
            for child, theirs in below.items():
                if theirs[0] in members:
                    parents[child] = (name,)
        below = level
    return Fabric(
        leaves={host: (block,) for host, block in domains.items()},
        parents=parents,
        domains=domains,
        kind="block",
        one_leaf=True,
        sources=(source,),
        problems=tuple(problems),
    )


def from_yaml(text: str, source: str = "topology.yaml", name: str = "") -> Fabric:
    """The fabric in a topology.yaml.

    Args:
        name: which of its topologies; "": the default of the cluster, or the first.

    Raises:
        ConfigError: it holds no such topology, or none that says where hosts are.
    """
    problems: list[str] = []
    listed = [t for t in _loaded(text, source, problems) if isinstance(t, dict) and isinstance(t.get("topology"), str)]
    found = [t for t in listed if t["topology"] == name or not name]
    if not found:
        raise ConfigError("fabric", name or source, "no such topology in it", some(t["topology"] for t in listed))
    chosen = next((t for t in found if t.get("cluster_default") is True), found[0])
    if len(found) > 1:
        problems.append(f"{len(found)} topologies; taken is {chosen['topology']}")
    if "block" in chosen:
        body = _dict(chosen["block"])
        sizes = _sizes(_list(body.get("block_sizes")), problems)
        return _of_blocks(_entries(body, "blocks", "block", "nodes", problems), sizes, source, problems)
    if "tree" in chosen:
        body = _dict(chosen["tree"])
        down = _entries(body, "switches", "switch", "children", problems)
        nodes = {k: v for k, v in _entries(body, "switches", "switch", "nodes", problems).items() if v}
        return _of_tree(down, nodes, source, problems)
    for kind, key in (("ring", "ring"), ("torus3d", "name")):
        if kind in chosen:
            nodes = _entries(_dict(chosen[kind]), "rings" if kind == "ring" else "toruses", key, "nodes", problems)
            problems.append(f"a {kind} is taken to be one switch")
            return _of_tree({ring: [] for ring in nodes}, {k: v for k, v in nodes.items() if v}, source, problems)
    if "flat" in chosen:
        return Fabric(kind="single", sources=(source,), problems=(*problems, "a flat topology names no hosts"))
    raise ConfigError("fabric", source, "a topology is a tree, block, ring, torus3d or flat")


def _loaded(text: str, source: str, problems: list[str]) -> list[Any]:
    """The list in a file; of one that ends early or is damaged towards its end, what comes before."""
    rows = text.splitlines()
    for kept in range(len(rows), max(0, len(rows) - 40), -1):
        try:
            found = yaml.safe_load("\n".join(rows[:kept]))
        except (yaml.YAMLError, ValueError, RecursionError):
            continue
        if isinstance(found, list):
            if kept < len(rows):
                problems.append(f"no YAML from line {kept + 1} on: left out")
            return found
        break
    raise ConfigError("fabric", source, "not a YAML list of topologies", "see topology.yaml(5)")


def _entries(body: Mapping[str, Any], key: str, name: str, of: str, problems: list[str]) -> Children:
    out: Children = {}
    for entry in _list(body.get(key)):
        if not isinstance(entry, dict) or entry.get(name) is None:
            problems.append(f"an entry of {key} has no {name}: left out")
            continue
        try:
            out.setdefault(str(entry[name]), []).extend(expand(str(entry.get(of) or "")))
        except ConfigError as error:
            problems.append(f"{entry[name]}: {error}")
            out.setdefault(str(entry[name]), [])
    return out


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
