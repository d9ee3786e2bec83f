"""Pictures of nodes with their GPUs and NICs, of rails and switches above them, of ranks, and of bytes by link."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.cli.topo_text import size
from hpctrain.cluster.affinity import near
from hpctrain.cluster.binding import near_cpus
from hpctrain.cluster.cpus import format_list
from hpctrain.cluster.fabric import Fabric
from hpctrain.cluster.hostlist import fold
from hpctrain.cluster.linkbytes import LINKS, LinkBytes
from hpctrain.cluster.node import Gpu, Nic, Node
from hpctrain.cluster.ranktable import RankTable
from hpctrain.files import write_picture

PALETTE = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2", "#9d755d", "#eeca3b")
"""Colours of rails, over again after the last."""
GREY, PALE, INK = "#8a8a8a", "#f4f4f2", "#333333"
LINK_COLOURS = dict(zip(LINKS, ("#54a24b", "#4c78a8", "#b279a2", "#9d755d", "#e45756")))
NODES = 4
"""Nodes that are drawn; the others are said to be alike."""
WIDTH, GAP = 1.0, 0.25
"""Of a GPU or NIC, and between nodes."""
NIC_Y, GPU_Y, LEAF_Y, SPINE_Y = 1.0, 0.0, 2.1, 3.05


@dataclass(frozen=True)
class Slot:
    """A GPU as it is drawn: what is on it, and the NIC it sends by."""

    label: str
    rank: str = ""
    rail: int | None = None


@dataclass(frozen=True)
class Box:
    """A node as it is drawn.

    Attributes:
        numas: NUMA node of each slot, and its CPUs, in words; "" if not known.
        nics: of the node that are drawn, rails first.
    """

    name: str
    slots: tuple[Slot, ...]
    numas: tuple[str, ...]
    nics: tuple[Nic, ...]
    rails: int
    leaves: tuple[str, ...] = ()


def draw_nodes(nodes: Sequence[Node], fabric: Fabric | None, path: Path) -> None:
    """Draw nodes without ranks."""
    boxes = [box_of(node, fabric) for node in nodes[:NODES]]
    more = f", and {len(nodes) - NODES} more" if len(nodes) > NODES else ""
    _draw(boxes, fabric, f"{', '.join(box.name or 'this node' for box in boxes)}{more}", {}, path)


def draw_table(table: RankTable, fabric: Fabric | None, title: str, path: Path) -> None:
    """Draw the first hosts of a job, or the first of each unit of switches; beside them bytes by kind of link."""
    hosts = shown(table)
    boxes = [box_of_host(table, host) for host in hosts]
    left = len(table.hosts) - len(hosts)
    if left:
        title += f"\n{fold(hosts)} of {len(table.hosts)} hosts; the others are alike"
    counted = {"this order": table.bytes, **{f"Slurm, {name}": found for name, found in table.slurm.items()}}
    _draw(boxes, fabric, title, counted, path)


def shown(table: RankTable) -> list[str]:
    """Hosts to draw: all; else the first of those on one set of leaves, and those where the set changes."""
    if len(table.hosts) <= NODES:
        return list(table.hosts)
    sets = [frozenset(table.leaf[table.ranks_of(host)].tolist()) for host in table.hosts]
    first = sets.index(sets[0])
    other = next((i for i, one in enumerate(sets) if one != sets[0]), 2)
    wanted = dict.fromkeys([first, first + 1, other, other + 1, *range(NODES)])
    return [table.hosts[i] for i in sorted([i for i in wanted if i < len(table.hosts)][:NODES])]


def box_of(node: Node, fabric: Fabric | None) -> Box:
    """A node without ranks."""
    rails = [nic.name for nic in node.rails]
    slots = tuple(
        Slot(entry.gpu.key, "", rails.index(entry.picks[0].name) if entry.picks else None) for entry in near(node)
    )
    leaves = fabric.leaves.get(node.name, ()) if fabric is not None else ()
    drawn = node.nics[: max(len(rails) + 2, len(slots))]
    return Box(node.name, slots, tuple(_home(node, gpu) for gpu in node.gpus), drawn, len(rails), leaves)


def box_of_host(table: RankTable, host: str) -> Box:
    """A host with its ranks, in the order of its devices."""
    node = table.described(host)
    places = sorted((table[int(rank)] for rank in table.ranks_of(host)), key=lambda place: place.gpu)
    gpus = {gpu.index: gpu for gpu in node.gpus} if node is not None else {}
    slots = tuple(Slot(f"gpu{p.gpu}" if gpus else f"slot {p.gpu}", _rank(table, p.rank), p.rail) for p in places)
    homes = tuple(_home(node, gpus[p.gpu]) if node is not None and p.gpu in gpus else "" for p in places)
    rails = sorted({place.rail for place in places})
    found = node.rails if node is not None else ()
    nics = tuple(found[r] if r < len(found) else Nic(f"rail {r}") for r in range(max(rails, default=-1) + 1))
    by_rail = {place.rail: place.leaf for place in places}
    return Box(host, slots, homes, nics, len(nics), tuple(by_rail.get(r, "") for r in range(len(nics))))


def _rank(table: RankTable, rank: int) -> str:
    at = table.layout.coordinates(rank)
    wide = [f"{axis}{at[axis]}" for axis in at if getattr(table.layout, axis) > 1]
    return f"{rank}\n{' '.join(wide[:2])}" + (f"\n{' '.join(wide[2:])}" if wide[2:] else "")


def _home(node: Node, gpu: Gpu) -> str:
    numa, cpus = near_cpus(node, gpu)
    return f"NUMA {numa}" + (f", CPUs {format_list(cpus)}" if cpus else "") if numa is not None else ""


def _draw(
    boxes: Sequence[Box], fabric: Fabric | None, title: str, counted: Mapping[str, LinkBytes], path: Path
) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    units = sum(max(len(box.slots), len(box.nics), 1) * WIDTH + GAP for box in boxes)
    wide = min(max(8.0, 0.62 * units), 30.0)
    traffic = bool(counted) and any(found.total for found in counted.values())
    bars = 0.45 * len(counted) + 0.9 if traffic else 0.0
    tall = 1.15 * (_top(boxes, fabric) + 1.9)
    figure = Figure(figsize=(wide, tall + bars), layout="constrained")
    FigureCanvasAgg(figure)
    ratios = [tall, bars] if traffic else [1]
    grid = figure.add_gridspec(len(ratios), 1, height_ratios=ratios)
    axes = figure.add_subplot(grid[0])
    left = 0.0
    ports: dict[tuple[int, int], float] = {}
    for i, box in enumerate(boxes):
        left = _node(axes, box, i, left, ports)
    _switches(axes, boxes, fabric, ports)
    axes.set(xlim=(-GAP, left), ylim=(-1.1, _top(boxes, fabric) + 0.4))
    axes.set_axis_off()
    axes.set_title(title, fontsize=11, color=INK)
    if traffic:
        _bytes(figure.add_subplot(grid[1]), counted)
    write_picture(path, figure, dpi=130)


def _top(boxes: Sequence[Box], fabric: Fabric | None) -> float:
    """Height of the highest row."""
    leaves = {leaf for box in boxes for leaf in box.leaves if leaf}
    if not leaves:
        return NIC_Y
    return SPINE_Y if fabric is not None and any(fabric.parents.get(leaf) for leaf in leaves) else LEAF_Y


def _node(axes: Any, box: Box, index: int, left: float, ports: dict[tuple[int, int], float]) -> float:
    """Draw a node; returns where the next one begins. Ports of rails are put into `ports`."""
    width = max(len(box.slots), len(box.nics), 1) * WIDTH
    _panel(axes, left - 0.08, -0.74, width + 0.16, 2.1, PALE, "#c9c9c5")
    axes.text(left + width / 2, -0.92, box.name or "this node", ha="center", va="center", fontsize=10, color=INK)
    step = width / max(len(box.slots), 1)
    at = [left + step * (i + 0.5) for i in range(len(box.slots))]
    _numas(axes, box, at, step)
    nic_step = width / max(len(box.nics), 1)
    order = _crossing_free(box)
    where = {nic: left + nic_step * (place + 0.5) for place, nic in enumerate(order)}
    for i, nic in enumerate(box.nics):
        rail = i if i < box.rails else None
        _chip(axes, where[i], NIC_Y, min(nic_step, WIDTH), _nic_label(nic, rail), rail, dashed=nic.state == "down")
        if rail is not None:
            ports[index, rail] = where[i]
    for x, slot in zip(at, box.slots):
        _chip(axes, x, GPU_Y, min(step, WIDTH), slot.label, slot.rail, rank=slot.rank)
        if slot.rail is not None and slot.rail in where:
            colour = PALETTE[slot.rail % len(PALETTE)]
            low = GPU_Y + (0.34 if slot.rank else 0.18)
            axes.plot([x, where[slot.rail]], [low, NIC_Y - 0.18], color=colour, lw=1.8, zorder=1)
    return left + width + GAP + 0.1


def _crossing_free(box: Box) -> list[int]:
    """NICs from left to right: above the first GPU that sends by each; others last."""
    first = {slot.rail: i for i, slot in reversed(list(enumerate(box.slots)))}
    return sorted(range(len(box.nics)), key=lambda i: (first.get(i, len(box.slots)) if i < box.rails else 1 << 16, i))


def _numas(axes: Any, box: Box, at: Sequence[float], step: float) -> None:
    """A bar under the GPUs that are near one NUMA node."""
    start = 0
    for i in range(1, len(at) + 1):
        if i < len(at) and box.numas[i] == box.numas[start]:
            continue
        if box.numas[start]:
            a, b = at[start] - step / 2 + 0.06, at[i - 1] + step / 2 - 0.06
            axes.plot([a, b], [-0.43, -0.43], color=GREY, lw=3, solid_capstyle="butt")
            room = int((b - a) * 15)
            text = box.numas[start]
            text = text if len(text) <= room else text.split(",")[0]
            axes.text((a + b) / 2, -0.5, text, ha="center", va="top", fontsize=6.5, color=INK)
        start = i


def _nic_label(nic: Nic, rail: int | None) -> str:
    what = f"rail {rail}" if rail is not None else nic.role
    return what if nic.name == what else f"{nic.name}\n{what}"


def _panel(axes: Any, x: float, y: float, width: float, height: float, face: str, edge: str, **more: Any) -> None:
    from matplotlib.patches import FancyBboxPatch

    style = "round,pad=0,rounding_size=0.06"
    axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=style, facecolor=face, edgecolor=edge, **more))


def _chip(
    axes: Any, x: float, y: float, width: float, label: str, rail: int | None, dashed: bool = False, rank: str = ""
) -> None:
    """A GPU, NIC or switch in the colour of its rail; with a rank, its number above and the rest below."""
    colour = GREY if rail is None else PALETTE[rail % len(PALETTE)]
    half = 0.34 if rank else 0.18
    look = {"linestyle": "--"} if dashed else {}
    _panel(axes, x - 0.46 * width, y - half, 0.92 * width, 2 * half, "white", colour, linewidth=1.6, zorder=2, **look)
    if rank:
        number, _, place = rank.partition("\n")
        axes.text(x, y + 0.2, number, ha="center", va="center", fontsize=9, fontweight="bold", color=INK, zorder=3)
        label, y = f"{place}\n{label}" if place else label, y - 0.1
    longest = max(map(len, label.split("\n")))
    font = max(4.5, min(7.5, 7.5 * 7.5 * width / max(longest, 1)))
    axes.text(x, y, label, ha="center", va="center", fontsize=font, color=INK, zorder=3, linespacing=1.15)


def _switches(axes: Any, boxes: Sequence[Box], fabric: Fabric | None, ports: Mapping[tuple[int, int], float]) -> None:
    """Draw leaves above the ports on them, and what is above leaves."""
    on: dict[str, list[tuple[float, int]]] = {}
    for (index, rail), x in ports.items():
        mine = boxes[index].leaves
        leaf = mine[rail] if rail < len(mine) else mine[0] if len(mine) == 1 else ""
        if leaf:
            on.setdefault(leaf, []).append((x, rail))
    if not on:
        return
    centre = _spread({leaf: sum(x for x, _ in found) / len(found) for leaf, found in on.items()}, ports)
    for leaf, found in on.items():
        alike = len({port for _, port in found}) == 1
        for x, port in found:
            colour = PALETTE[port % len(PALETTE)]
            axes.plot([x, centre[leaf]], [NIC_Y + 0.18, LEAF_Y - 0.16], color=colour, lw=1.1, alpha=0.75, zorder=1)
        _chip(axes, centre[leaf], LEAF_Y, max(1.0, min(1.5, 0.13 * len(leaf))), leaf, found[0][1] if alike else None)
    up = {leaf: fabric.parents.get(leaf, ()) if fabric is not None else () for leaf in on}
    above = list(dict.fromkeys(parent for parents in up.values() for parent in parents))
    if not above:
        return
    middle = sum(centre.values()) / len(centre)
    drawn = above[:16]
    places = {name: middle + (i - (len(drawn) - 1) / 2) * 1.25 for i, name in enumerate(drawn)}
    for leaf, parents in up.items():
        for parent in parents:
            if parent in places:
                axes.plot([centre[leaf], places[parent]], [LEAF_Y + 0.18, SPINE_Y - 0.18], color=GREY, lw=0.8, zorder=1)
    for name, x in places.items():
        _chip(axes, x, SPINE_Y, 1.15, name, None)
    if len(above) > len(drawn):
        axes.text(max(places.values()) + 0.8, SPINE_Y, f"and {len(above) - len(drawn)} more", va="center", fontsize=7)


def _spread(wanted: Mapping[str, float], ports: Mapping[tuple[int, int], float]) -> dict[str, float]:
    """Places of leaves, near where they are wanted and apart from each other."""
    order = sorted(wanted, key=lambda leaf: wanted[leaf])
    low, high = min(ports.values()), max(ports.values())
    apart = 1.12
    if len(order) > 1 and (high - low) / (len(order) - 1) >= apart:
        apart = min((high - low) / (len(order) - 1), 2.4)
    middle = sum(wanted.values()) / len(wanted)
    return {leaf: middle + (i - (len(order) - 1) / 2) * apart for i, leaf in enumerate(order)}


def _bytes(axes: Any, counted: Mapping[str, LinkBytes]) -> None:
    """Bytes that leave nodes, a bar an order of ranks."""
    names = list(counted)[::-1]
    left = [0.0] * len(names)
    for link in LINKS[1:]:
        sizes = [counted[name].over(link) for name in names]
        if not any(sizes):
            continue
        axes.barh(names, sizes, left=left, color=LINK_COLOURS[link], label=link.replace("_", " "), height=0.62)
        left = [a + b for a, b in zip(left, sizes)]
    most = max(left) or 1.0
    for i, (name, total) in enumerate(zip(names, left)):
        leaving = counted[name].leaving
        words = f"{size(total)}, of which {size(leaving)} leave leaf switches"
        axes.text(total + most * 0.01, i, words, va="center", fontsize=8, color=INK)
    axes.set(xlim=(0, most * 1.45), xlabel="")
    axes.set_title("bytes that leave nodes in a step", fontsize=9, loc="left", color=INK)
    axes.xaxis.set_visible(False)
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)
    axes.tick_params(labelsize=8, length=0)
    axes.legend(fontsize=7.5, frameon=False, loc="lower right", bbox_to_anchor=(1, 0.98), ncols=len(LINKS))
