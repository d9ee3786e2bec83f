"""No placement of tp=4 on a few nodes and two leaf switches sends less over leaves and rails than the planner's."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest

from hpctrain.cluster.fabric import Fabric
from hpctrain.cluster.ranktable import RankTable, rank_table
from hpctrain.layout.layout import Layout
from tests.cluster.brute import Toy, cost, fewer, sent


def planned(toy: Toy, dp: int, pp: int) -> RankTable:
    """The planner's table, on the same machines in its own words."""
    hosts = [f"n{i}" for i in range(len(toy.rails))]
    wide = 1 + max(rail for row in toy.rails for rail in row)
    leaves = {
        host: tuple(f"u{toy.unit[i]}r{r}" for r in range(wide)) if toy.railed else (f"u{toy.unit[i]}",)
        for i, host in enumerate(hosts)
    }
    parents = {leaf: ("spine",) for mine in leaves.values() for leaf in mine}
    rails = dict(zip(hosts, toy.rails))
    kind = "rails" if toy.railed else "tree"
    return rank_table(Layout(pp=pp, dp=dp, tp=4), hosts, None, Fabric(leaves, parents, kind=kind), rails=rails)


def places(toy: Toy, table: RankTable) -> list[tuple[int, int]]:
    """Node and rail of every rank."""
    node = [int(table.hosts[i][1:]) for i in table.node]
    return [(n, toy.rails[n][gpu]) for n, gpu in zip(node, table.gpu.tolist())]


def named(name: str, rails: tuple[tuple[int, ...], ...], unit: tuple[int, ...], railed: bool, pp: int = 1) -> Any:
    return pytest.param(Toy(rails, unit, railed), pp, id=f"{name}, pp={pp}")


ALTERNATE, HALVES, ONE = (0, 1) * 4, (0,) * 4 + (1,) * 4, (0,) * 8


def cases() -> Iterator[object]:
    """Two leaves: a tree's, each over some of the nodes, or those of two rails that all nodes have."""
    for nodes, pp in itertools.product((2, 3, 4), (1, 2)):
        if nodes % pp == 0:
            yield named(
                f"{nodes} nodes of 4 on a tree", ((0,) * 4,) * nodes, tuple(i % 2 for i in range(nodes)), False, pp
            )
            yield named(f"{nodes} nodes of 4 on two rails", ((0, 1, 0, 1),) * nodes, (0,) * nodes, True, pp)
        yield named(f"{nodes} nodes of 8 on a tree", (ONE,) * nodes, tuple(i % 2 for i in range(nodes)), False, pp)
        for name, row in (("alternate", ALTERNATE), ("halves", HALVES)):
            yield named(f"{nodes} nodes of 8, rails {name}", (row,) * nodes, (0,) * nodes, True, pp)
    yield named("2 nodes of 8, rails in other orders", (ALTERNATE, HALVES), (0, 0), True)
    yield named("2 nodes of 8, two units of two rails", (ALTERNATE,) * 2, (0, 1), True)
    yield named("4 nodes of 2, two rails", ((0, 1),) * 4, (0,) * 4, True)
    yield named("4 nodes of 2 on a tree", ((0, 0),) * 4, (0, 1, 0, 1), False)
    yield named("3 nodes of 4, two units of two rails", ((0, 1, 0, 1),) * 3, (0, 0, 1), True)
    dice = random.Random(7)
    for i in range(12):  # as many GPUs on each rail, in an order of its own on every node
        nodes, row = dice.choice(((2, ALTERNATE), (3, ALTERNATE), (3, (0, 1, 0, 1)), (4, (0, 1, 0, 1))))
        rows = tuple(tuple(dice.sample(row, len(row))) for _ in range(nodes))
        unit = tuple(j % 2 for j in range(nodes)) if nodes * len(row) < 16 else (0,) * nodes
        yield named(f"shuffled {i}: {nodes} nodes of {len(row)}", rows, unit, True)


