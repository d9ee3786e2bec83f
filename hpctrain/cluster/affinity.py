"""Which NICs, NUMA node and CPUs each GPU has, and whether a node is fit to be used at all."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpctrain.cluster.binding import near_cpus
from hpctrain.cluster.node import Cpus, Distance, Gpu, Nic, Node
from hpctrain.cluster.roles import nearest

_LINKED = re.compile(r"\bSXM|HGX|\bDGX|HBM3|\bB[23]00\b|\bGB[23]00\b|\bH200\b(?! NVL)|\bH20\b|\bH800\b(?! PCIe)")
"""Names of GPUs that sit on a board with NVLink."""


BOARD = 8
"""GPUs of a board whose NVLinks are a mesh (DGX-1)."""
SWITCHED = 6
"""NVLinks of a pair from which they go over switches, and are as many for all pairs (6, 12, 18)."""


@dataclass(frozen=True)
class Near:
    """What is near to a GPU.

    Attributes:
        nics: rails at the least distance, in the order of rails.
        distance: to them.
        picks: those of them that NCCL gives this GPU when every GPU of the node takes part, first channel first.
        any_nics, any_distance: the same of all NICs, whatever their role.
        numa: the NUMA node, never one that is the memory of a GPU; None if not known.
        cpus: CPUs of it; () if not known.
    """

    gpu: Gpu
    nics: tuple[Nic, ...]
    distance: Distance
    picks: tuple[Nic, ...]
    any_nics: tuple[Nic, ...]
    any_distance: Distance
    numa: int | None
    cpus: Cpus


def near(node: Node) -> tuple[Near, ...]:
    """What is near to each GPU of a node whose NICs have roles."""
    rails = node.rails
    groups = {gpu.index: nearest(node, gpu.key, rails) for gpu in node.gpus}
    found = []
    for gpu in node.gpus:
        distance, nics = groups[gpu.index]
        sharing = sum(1 for _, others in groups.values() if nics and any(n.name == nics[0].name for n in others))
        numa, cpus = near_cpus(node, gpu)
        mine = picks(gpu.index, nics, sharing)
        any_distance, any_nics = nearest(node, gpu.key, node.nics)
        found.append(Near(gpu, tuple(nics), distance, mine, tuple(any_nics), any_distance, numa, cpus))
    return tuple(found)


def picks(index: int, nics: Sequence[Nic], sharing: int) -> tuple[Nic, ...]:
    """NICs that NCCL gives a GPU, of those as near.

    As `ncclTopoGetLocalNet` (NCCL src/graph/topo.cc) does: as many for each GPU as there are NICs to GPUs that share
    them, rounded up, beginning at the GPU's index, whose bits are mirrored if the NICs are a power of two.

    Args:
        sharing: GPUs that have the first of these NICs nearest.
    """
    count = len(nics)
    if not count:
        return ()
    start = mirrored(index, count) if count & (count - 1) == 0 else index
    return tuple(nics[(start + i) % count] for i in range(-(-count // max(sharing, 1))))


def mirrored(value: int, power: int) -> int:
    """Bits of a value below a power of two, in the other order."""
    result, bit, other = 0, 1, power >> 1
    while bit < power:
        if value & bit:
            result |= other
        bit, other = bit << 1, other >> 1
    return result


def nvlink_fault(node: Node, expected: bool | None = None) -> str:
    """What is broken about the NVLinks of a node, in words; "" if nothing is seen.

    Args:
        expected: whether the board has NVLink; None: judge by names of GPUs, and by a NIC for each GPU as only such
            boards have them.
    """
    counts = dict(node.nvlinks)
    if not counts or len(node.gpus) < 2:
        return ""
    if not any(counts.values()):
        board = any(_LINKED.search(gpu.name) for gpu in node.gpus) or (len(node.gpus) >= 8 and _nic_each(node))
        if expected or (expected is None and board):
            return "broken NVLink: no GPU has one to another, on a board that has them"
        return ""
    peers: Counter[str] = Counter()
    totals: Counter[str] = Counter({gpu.key: 0 for gpu in node.gpus if any(gpu.key in pair for pair in counts)})
    for (a, b), n in counts.items():
        for gpu in (a, b):
            totals[gpu] += n
            peers[gpu] += n > 0
    if said := _odd_pairs(counts):
        return said
    # Meshes with unlike counts have as many links on each GPU, if all eight of a board are shown.
    complete = len(node.gpus) >= BOARD and len(counts) == len(node.gpus) * (len(node.gpus) - 1) // 2
    if complete and max(peers.values()) > 1 and len(set(totals.values())) > 1:
        least = min(totals.values())
        weak = [gpu for gpu, n in totals.items() if n == least]
        if len(weak) * 2 >= len(totals):
            return ""  # as many GPUs have fewer as have more: so the board is wired, as AMD's of eight halves
        return f"broken NVLink on {', '.join(weak)}: {least} in all, others have {max(totals.values())}"
    return ""


def _odd_pairs(counts: Mapping[tuple[str, str], int]) -> str:
    """Where all GPUs reach all others by as many links: those GPUs that do not, in words; "" on other boards."""
    usual, times = Counter(n for n in counts.values() if n).most_common(1)[0]
    left = {pair for pair, n in counts.items() if n < usual}
    fewest = min(counts.values())
    blame = Counter(gpu for pair in left for gpu in pair)
    everyone = {gpu for pair in counts for gpu in pair}
    if not left or (set(blame) == everyone and len(set(blame.values())) == 1):
        return ""  # every GPU lacks as many: so the board is wired
    guilty: list[str] = []
    while left:  # the fewest GPUs that explain all odd pairs, the worst first
        worst = Counter(gpu for pair in left for gpu in pair).most_common(1)[0][0]
        guilty.append(worst)
        left = {pair for pair in left if worst not in pair}
    switched = usual >= SWITCHED and times * 2 >= len(counts)
    rest = [n for pair, n in counts.items() if not set(pair) & set(guilty)]
    if not switched and (fewest > 0 or len(rest) < 3 or set(rest) != {usual}):
        return ""  # a part of a mesh, or pairs joined by a bridge
    return (
        f"broken NVLink on {', '.join(sorted(guilty))}: {fewest or 'none'} to others, which have {usual} between them"
    )


def _nic_each(node: Node) -> bool:
    """Whether every GPU has a NIC behind its own bridge, as boards with NVLink are built."""
    own = [nearest(node, gpu.key, node.nics) for gpu in node.gpus]
    named = {nics[0].name for d, nics in own if nics and d <= Distance.PXB}
    return len(named) * 2 >= len(node.gpus) and all(d <= Distance.PXB for d, nics in own if nics)


def unfit(node: Node, nvlink: bool | None = None) -> list[tuple[str, str]]:
    """Why a node cannot be used, and how to mend it, a pair each."""
    said: list[tuple[str, str]] = []
    if not node.gpus:
        return [("no GPU is known on it", "name a source that lists GPUs")]
    cut = [gpu.key for gpu in node.gpus if gpu.mig]
    if cut:
        said.append(
            (
                f"MIG instances on {', '.join(cut)}: ranks of one job cannot use them together",
                "turn MIG off (nvidia-smi -mig 0), or leave the node out",
            )
        )
    for what, values in (("address", [g.pci for g in node.gpus]), ("UUID", [g.uuid for g in node.gpus])):
        doubled = sorted(v for v, n in Counter(v for v in values if v).items() if n > 1)
        if doubled:
            said.append((f"the {what} {doubled[0]} stands for two GPUs: one is shared", "give each rank its own GPU"))
    fault = nvlink_fault(node, nvlink)
    if fault:
        said.append((fault, "leave the node out, and have its NVLinks and fabric manager looked at"))
    return said


def signature(node: Node) -> dict[str, object]:
    """What must be the same on all nodes, by what it is called."""
    rails = [nic.name for nic in node.rails]
    table = {
        entry.gpu.key: (
            entry.distance.name,
            *(f"rail {rails.index(nic.name)}" for nic in entry.nics),
            "NUMA node not known" if entry.numa is None else f"NUMA {entry.numa}",
        )
        for entry in near(node)
    }
    return {
        "GPUs": len(node.gpus),
        "rails": len(rails),
        "NICs and NUMA node of GPUs": table,
        "NVLinks": tuple(sorted(node.nvlinks.values())),
        "link layer and rate of rails": [(nic.link_layer, nic.rate_gbit) for nic in node.rails],
        "state of rails": [nic.state for nic in node.rails],
        "names of rails": rails,
        "addresses of rails": [nic.pci for nic in node.rails],
    }


def differences(nodes: Sequence[Node]) -> dict[str, dict[str, str]]:
    """Nodes whose map is not that of most, by name: what differs, and how, in words. Nodes must have roles."""
    facts = [signature(node) for node in nodes]
    said: dict[str, dict[str, str]] = {}
    for what in facts[0] if facts else ():
        votes = Counter(repr(fact[what]) for fact in facts)
        usual = votes.most_common(1)[0][0]
        most = next(fact[what] for fact in facts if repr(fact[what]) == usual)
        for i, (node, fact) in enumerate(zip(nodes, facts)):
            if repr(fact[what]) != usual:
                mine = said.setdefault(node.name or f"node {i}", {})
                mine[what] = f"{what}: {_delta(fact[what], most)}"
    return said


def _delta(mine: object, most: object) -> str:
    """What one node has and most have; of tables and lists of one length, only what is not the same in both."""
    if isinstance(mine, Mapping) and isinstance(most, Mapping):
        keys = [key for key in {**most, **mine} if mine.get(key) != most.get(key)]
        pairs = [(f"{key}: ", mine.get(key, "none"), most.get(key, "none")) for key in keys]
    elif isinstance(mine, list) and isinstance(most, list) and len(mine) == len(most):
        pairs = [(f"{i}: ", a, b) for i, (a, b) in enumerate(zip(mine, most)) if a != b]
    else:
        pairs = [("", mine, most)]
    parts = [f"{key}{_shown(a)}, most have {_shown(b)}" for key, a, b in pairs[:2]]
    return "; ".join([*parts, *([f"and {len(pairs) - 2} more"] if len(pairs) > 2 else [])])


def _shown(value: object) -> str:
    if isinstance(value, (list, tuple)) and not value:
        return "none"
    if isinstance(value, (list, tuple)):
        words = [f"{n} x {_shown(v)}" if n > 1 else _shown(v) for v, n in Counter(value).items()]
        return " ".join(words[:6])
    return "unknown" if value in ("", None) else str(value)
