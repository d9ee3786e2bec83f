"""Several readings of one machine, made one node; where they contradict each other, it is said.

Devices are matched by PCI address, as names and indices move; by UUID or name where an address is missing; GPUs by
index only where both readings show the same number of them. Of values that differ the first reading's is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from hpctrain.cluster import pci
from hpctrain.cluster.cpus import format_list
from hpctrain.cluster.node import Cpus, Distance, Gpu, Nic, Node, Numa
from hpctrain.cluster.smi_topo import overlaps

Pair = tuple[str, str]
_NEAR = {Distance.NVLINK: 0, Distance.C2C: 0, Distance.PIX: 1, Distance.PXB: 1, Distance.PHB: 2, Distance.NODE: 2}
"""Distances that different tools call by different words: NCCL knows no NODE, bridges are counted differently."""
_WHOLE = ("sysfs", "hwloc", "NCCL")
"""Sources that show every NUMA node, if they show any."""


def merge(nodes: Sequence[Node]) -> Node:
    """One node of several readings, the most trusted first."""
    assert nodes, "there is something to merge"
    merger = _Merger()
    tables = [merger.add(node) for node in nodes]
    order = sorted(range(len(nodes)), key=lambda i: _coarse(nodes[i]))
    for place, i in enumerate(order):
        merger.pairs(nodes[i], tables[i], [nodes[j] for j in order[:place]])
    return merger.result(nodes)


def _called(node: Node) -> str:
    return " and ".join(node.sources) or "a reading"


def _coarse(node: Node) -> bool:
    """Whether a reading sees no bridge below a host bridge that two devices share. Kubernetes names host bridges alone,
    and in many virtual machines /sys shows every device on one of its own: what others say goes before that."""
    gpus = {gpu.key for gpu in node.gpus}
    on_bus = {pair: d for pair, d in node.distances.items() if Distance.PIX <= d <= Distance.SYS}
    crossing = [d for (a, b), d in on_bus.items() if (a in gpus) != (b in gpus)]
    return bool(on_bus) and min(crossing or on_bus.values()) >= Distance.PHB


class _Merger:
    def __init__(self) -> None:
        self.gpus: list[Gpu] = []
        self.nics: list[Nic] = []
        self.numas: dict[int, Numa] = {}
        self.distances: dict[Pair, Distance] = {}
        self.nvlinks: dict[Pair, int] = {}
        self.p2p: dict[Pair, str] = {}
        self.cores: tuple[Cpus, ...] = ()
        self.flat: list[tuple[str, dict[Pair, Distance]]] = []
        self.renamed: dict[str, str] = {}
        self.unclassed: dict[str, int | None] = {}
        self.seen: list[Node] = []
        self.problems: list[str] = []

    def add(self, node: Node) -> dict[str, str]:
        """Its devices; returned are their keys here by those of the reading."""
        who, before = _called(node), " and ".join(_called(n) for n in self.seen)
        keys = self._match_gpus(node, who, before)
        names = self._match_nics(node, who, before)
        self._missing(node, who)
        self._numas(node, who, before)
        table = {**{g.key: keys[g.key] for g in node.gpus if g.key in keys}, **names}
        self.unclassed.update({k: v for k, v in node.unclassed.items() if k not in self.unclassed})
        self.problems += [p for p in node.problems if p not in self.problems]
        self.cores = self.cores or node.cores
        self.seen.append(node)
        return table

    def _match_gpus(self, node: Node, who: str, before: str) -> dict[str, str]:
        """Keys of the merged GPUs by those of the reading. Here a key is the place in `self.gpus`."""
        keys: dict[str, str] = {}
        clashes: dict[str, list[str]] = {}
        named = any(g.pci for g in node.gpus) and any(g.pci for g in self.gpus)
        marked = any(g.uuid for g in node.gpus) and any(g.uuid for g in self.gpus)
        by_index = bool(self.gpus) and not named and not marked
        if by_index and node.gpus and len(node.gpus) != len(self.gpus):
            self.problems.append(
                f"{who} shows {len(node.gpus)} GPUs without addresses, {before} {len(self.gpus)}: they are not matched"
            )
            return {}
        for gpu in node.gpus:
            place = next((i for i, g in enumerate(self.gpus) if self._same_gpu(g, gpu, by_index)), None)
            if place is None:
                self.gpus.append(gpu)
                place = len(self.gpus) - 1
            else:
                self.gpus[place] = _fill(self.gpus[place], gpu, clashes, ("numa", "cpus", "mig", "uuid", "pci"))
            keys[gpu.key] = f"gpu#{place}"
        self._say(clashes, "GPUs", who, before)
        return keys

    @staticmethod
    def _same_gpu(a: Gpu, b: Gpu, by_index: bool) -> bool:
        if a.pci and b.pci:
            return a.pci == b.pci
        if a.uuid and b.uuid:
            return a.uuid == b.uuid
        return by_index and a.index == b.index

    def _match_nics(self, node: Node, who: str, before: str) -> dict[str, str]:
        names: dict[str, str] = {}
        clashes: dict[str, list[str]] = {}
        kinds = {_known_by(nic) for nic in self.nics}
        apart = False
        for nic in node.nics:
            place = next((i for i, n in enumerate(self.nics) if _same_nic(n, nic)), None)
            if place is None:
                apart = apart or {"name": "address", "address": "name"}.get(_known_by(nic)) in kinds
                same = next((n for n in self.nics if n.name == nic.name), None)
                if same is not None:
                    clashes.setdefault("address", []).append(f"{nic.name}: {nic.pci}, {same.pci}")
                kept = nic if same is None else replace(nic, name=f"{nic.name}@{nic.pci}")
                self.nics.append(kept)
            else:
                old = self.nics[place]
                fixed = ("numa", "virtual", "link_layer", "guid", "state", "rate_gbit", "pci")
                kept = _fill(old, nic, clashes, fixed)
                if old.name != nic.name and old.name == old.pci:
                    kept = replace(kept, name=nic.name)
                    self.renamed[old.name] = nic.name
                elif old.name != nic.name and nic.name != nic.pci:
                    clashes.setdefault("name", []).append(f"{nic.pci or old.name}: {nic.name}, {old.name}")
                self.nics[place] = kept
            names[nic.name] = kept.name
        self._say(clashes, "NICs", who, before)
        if apart:
            one, two = f"{who} and {before}", "one has names of NICs without addresses, another addresses without names"
            self.problems.append(f"{one}: {two}: they are not matched, and what is one NIC may be counted twice")
        return names

    def _say(self, clashes: Mapping[str, list[str]], what: str, who: str, before: str) -> None:
        for field_name, cases in clashes.items():
            word = {"cpus": "CPUs", "numa": "NUMA node", "uuid": "UUID", "pci": "address"}.get(field_name, field_name)
            word = word.replace("_", " ")
            self.problems.append(f"{who} and {before} disagree on the {word} of {len(cases)} {what}, first {cases[0]}")

    def _missing(self, node: Node, who: str) -> None:
        """GPUs that one reading with addresses has and another one lacks, and NICs of an XML that are not there."""
        for other in self.seen:
            for a, b, a_name, b_name in ((node, other, who, _called(other)), (other, node, _called(other), who)):
                mine, theirs = {g.pci for g in a.gpus if g.pci}, {g.pci for g in b.gpus if g.pci}
                lost = sorted(mine - theirs, key=pci.order)
                if theirs and lost:
                    self.problems.append(f"GPU {', '.join(lost[:4])} is in {a_name}, not in {b_name}")
                if a_name.startswith("NCCL") and b_name.startswith(("sysfs", "hwloc")):
                    nics = {n.pci for n in a.nics if n.pci} - {n.pci for n in b.nics}
                    if nics:
                        first = ", ".join(sorted(nics, key=pci.order)[:4])
                        self.problems.append(f"NIC {first} is in {a_name}, not in {b_name}")

    def _numas(self, node: Node, who: str, before: str) -> None:
        for other in self.seen:
            mine = {n.index for n in node.numas if n.cpus}
            theirs = {n.index for n in other.numas if n.cpus}
            whole = who.startswith(_WHOLE) and _called(other).startswith(_WHOLE)
            if whole and mine and theirs and mine != theirs:
                one, two = format_list(tuple(sorted(mine))), format_list(tuple(sorted(theirs)))
                self.problems.append(f"{who} has NUMA nodes {one}, {_called(other)} {two}")
        clashes: list[str] = []
        for numa in node.numas:
            old = self.numas.get(numa.index)
            if old is None:
                self.numas[numa.index] = numa
                continue
            if old.cpus and numa.cpus and old.cpus != numa.cpus:
                clashes.append(f"node {numa.index}: {format_list(numa.cpus)}, {format_list(old.cpus)}")
            self.numas[numa.index] = Numa(
                numa.index,
                old.cpus or numa.cpus,
                old.memory_bytes if old.memory_bytes is not None else numa.memory_bytes,
                old.of_gpu or numa.of_gpu,
            )
        if clashes:
            self.problems.append(
                f"{who} and {before} disagree on the CPUs of {len(clashes)} NUMA nodes, first {clashes[0]}"
            )

    def pairs(self, node: Node, table: Mapping[str, str], earlier: Sequence[Node]) -> None:
        """What a reading says of pairs of devices, after those that know more of them."""
        table = {key: self.renamed.get(name, name) for key, name in table.items()}
        who, before = _called(node), " and ".join(map(_called, earlier))

        def renamed(pairs: Mapping[Pair, Any]) -> dict[Pair, Any]:
            found = {}
            for (a, b), value in pairs.items():
                if a in table and b in table:
                    found[_sorted(table[a], table[b])] = value
            return found

        distances: dict[Pair, Distance] = renamed(node.distances)
        crossing = {
            pair: d for pair, d in distances.items() if pair[0].startswith("gpu#") != pair[1].startswith("gpu#")
        }
        if len(crossing) > 1 and len(set(crossing.values())) == 1 and min(crossing.values()) >= Distance.PHB:
            self.flat.append((who, crossing))
            distances = {pair: d for pair, d in distances.items() if pair not in crossing}
        coarse = _coarse(node)
        self._compare(self.distances, distances, "distance", who, before, lambda a, b: _differ(a, b, coarse))
        for pair, value in distances.items():
            old = self.distances.get(pair)
            links = Distance.NVLINK in (old, value)
            if old is None or (links and value < old):
                self.distances[pair] = value
        nvlinks: dict[Pair, int] = renamed(node.nvlinks)
        self._compare(self.nvlinks, nvlinks, "NVLinks", who, before, lambda a, b: bool(a != b))
        self.nvlinks = {**nvlinks, **self.nvlinks}
        self.p2p = {**renamed(node.p2p), **self.p2p}

    def _compare(
        self,
        old: Mapping[Pair, Any],
        new: Mapping[Pair, Any],
        what: str,
        who: str,
        before: str,
        differ: Callable[[Any, Any], bool],
    ) -> None:
        clashes = [pair for pair, value in new.items() if pair in old and differ(old[pair], value)]
        if clashes:
            a, b = clashes[0]
            first = f"{a.replace('#', '')} to {b.replace('#', '')}: {_word(new[clashes[0]])}, {_word(old[clashes[0]])}"
            self.problems.append(f"{who} and {before} disagree on the {what} of {len(clashes)} pairs, first {first}")

    def result(self, nodes: Sequence[Node]) -> Node:
        gpus, final = self._numbered()
        distances = {_keys(pair, final): d for pair, d in self.distances.items()}
        fill = {g.key: self.unclassed[g.pci] for g in gpus if g.numa is None and self.unclassed.get(g.pci) is not None}
        gpus = tuple(replace(g, numa=fill.get(g.key, g.numa)) for g in gpus)
        nics = tuple(
            replace(n, numa=self.unclassed.get(n.pci)) if n.numa is None and n.pci in self.unclassed else n
            for n in self.nics
        )
        names = {node.name for node in nodes if node.name}
        if len(names) > 1:
            self.problems.append(f"the readings are of nodes {', '.join(sorted(names))}: are they of one machine?")
        node = pci.measure(
            Node(
                name=next((node.name for node in nodes if node.name), ""),
                gpus=gpus,
                nics=nics,
                numas=tuple(self.numas[i] for i in sorted(self.numas)),
                distances=distances,
                nvlinks={_keys(pair, final): n for pair, n in self.nvlinks.items()},
                sources=tuple(dict.fromkeys(s for node in nodes for s in node.sources)),
                partial=all(node.partial for node in nodes),
                p2p={_keys(pair, final): word for pair, word in self.p2p.items()},
                cores=self.cores,
                unclassed={
                    k: v
                    for k, v in self.unclassed.items()
                    if k not in {d.pci for d in Node(gpus=gpus, nics=nics).devices}
                },
            )
        )
        node = self._flat(node, final)
        masks = {n.index: n.cpus for n in node.numas if n.cpus}
        gpus = tuple(
            replace(g, cpus=g.cpus or masks.get(g.numa or 0, ()) if g.numa is not None else g.cpus) for g in node.gpus
        )
        shared = [p for p in overlaps(masks) if p not in self.problems]
        return replace(node, gpus=gpus, problems=tuple(dict.fromkeys([*self.problems, *shared])))

    def _numbered(self) -> tuple[tuple[Gpu, ...], dict[str, str]]:
        """GPUs with their last index: by address, or as they were numbered."""
        places = sorted(range(len(self.gpus)), key=lambda i: (*pci.order(self.gpus[i].pci), self.gpus[i].index, i))
        known = all(g.pci for g in self.gpus)
        unique = len({g.index for g in self.gpus}) == len(self.gpus)
        index = {p: i if known or not unique else self.gpus[p].index for i, p in enumerate(places)}
        gpus = tuple(replace(self.gpus[p], index=index[p]) for p in sorted(places, key=lambda p: index[p]))
        return gpus, {f"gpu#{p}": f"gpu{i}" for p, i in index.items()}

    def _flat(self, node: Node, final: Mapping[str, str]) -> Node:
        """Readings in which all GPUs are as far from all NICs count only where nothing better is known."""
        distances = dict(node.distances)
        for who, crossing in self.flat:
            pairs = {_keys(pair, final): d for pair, d in crossing.items()}
            known = {pair: node.distance(*pair) for pair in pairs}
            better = [p for p, d in known.items() if d is not Distance.UNKNOWN and _differ(d, pairs[p], False)]
            if better:
                word = next(iter(pairs.values())).name
                self.problems.append(
                    f"{who} says {word} for every GPU and NIC; "
                    f"addresses and NUMA nodes say otherwise for {len(better)} pairs"
                )
            distances.update({p: d for p, d in pairs.items() if known[p] is Distance.UNKNOWN})
        return replace(node, distances=distances)


def _known_by(nic: Nic) -> str:
    """What a NIC can be matched by, if by one thing alone: NCCL's XML has addresses, a matrix has names."""
    return "name" if not nic.pci else "address" if nic.name == nic.pci else ""


