"""Pairs: the schedule covers all, matrices put each in its place, the search names who is slow and nobody else."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.cluster.fabrics import rail_optimized
from hpctrain.comms.bisect import Finding, Lanes, Measure, Pair, Search, sentences
from hpctrain.comms.groups import Where, groups, layout_of, rounds
from hpctrain.comms.pairs import kind_of, nodes_matrix, nodes_of, rails_matrix, ranks_matrix, schedule
from hpctrain.comms.result import Result
from hpctrain.comms.spec import Spec
from hpctrain.errors import ConfigError
from tests.comms.runs import run

NODES = [Where(f"n{rank // 4}", rank % 4) for rank in range(16)]


@given(st.integers(2, 30))
def test_rounds_are_all_pairs_once_and_disjoint(members: int) -> None:
    made = rounds(range(members))
    assert sorted(pair for pairs in made for pair in pairs) == list(itertools.combinations(range(members), 2))
    assert len(made) == members - 1 + members % 2
    for pairs in made:
        assert len({m for pair in pairs for m in pair}) == 2 * len(pairs)


@pytest.mark.parametrize("where", [NODES, NODES[:4], NODES[:6], [Where("n0", 0), Where("n1", 0), Where("n1", 1)]])
def test_the_schedule_is_all_pairs_once_and_disjoint(where: list[Where]) -> None:
    made = schedule(where)
    found = [pair for pairs in made for pair in pairs]
    assert sorted(found) == list(itertools.combinations(range(len(where)), 2))
    for pairs in made:
        assert len({m for pair in pairs for m in pair}) == 2 * len(pairs)


def test_between_nodes_rounds_pair_all_rails_alike() -> None:
    for pairs in schedule(NODES)[3:]:
        assert len({(NODES[b].local_rank - NODES[a].local_rank) % 4 for a, b in pairs}) <= 2  # and back
        assert all(NODES[a].host != NODES[b].host for a, b in pairs) and len(pairs) == 8
    assert nodes_of(NODES) == [list(range(i, i + 4)) for i in range(0, 16, 4)]
    assert nodes_of(NODES[:6]) is None and nodes_of(NODES[:4]) is None


def test_matrices() -> None:
    """A fabric where a rail is twice as fast as a way between rails, and node n3 half as fast."""
    rates = {}
    for a, b in itertools.combinations(range(16), 2):
        one, two = NODES[a], NODES[b]
        rate = 8.0 if one.host == two.host else 2.0 if one.local_rank == two.local_rank else 1.0
        rates[a, b] = rate * (0.5 if one.host != two.host and "n3" in (one.host, two.host) else 1.0)
    ranks = ranks_matrix(rates, 16)
    assert ranks[0][5] == ranks[5][0] == 1.0 and ranks[2][2] is None
    rails = rails_matrix(rates, NODES)
    assert all(rails[i][j] == (1.5 if i == j else 0.75) for i in range(4) for j in range(4))
    nodes = nodes_matrix(rates, NODES)
    assert nodes[0] == [8.0, 2.0, 2.0, 1.0] and nodes[3][3] == 8.0
    assert rails_matrix({(0, 1): 8.0}, NODES[:2]) == []


class Fabric:
    """Measures pairs as they would be: one second, times what is slow in it, times noise. Counts what it is asked."""

    def __init__(self, seed: int, lanes: int = 4, noise: float = 0.1, bad: float = 0.0, **slow) -> None:
        self.random, self.lanes, self.noise, self.bad = random.Random(seed), lanes, noise, bad
        self.nodes, self.rails, self.ways = slow.get("nodes", {}), slow.get("rails", {}), slow.get("ways", {})
        self.asked: list[int] = []

    def __call__(self, pairs: Sequence[Pair]) -> dict[Pair, Lanes]:
        assert len({m for pair in pairs for m in pair}) == 2 * len(pairs), "pairs of one call are disjoint"
        self.asked.append(len(pairs))
        return {pair: tuple(self._time(pair, lane) for lane in range(self.lanes)) for pair in pairs}

    def _time(self, pair: Pair, lane: int) -> float:
        slow = max(
            *(self.nodes.get(m, 1.0) for m in pair), *(self.rails.get((m, lane), 1.0) for m in pair),
            self.ways.get(pair, 1.0),
        )  # fmt: skip
        disturbed = 5.0 if self.random.random() < self.bad else 1.0
        return slow * disturbed * (1 + self.noise * self.random.random())


def found(members: int, fabric: Measure, **options) -> Finding:
    return Search(members, fabric, **options).run()


def who(finding: Finding) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [(culprit.members, culprit.lanes) for culprit in finding.culprits]


@pytest.mark.parametrize("members", [3, 4, 5, 8, 33, 128])
@pytest.mark.parametrize("seed", range(5))
def test_a_slow_node_is_named_and_no_other(members: int, seed: int) -> None:
    slow = random.Random(seed).randrange(members)
    assert who(found(members, Fabric(seed, nodes={slow: 5.0}))) == [((slow,), (0, 1, 2, 3))]


@pytest.mark.parametrize("members", [3, 4, 8, 128])
@pytest.mark.parametrize("seed", range(5))
def test_nobody_is_named_where_nobody_is_slow(members: int, seed: int) -> None:
    assert who(found(members, Fabric(seed))) == []
    assert who(found(members, Fabric(seed, bad=0.03))) == [], "a bad measurement now and then is no culprit"


@pytest.mark.parametrize("seed", range(5))
def test_a_slow_rail_and_a_slow_way_are_told_apart(seed: int) -> None:
    assert who(found(8, Fabric(seed, rails={(3, 2): 4.0}))) == [((3,), (2,))]
    first = rounds(range(8))[1][0]
    assert who(found(8, Fabric(seed, ways={first: 4.0}))) == [(first, (0, 1, 2, 3))]
    both = found(8, Fabric(seed, nodes={6: 3.0}, ways={(2, 5): 3.0}))
    assert who(both) == [((6,), (0, 1, 2, 3)), ((2, 5), (0, 1, 2, 3))]


def test_a_way_that_is_fast_once_is_no_slow_way() -> None:
    """On a busy machine a pair may be disturbed several times; it is asked as often as a node would be."""
    fabric, bad = Fabric(0, noise=0.0), rounds(range(8))[1][0]
    left = [1 + 3 + 2]

    def measure(pairs: Sequence[Pair]) -> dict[Pair, Lanes]:
        times = fabric(pairs)
        if bad in times and left[0]:
            left[0] -= 1
            times[bad] = tuple(5.0 * t for t in times[bad])
        return times

    assert who(found(8, measure)) == [] and left == [0]
    left[0] = 10
    assert who(found(8, measure)) == [(bad, (0, 1, 2, 3))]


TWO, UNEVEN = NODES[:8], [Where("n0", r) for r in range(4)] + [Where("n1", r) for r in range(4)] + [
    Where("n2", r) for r in range(2)
]  # fmt: skip


@pytest.mark.parametrize("where", [TWO, UNEVEN])
@pytest.mark.parametrize("seed", range(5))
def test_ranks_are_held_against_others_on_the_same_kind_of_link(where: list[Where], seed: int) -> None:
    """Inside a host it is ten times as fast, and no pair between hosts is slow for that."""
    world, inside = len(where), kind_of(where)

    def fabric(**slow) -> Measure:
        between = Fabric(seed, lanes=1, **slow)

        def measure(pairs: Sequence[Pair]) -> dict[Pair, Lanes]:
            assert len({inside(pair) for pair in pairs}) == 1, "what goes inside has nothing beside it that goes out"
            return {p: tuple(t * (0.1 if inside(p) else 1.0) for t in times) for p, times in between(pairs).items()}

        return measure

    well = found(world, fabric(), kind=inside)
    assert who(well) == [] and not well.bad and not well.unclear and max(max(r) for r in well.ratios.values()) < 1.5
    assert {m for pair in well.measured for m in pair} == set(range(world))
    assert who(found(world, fabric(nodes={5: 4.0}), kind=inside)) == [((5,), (0,))] * 2, "in pairs of either kind"
    outside = {(a, b): 4.0 for a, b in itertools.combinations(range(world), 2) if 2 in (a, b) and not inside((a, b))}
    one = found(world, fabric(ways=outside), kind=inside)
    assert who(one) == [((2,), (0,))] and all(not inside(e.pair) for e in one.culprits[0].evidence), "its NIC"
    assert who(found(world, fabric(ways={(0, 1): 4.0}), kind=inside)) == [((0, 1), (0,))]
    assert found(world, fabric(), expected=0.4, kind=inside).everybody, "between hosts"


def on_two_hosts(plain):
    """As if the first two ranks were on another host than the last two, and ten times as fast among themselves."""
    from hpctrain.comms import pairs, rank

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank, "_here", lambda party: Where(f"n{party.rank // 2}", party.rank % 2))
        fast = lambda self, several: {(a, b): 0.1 if a // 2 == b // 2 else 1.0 for a, b in several}  # noqa: E731
        patch.setattr(pairs.Meeting, "__call__", fast)
        return run(plain)


def test_two_nodes_are_undecided(ranks) -> None:
    extra = ranks(4, on_two_hosts, Spec(kind="slow", sizes=(4096,)).plain())[0]["extra"]
    assert extra["members"] == [f"rank {r}" for r in range(4)] and not extra["culprits"] and not extra["bad"]
    assert extra["said"][0].startswith("undecided: no rank is slower than others beside it, but which node is slow")
    assert extra["usual_s"] == [1.0], "between hosts"


class Shared(Fabric):
    """One switch that all pairs share: so much slower as there are pairs at once."""

    def __call__(self, pairs: Sequence[Pair]) -> dict[Pair, Lanes]:
        return {pair: tuple(t * len(pairs) for t in lanes) for pair, lanes in super().__call__(pairs).items()}


@pytest.mark.parametrize("members", [4, 8, 9, 32])
@pytest.mark.parametrize("seed", range(3))
def test_what_is_measured_again_has_the_load_beside_it_that_the_others_had(members: int, seed: int) -> None:
    """By itself a node of half the rate would do as well as the others do together."""
    slow = random.Random(seed).randrange(members)
    assert who(found(members, Shared(seed, nodes={slow: 2.0}))) == [((slow,), (0, 1, 2, 3))]
    way = rounds(range(members))[1][0]
    assert who(found(members, Shared(seed, ways={way: 2.0}))) == [(way, (0, 1, 2, 3))]
    assert who(found(members, Shared(seed))) == []


def test_a_rail_that_is_slower_than_expected_for_everybody_is_named() -> None:
    """And whoever is slow on the others is still told from those that are not."""
    rail = {(node, 2): 5.0 for node in range(8)}
    one = found(8, Fabric(0, noise=0.0, rails=rail), expected=1.0)
    assert (one.culprits, one.lanes, one.everybody, one.bad) == ((), (2,), False, True)
    said = "rail 2 is slow for everybody: 5.0 times the expected time at the least."
    assert sentences(one, [], 8, expected=True) == [said]
    both = found(8, Fabric(0, noise=0.0, rails={**rail, (3, 0): 4.0}), expected=1.0)
    assert who(both) == [((3,), (0,))] and both.lanes == (2,)
    every = found(8, Fabric(0, noise=0.0, nodes=dict.fromkeys(range(8), 5.0)), expected=1.0)
    assert every.everybody and every.lanes == ()


def test_several_slow_nodes() -> None:
    assert who(found(16, Fabric(1, nodes={3: 5.0, 4: 2.0, 9: 5.0}))) == [((m,), (0, 1, 2, 3)) for m in (3, 4, 9)]


def test_a_search_does_not_grow_with_the_cluster() -> None:
    small, large = Fabric(0, nodes={1: 5.0}), Fabric(0, nodes={1: 5.0})
    found(8, small), found(1024, large)
    assert len(small.asked) == len(large.asked) == 3 + 3 * 3
    assert max(large.asked) == 512, "each round is as long as one pair takes"


def test_without_anybody_well_nobody_is_named() -> None:
    assert "nothing to hold it against" in found(2, Fabric(0)).unclear
    everybody = found(4, Fabric(0, nodes=dict.fromkeys(range(4), 5.0)), expected=1.0)
    assert everybody.culprits == () and everybody.everybody and everybody.bad
    said = "everybody is slow: of 6 pairs the fastest takes 5.0 times the expected time."
    assert sentences(found(4, Fabric(0, noise=0.0, nodes=dict.fromkeys(range(4), 5.0)), expected=1.0), [], 8) == [said]
    two = found(2, Fabric(0, noise=0.0), expected=0.5)
    assert two.everybody and not found(2, Fabric(0), expected=1.0).bad


def test_all_slow_alike_is_not_called_well() -> None:
    """Pairs tell how they do beside each other; what links should do has to be said."""
    slow = found(4, Fabric(0, noise=0.0, nodes=dict.fromkeys(range(4), 5.0)))
    (said,) = sentences(slow, [], size=10**9)
    assert said.startswith("nobody is slower than the others: of 6 pairs the slowest takes 1.00 times the usual one,")
    assert said.endswith(" 0.2 GB/s each way; what links should do, they do not tell.") and not slow.bad
    (said,) = sentences(found(4, Fabric(0, noise=0.0), expected=1.0), [], 8, expected=True)
    assert said == "nobody is slow: of 6 pairs the slowest takes 1.00 times the expected time."


def test_a_rail_that_is_slow_for_everybody_is_named() -> None:
    """No node stands out by it, nor does a pair: a leaf switch is behind it."""
    one = found(8, Fabric(0, noise=0.0, rails={(node, 2): 5.0 for node in range(8)}))
    assert (one.culprits, one.lanes, one.bad) == ((), (2,), True)
    assert sentences(one, [], 8) == ["rail 2 is slow for everybody: 5.0 times the time of the fastest rail."]
    both = found(8, Fabric(0, noise=0.0, rails={**{(n, 2): 5.0 for n in range(8)}, (3, 0): 4.0}))
    assert who(both) == [((3,), (0,))] and both.lanes == (2,)
    assert [said.split(":")[0] for said in sentences(both, [f"n{i}" for i in range(8)], 8)] == [
        "rail 2 is slow for everybody",
        "n3 is slow on rail 0",
    ]


@pytest.mark.parametrize("expected", [None, 1.0])
def test_a_rail_that_was_slow_once_is_not_slow_for_everybody(expected: float | None) -> None:
    """It is measured again as often as a node would be."""
    for rounds_of_it, named in ((3, ()), (9, ()), (100, (2,))):
        fabric, left = Fabric(0, noise=0.0), [rounds_of_it]

        def measure(pairs: Sequence[Pair], fabric: Fabric = fabric, left: list[int] = left) -> dict[Pair, Lanes]:
            left[0] -= 1
            slow = 5.0 if left[0] >= 0 else 1.0
            return {p: (*lanes[:2], lanes[2] * slow, *lanes[3:]) for p, lanes in fabric(pairs).items()}

        one = found(8, measure, expected=expected)
        assert (one.lanes, who(one), one.bad) == (named, [], bool(named))


def test_what_is_said() -> None:
    names = [f"n{i}" for i in range(8)]
    (said,) = sentences(found(8, Fabric(0, noise=0.0, rails={(3, 2): 4.0})), names, 8)
    assert said.startswith("n3 is slow on rail 2: with n") and said.count("4.0 times as long as usual") == 3
    first = rounds(range(8))[1][0]
    (way,) = sentences(found(8, Fabric(0, noise=0.0, ways={first: 4.0})), names, 8)
    assert way.startswith(f"n{first[0]} - n{first[1]} is a slow way, though both ends are fast with others: 4.0 times")


def test_on_real_ranks(ranks) -> None:
    plain = ranks(3, run, Spec(kind="pairs", sizes=(4096,), iterations=3, warm_up=1).plain())
    assert plain[0]["extra"]["pairs"] == plain[2]["extra"]["pairs"]
    matrix = Result.of(plain[0]).extra["ranks"]
    assert all((matrix[i][j] is None) == (i == j) and matrix[i][j] == matrix[j][i] for i in range(3) for j in range(3))


def unequal(plain):
    """One rank finds that an exchange takes longer than its partners do."""
    import torch.distributed as dist

    from hpctrain.comms import clock

    def seconds(act, iterations: int) -> list[float]:
        for _ in range(iterations):
            act()
        return [5.0 if dist.get_rank() == 1 else 1.0] * iterations

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clock, "timed", seconds)
        return run(plain)


def test_a_pair_takes_as_long_as_the_slower_of_both(ranks) -> None:
    plain = ranks(3, unequal, Spec(kind="pairs", sizes=(64,), iterations=2, warm_up=1).plain())
    assert plain[0]["extra"]["pairs"] == [[0, 1, 5.0], [0, 2, 1.0], [1, 2, 5.0]]


def test_a_slow_rank_among_real_ones_is_named(ranks) -> None:
    spec = Spec(kind="slow", sizes=(1 << 16,), iterations=5, warm_up=1, fault={"kind": "slow", "rank": 2, "every": 50})
    extra = ranks(4, run, spec.plain())[0]["extra"]
    assert (2,) in [culprit["members"] for culprit in extra["culprits"]]
    assert any(line.startswith("rank 2 is slow: with rank") for line in extra["said"])


def lossy(plain):
    """Data of rank 1 arrive damaged at rank 2, now and then."""
    from hpctrain.comms.torchbackend import TorchGroup

    whole = TorchGroup.exchange

    def exchange(self, sends, receives):
        act = whole(self, sends, receives)

        def damaged() -> None:
            act()
            if self.index == 2 and receives and receives[0][1] == 1:
                receives[0][0][7:9] += 1

        return damaged

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TorchGroup, "exchange", exchange)
        return run(plain)


@pytest.mark.parametrize("kind", ["pairs", "slow"])
def test_wrong_data_between_two_ranks_are_named(ranks, kind: str) -> None:
    plain = Spec(kind=kind, sizes=(4096,), iterations=2, warm_up=1).plain()
    lost = ranks(3, lossy, plain)[0]["extra"]["lost"]
    assert [(a, b) for a, b, _ in lost] == [(1, 2)] and all(elements % 2 == 0 for _, _, elements in lost)
    assert ranks(3, run, plain)[0]["extra"]["lost"] == []


def test_slower_than_expected_is_said_where_all_are_alike(ranks) -> None:
    plain = Spec(kind="slow", sizes=(4096,), iterations=2, warm_up=1, expected=1e6).plain()
    extra = ranks(2, run, plain)[0]["extra"]
    assert extra["everybody"] and extra["bad"] and extra["said"][0].startswith("everybody is slow: of 1 pairs the fast")


@pytest.mark.parametrize(
    ("names", "made"),
    [
        (["node"], {"node": [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15)]}),
        (["rail"], {"rail": [(i, i + 4, i + 8, i + 12) for i in range(4)]}),
        (["tp", "pp"], {"tp": [(i, i + 1) for i in range(0, 16, 2)], "pp": [(i, i + 8) for i in range(8)]}),
        (["axes"], None),
        (["dp+tp"], {"dp+tp": [tuple(range(8)), tuple(range(8, 16))]}),
        (["0,5/2,3"], {"0,5/2,3": [(0, 5), (2, 3)]}),
    ],
)
def test_groups(names: list[str], made) -> None:
    found = {g.name: list(g.ranks) for g in groups(names, NODES, layout_of("tp=2,pp=2", 16))}
    assert found == made if made else set(found) == {"pp", "dp", "tp"}


def test_leaves_come_from_the_fabric() -> None:
    """Leaves of a rail-optimized fabric hold one rail of the hosts of a unit."""
    fabric = rail_optimized(["n0", "n1", "n2", "n3"], rails=4, unit=2)
    found = groups(["leaf"], NODES, layout_of("", 16), fabric)[0].ranks
    assert sorted(found) == sorted((i + 8 * u, i + 8 * u + 4) for i in range(4) for u in range(2))


@pytest.mark.parametrize(
    ("names", "layout", "sentence"),
    [
        (["tp"], "", "--groups='tp': has one rank in each group"),
        (["floor"], "", "--groups='floor': must be one of world, node, rail, leaf, axes, pp"),
        (["leaf"], "", "--groups='leaf': needs a fabric"),
        (["0,0/0"], "", "--groups='0,0/0': must name each of the ranks 0 to 15 at most once"),
        (["tp"], "tp=3", "parallel.tp=3: pp x cp x tp = 1 x 1 x 3 = 3 must divide the 16 ranks"),
        (["tp"], "tp=2,dp=4", "--layout='tp=2,dp=4': leaves dp=8 to 16 ranks"),
        (["tp"], "tq=2", "--layout='tq=2': must be AXIS=RANKS"),
    ],
)
def test_groups_that_are_none_are_refused(names: list[str], layout: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        groups(names, NODES, layout_of(layout, 16))
    assert str(caught.value).startswith(sentence)