def uneven() -> Iterator[Any]:
    """Nodes with GPUs on rails by chance, mostly more on one than on the other."""
    dice = random.Random(7)
    for i in range(16):
        nodes, width = dice.choice(((2, 4), (3, 4), (4, 4), (2, 8)))
        rows = tuple(tuple(dice.randrange(2) for _ in range(width)) for _ in range(nodes))
        yield named(f"thrown {i}: {nodes} nodes of {width}", rows, (0,) * nodes, True)


def even(toy: Toy) -> bool:
    """Whether each node has as many GPUs on each of its rails."""
    return all(len({row.count(rail) for rail in row}) == 1 for row in toy.rails)


@pytest.mark.parametrize(("toy", "pp"), list(cases()))
def test_no_assignment_is_cheaper(toy: Toy, pp: int) -> None:
    assert even(toy)
    _no_cheaper(toy, pp, inside=1)


@pytest.mark.parametrize("nodes", [2, 3])
def test_in_no_order_of_gpus_on_two_rails_an_assignment_is_cheaper(nodes: int) -> None:
    """Whatever the order on each node; the first node's is one of three, as rails have no names of their own."""
    orders = sorted(set(itertools.permutations((0, 0, 1, 1))))
    for rows in itertools.product(orders[:3], *[orders] * (nodes - 1)):
        for pp in (1, 2) if nodes == 2 else (1,):
            _no_cheaper(Toy(rows, (0,) * nodes, True), pp, inside=1)


@pytest.mark.parametrize(("toy", "pp"), list(uneven()))
def test_of_uneven_nodes_none_that_keeps_tp_on_nodes_is_cheaper(toy: Toy, pp: int) -> None:
    """There groups of tp that leave NVLink for a leaf switch could spare data a change of rails: that is never done."""
    _no_cheaper(toy, pp, inside=1 if even(toy) else 4)


SPARED = (1, 2, 3, 5, 7, 8, 9, 10, 13)
"""Of the thrown ones, those of which an assignment that breaks tp sends less across."""


@pytest.mark.parametrize(("toy", "pp"), [case.values for i, case in enumerate(uneven()) if i in SPARED])
def test_what_breaking_tp_spares_is_little_beside_what_it_takes_off_nvlink(toy: Toy, pp: int) -> None:
    """Bytes of tp on one leaf switch cross nothing, so they count as free: hence the claim asks for tp on NVLink."""
    sends = sent(4, sum(map(len, toy.rails)) // 4 // pp, pp)
    mine = planned(toy, sum(map(len, toy.rails)) // 4 // pp, pp).bytes.leaving
    broken = fewer(toy, sends, mine)
    assert broken is not None
    off = sum(n for a, b, n in sends if b // 4 == a // 4 and broken[a][0] != broken[b][0])
    assert off >= 10 * (mine - cost(toy, broken, sends))


def _no_cheaper(toy: Toy, pp: int, inside: int) -> None:
    groups = sum(map(len, toy.rails)) // 4
    dp = groups // pp
    table = planned(toy, dp, pp)
    sends = sent(4, dp, pp)
    mine = cost(toy, places(toy, table), sends)
    assert table.bytes.leaving == mine, "both count the same"
    cheaper = fewer(toy, sends, mine, inside)
    assert cheaper is None, f"{mine} dear bytes, and {cost(toy, cheaper or (), sends)} with {cheaper}"


def test_the_search_finds_what_there_is() -> None:
    """It is not blind: of an order that is poor on purpose it finds a better one, down to the cheapest."""
    toy = Toy((ALTERNATE, ALTERNATE), (0, 0), True)
    sends = sent(4, 4, 1)
    poor = [(0, 0), (1, 1)] * 8
    assert cost(toy, poor, sends) == 16 * 64
    best = fewer(toy, sends, 1)
    assert best is not None and cost(toy, best, sends) == 0
    assert sorted(best) == sorted((n, r) for n in (0, 1) for r in ALTERNATE)
    one = Toy(((0,) * 4, (0,) * 4), (0, 1), False)
    assert fewer(one, sent(4, 2, 1), 64) is None and fewer(one, sent(4, 2, 1), 65) is not None