def _same_nic(a: Nic, b: Nic) -> bool:
    if a.pci and b.pci:
        return a.pci == b.pci and (a.port == b.port or not (a.verbs and b.verbs))
    if a.guid and b.guid and a.guid.replace(":", "") == b.guid.replace(":", ""):
        return a.port == b.port
    return a.name == b.name


def _fill(old: Any, new: Any, clashes: dict[str, list[str]], strict: Iterable[str]) -> Any:
    """The old device with what only the new one knows; fields that differ are noted."""
    changed: dict[str, Any] = {}
    for item in fields(old):
        mine, theirs = getattr(old, item.name), getattr(new, item.name)
        unknown = mine is None or mine == "" or mine == () or (item.name == "role" and mine == "unknown")
        if item.name in ("index", "port") or theirs == item.default:  # it knows nothing of it
            continue
        if unknown:
            changed[item.name] = theirs
        elif item.name in strict and mine != theirs:
            label = old.key if isinstance(old, Gpu) else old.name
            clashes.setdefault(item.name, []).append(f"{label}: {_word(theirs)}, {_word(mine)}")
    changed.pop("name", None) if old.name else None
    return replace(old, **changed)


def _word(value: Any) -> str:
    if isinstance(value, tuple):
        return format_list(value)
    return value.name if isinstance(value, Distance) else str(value)


def _differ(a: Distance, b: Distance, coarse: bool) -> bool:
    if Distance.UNKNOWN in (a, b) or 0 in (_NEAR.get(a), _NEAR.get(b)):
        return False  # a reading that shows PCI only does not see links
    x, y = _NEAR.get(a, 3), _NEAR.get(b, 3)
    return x != y and not (coarse and max(x, y) == 2)


def _sorted(a: str, b: str) -> Pair:
    return (a, b) if (not a.startswith("gpu#"), a) <= (not b.startswith("gpu#"), b) else (b, a)


def _keys(pair: Pair, final: Mapping[str, str]) -> Pair:
    return final.get(pair[0], pair[0]), final.get(pair[1], pair[1])
