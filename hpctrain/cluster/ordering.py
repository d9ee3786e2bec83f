"""Orders of ranks over slots: candidates, and the one of them that sends fewest bytes over dear links.

Ranks fill hosts one after the other, so a candidate is an order of hosts and, on each of them, an order of GPUs.

Hosts: those under one leaf together, these under one spine together; or tiles of them, in which neighbours of a
pipeline are close. GPUs: as they are; or by rail, so that groups of tp have the same rails at the same place; or there
and back: a ring of data that has several ranks on a host leaves it by the rail on which it enters the next, if every
second host has its groups of tp in reverse. With an odd number of hosts three of them pass the ring on by a third rail.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from hpctrain.cluster.fabric import Fabric
from hpctrain.cluster.hostlist import natural
from hpctrain.cluster.linkbytes import Ints, LinkBytes, Sends
from hpctrain.cluster.search import SMALL, improve
from hpctrain.cluster.slots import Slots
from hpctrain.layout.layout import Layout


def best(
    slots: Slots, layout: Layout, fabric: Fabric | None, sends: Sequence[Sends], fixed: bool = False
) -> tuple[Ints, LinkBytes]:
    """The slot of each rank in the best order found, and its bytes.

    Args:
        fixed: hosts stay in the order in which they were given; GPUs alone may change places.
    """
    if fixed:
        hosts = [np.arange(len(slots.hosts), dtype=np.int64)]
    else:
        hosts = [*host_orders(slots, layout, fabric), by_name(slots)]
    found = [(slots.count(at, sends), at) for at in (_filled(slots, order, layout.world) for order in hosts)]
    at_best = min(range(len(found)), key=lambda i: found[i][0].order_key)
    best_bytes, at = found[at_best]
    for patterned in _patterned(slots, layout, hosts[at_best]):
        if fixed and (np.diff(slots.node[patterned]) < 0).any():
            continue
        if best_bytes.over("cross_rail") == 0:  # all that an order of GPUs can mend
            break
        counted = slots.count(patterned, sends)
        if counted.order_key < best_bytes.order_key:
            best_bytes, at = counted, patterned
    if layout.world <= SMALL and best_bytes.leaving and not fixed:
        moved = improve(slots, at, sends, keep_tp=best_bytes.order_key[0] == 0)
        counted = slots.count(moved, sends)
        if counted.order_key < best_bytes.order_key:
            best_bytes, at = counted, moved
    return at, best_bytes


def slurm_order(slots: Slots, world: int, by: Sequence[str] | None = None) -> Ints:
    """Slots in which Slurm puts ranks with a block distribution: hosts sorted by name, or in the order `by`."""
    return _filled(slots, by_name(slots, by), world)


def by_name(slots: Slots, names: Sequence[str] | None = None) -> Ints:
    """Hosts sorted by name, or in the order of `names`."""
    at = {name: i for i, name in enumerate(slots.hosts)}
    return np.array([at[name] for name in names or natural(slots.hosts) if name in at], dtype=np.int64)


def _filled(slots: Slots, order: Ints, world: int) -> Ints:
    """Slots of hosts in an order, the first `world` of them."""
    place = np.full(len(slots.hosts), len(slots.hosts), dtype=np.int64)
    place[order] = np.arange(len(order))
    return np.argsort(place[slots.node], kind="stable")[:world]


def host_orders(slots: Slots, layout: Layout, fabric: Fabric | None) -> Iterator[Ints]:
    """Orders of hosts to be tried."""
    per_node = np.bincount(slots.node, minlength=len(slots.hosts))
    near = _by_fabric(slots, fabric)
    width = int(per_node[0])
    even = bool((per_node == width).all())
    chunk = layout.tp // width if even and width and layout.tp % width == 0 else 1
    near = _whole_domains(slots, near, chunk)
    yield near
    given = np.arange(len(slots.hosts), dtype=np.int64)
    if not even or layout.pp == 1 or layout.world // layout.pp % width:
        yield given
        return
    nodes = layout.world // layout.pp // width  # of a stage
    leaf = slots.leaf[np.searchsorted(slots.node, near)]
    unit = max(1, int(np.bincount(leaf).max()))
    j, p = np.tile(np.arange(nodes), layout.pp), np.repeat(np.arange(layout.pp), nodes)
    for q in range(2, layout.pp + 1):
        if layout.pp % q or q > unit * 2:
            continue
        d = max(1, unit // q // chunk * chunk)
        tiled = np.lexsort((j % d, p % q, j // d, p // q))
        order = near.copy()
        order[tiled] = near[: len(tiled)]
        yield order
    yield given


def _by_fabric(slots: Slots, fabric: Fabric | None) -> Ints:
    """Hosts with those together that are under one switch, level by level."""
    first = np.searchsorted(slots.node, np.arange(len(slots.hosts)))
    names = {name: i for i, name in enumerate(natural(slots.hosts))}
    rank = np.array([names[name] for name in slots.hosts])
    units: dict[tuple[str, ...], list[int]] = {}
    for i, host in enumerate(slots.hosts):
        leaves = fabric.leaves.get(host, ()) if fabric is not None else ()
        units.setdefault(leaves or (f"?{host}",) * bool(fabric and fabric.leaves), []).append(i)
    levels = _levels(list(units), fabric)
    unit_of = np.empty(len(slots.hosts), dtype=np.int64)
    for u, members in enumerate(units.values()):
        unit_of[members] = u
    keys: list[Ints] = [rank, _by_first(slots.domain[first], rank)]
    keys += [_by_first(level[unit_of], rank) for level in levels]
    return np.lexsort(keys)


def _by_first(label: Ints, rank: Ints) -> Ints:
    """Of each host, the rank of the first host with its label: labels in the order of their first hosts."""
    first = np.full(int(label.max()) + 1, len(rank), dtype=np.int64)
    np.minimum.at(first, label, rank)
    return first[label]


def _levels(units: Sequence[tuple[str, ...]], fabric: Fabric | None) -> list[Ints]:
    """Which units hang together below each level of switches, from the leaves up."""
    above = [set(unit) - {""} for unit in units]
    out: list[Ints] = []
    root = list(range(len(units)))

    def find(i: int) -> int:
        while root[i] != i:
            root[i] = root[root[i]]
            i = root[i]
        return i

    parents = fabric.parents if fabric is not None else {}
    for _ in range(8):  # no fabric is that high; damaged ones go round
        if not any(above):
            break
        holder: dict[str, int] = {}
        for i, names in enumerate(above):
            for name in names:
                root[find(i)] = find(holder.setdefault(name, i))
        out.append(np.array([find(i) for i in range(len(units))], dtype=np.int64))
        above = [{p for name in names for p in parents.get(name, ())} for names in above]
    return out or [np.arange(len(units), dtype=np.int64)]


def _whole_domains(slots: Slots, order: Ints, chunk: int) -> Ints:
    """The same order, but so that every `chunk` hosts in a row, which one group of tp needs, are of one NVLink domain;
    those left over from domains come last."""
    domain = slots.domain[np.searchsorted(slots.node, order)]
    if chunk == 1 or len(np.unique(domain)) == len(order):
        return order
    by_domain: dict[int, list[int]] = {}
    for host, d in zip(order.tolist(), domain.tolist()):
        by_domain.setdefault(d, []).append(host)
    whole = [h for members in by_domain.values() for h in members[: len(members) // chunk * chunk]]
    rest = [h for members in by_domain.values() for h in members[len(members) // chunk * chunk :]]
    return np.array(whole + rest, dtype=np.int64)


def _patterned(slots: Slots, layout: Layout, order: Ints) -> Iterator[Ints]:
    """Orders of GPUs on hosts that are in a given order."""
    per_node = np.bincount(slots.node, minlength=len(slots.hosts))
    width = int(per_node[0])
    if not width or (per_node != width).any() or layout.world % width:
        return
    nodes = layout.world // width
    first = np.searchsorted(slots.node, order)[:nodes]
    rails = slots.rail[first[:, None] + np.arange(width)]
    stage = layout.world // layout.pp
    model, wide = layout.cp * layout.tp, layout.ep * layout.etp
    blocks = [b for b in dict.fromkeys((layout.tp, model, wide, stage, 1)) if width % b == 0]
    periods = [n // width for n in dict.fromkeys((stage, model, layout.tp, layout.world)) if n % width == 0]
    bases = [np.arange(width)] + ([_by_rail(rails[0])] if (rails == rails[0]).all() else [])
    for base in bases:
        yield (first[:, None] + base).ravel()
    for base, block, period in itertools.product(bases, blocks, periods):
        turns = _turns(width // block, period)[np.arange(nodes) % period]
        yield (first[:, None] + base.reshape(-1, block)[turns].reshape(nodes, width)).ravel()
    for base, block, period in itertools.product(bases, blocks, periods):
        if width == 2 * block and period % 2 and period > 1 and nodes % period == 0:
            ring = np.array(_round_trip(period))  # of host and block
            host = ring[:, 0] + period * np.arange(nodes // period)[:, None]
            yield (first[host][:, :, None] + base.reshape(-1, block)[ring[:, 1]]).ravel()


def _round_trip(nodes: int) -> list[tuple[int, int]]:
    """A ring over an odd number of hosts of two blocks each, as host and block, that changes blocks on hosts alone: the
    first two hosts are passed twice."""
    there = [(i, block) for i in range(2, nodes) for block in ((0, 1) if i % 2 == 0 else (1, 0))]
    return [(0, 0), (1, 0), *there, (1, 1), (0, 1)]


def _by_rail(rails: Ints) -> Ints:
    """GPUs with the first of every rail first, then the second of every rail."""
    seen: dict[int, int] = {}
    turn = np.empty(len(rails), dtype=np.int64)
    for i, rail in enumerate(rails.tolist()):
        turn[i] = seen[rail] = seen.get(rail, -1) + 1
    return np.lexsort((rails, turn))


def _turns(blocks: int, nodes: int) -> Ints:
    """Order of blocks on each of the hosts of a ring, such that it leaves every host by the block by which it enters
    the next, and comes back to where it began."""
    there = np.arange(blocks)
    rows = np.stack([there if i % 2 == 0 else there[::-1] for i in range(nodes)])
    if nodes % 2 and nodes > 1 and blocks > 2:
        for i, (start, end) in zip(range(nodes - 3, nodes), ((0, 1), (1, 2), (2, 0))):
            rows[i] = [start, *(b for b in range(blocks) if b not in (start, end)), end]
    return rows
