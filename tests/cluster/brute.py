"""What the cheapest placement of ranks costs, found by trying all: on machines, links and bytes of its own, which share
nothing with the planner but the question.

A byte is dear if it leaves a leaf switch: between two GPUs of a node it is not, nor between ports of one leaf.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

TP_BYTES, DATA_BYTES, STAGE_BYTES = 64, 8, 1
"""That a rank sends: to the next of its tp ring, to the next of its data ring, to the same place of a stage beside its
own. Nominal, as the planner's are where no recipe says."""


@dataclass(frozen=True)
class Toy:
    """A few nodes.

    Attributes:
        rails: of each node, the rail of each GPU.
        unit: of each node, the unit of hosts that it is in.
        railed: every rail of a unit has its own leaf; else a unit has one leaf.
    """

    rails: tuple[tuple[int, ...], ...]
    unit: tuple[int, ...]
    railed: bool

    def leaf(self, node: int, rail: int) -> tuple[int, int]:
        return (self.unit[node], rail if self.railed else 0)

    def dear(self, a: tuple[int, int], b: tuple[int, int]) -> bool:
        """Whether bytes between two places, each a node and a rail, leave a leaf switch."""
        return a[0] != b[0] and self.leaf(*a) != self.leaf(*b)


def sent(tp: int, dp: int, pp: int) -> list[tuple[int, int, int]]:
    """Who sends to whom how much: ranks with tp innermost and pp outermost."""
    out: list[tuple[int, int, int]] = []
    for p in range(pp):
        for d in range(dp):
            for t in range(tp):
                me = (p * dp + d) * tp + t
                if tp > 1:
                    out.append((me, (p * dp + d) * tp + (t + 1) % tp, TP_BYTES))
                if dp > 1:
                    out.append((me, (p * dp + (d + 1) % dp) * tp + t, DATA_BYTES))
                out += [(me, (q * dp + d) * tp + t, STAGE_BYTES) for q in (p - 1, p + 1) if 0 <= q < pp]
    return out


def cost(toy: Toy, where: Sequence[tuple[int, int]], sends: Sequence[tuple[int, int, int]]) -> int:
    """Dear bytes of a placement: a node and a rail for each rank."""
    return sum(n for a, b, n in sends if toy.dear(where[a], where[b]))


def fewer(toy: Toy, sends: Sequence[tuple[int, int, int]], than: int, inside: int = 1) -> list[tuple[int, int]] | None:
    """A placement with fewer dear bytes than a number, None if there is none.

    Every assignment of ranks to (node, GPU) is looked at, as long as it is not too dear already. GPUs of a node on one
    rail are not told apart, nor are nodes that are alike and still empty, nor nodes of a unit that has one leaf.

    Args:
        inside: so many ranks that follow each other have to be on one node.
    """
    world = max(max(a, b) for a, b, _ in sends) + 1
    if toy.railed or inside > 1:
        room = {(n, r): row.count(r) for n, row in enumerate(toy.rails) for r in sorted(set(row))}
    else:  # what is on one leaf is as near as on one node
        units = [[n for n, mine in enumerate(toy.unit) if mine == unit] for unit in sorted(set(toy.unit))]
        room = {(nodes[0], 0): sum(len(toy.rails[n]) for n in nodes) for nodes in units}
    back: list[list[tuple[int, int]]] = [[] for _ in range(world)]
    for a, b, n in sends:
        back[max(a, b)].append((min(a, b), n))
    where: list[tuple[int, int]] = []
    fresh = [True] * len(toy.rails)

    def search(paid: int) -> bool:
        if len(where) == world:
            return True
        tried: set[tuple[object, ...]] = set()
        for place, left in room.items():
            node = place[0]
            if not left or (len(where) % inside and where[-1][0] != node):
                continue
            if fresh[node]:
                alike = (toy.rails[node], toy.unit[node], place[1])
                if alike in tried:
                    continue
                tried.add(alike)
            more = paid + sum(n for other, n in back[len(where)] if toy.dear(where[other], place))
            if more >= than:
                continue
            was, fresh[node] = fresh[node], False
            room[place] -= 1
            where.append(place)
            if search(more):
                return True
            where.pop()
            room[place] += 1
            fresh[node] = was
        return False

    return where if search(0) else None
