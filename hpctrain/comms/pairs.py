"""Every rank with every other, both ways at once: matrices of pairs, rails, nodes; and the search for who is slow."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from hpctrain.comms.backend import Act, Fault, Party, nothing
from hpctrain.comms.bisect import Finding, Kind, Lanes, Pair, Search, sentences
from hpctrain.comms.buffers import POISON, Buffers, fill, wrong
from hpctrain.comms.clock import Turns, clock_of
from hpctrain.comms.groups import Where, rounds
from hpctrain.comms.pattern import Block, Contents, values
from hpctrain.comms.result import Result
from hpctrain.comms.sizes import DTYPES
from hpctrain.comms.spec import Spec
from hpctrain.errors import ConfigError

Matrix = list[list[float | None]]

FEW = (
    "no rank is slower than others beside it, but which node is slow only three nodes or more tell, with equally many "
    "ranks on each"
)


def nodes_of(where: Sequence[Where]) -> list[list[int]] | None:
    """Ranks of each host by local rank, where there are several hosts with equally many; else None."""
    hosts: dict[str, list[int]] = {}
    for rank, at in enumerate(where):
        hosts.setdefault(at.host, []).append(rank)
    made = [sorted(ranks, key=lambda rank: where[rank].local_rank) for ranks in hosts.values()]
    return made if len(made) > 1 and len({len(ranks) for ranks in made}) == 1 else None


def schedule(where: Sequence[Where]) -> list[tuple[Pair, ...]]:
    """All pairs of ranks in rounds of disjoint ones.

    Between nodes a rank talks to one other at a time, and so does each rail of a node: a round pairs nodes up, and
    pairs their ranks shifted by as much on all. Where nodes are not alike, it is a plain tournament.
    """
    nodes = nodes_of(where)
    if nodes is None:
        return rounds(range(len(where)))
    size, made = len(nodes[0]), []
    for inner in rounds(range(size)):
        made.append(tuple(_pair(node[a], node[b]) for node in nodes for a, b in inner))
    for outer in rounds(range(len(nodes))):
        for shift in range(size):
            made.append(tuple(_pair(nodes[a][i], nodes[b][(i + shift) % size]) for a, b in outer for i in range(size)))
    return made


def _pair(a: int, b: int) -> Pair:
    return (min(a, b), max(a, b))


class Meeting:
    """Measures pairs of ranks, and looks at what came. Collective: all ranks call it alike, and all know the result."""

    def __init__(self, party: Party, spec: Spec, size: int) -> None:
        group = party.groups([tuple(range(party.world))])
        assert group is not None
        self.party, self.spec, self.size, self.group = party, spec, size, group
        self.turns, self._lost = Turns(party, spec.timeout_s), dict[Pair, int]()
        dtype = spec.dtypes[0]
        self.block = Block(party.rank, 0, max(1, size // DTYPES[dtype][1]))
        self.what = values("sendrecv", dtype, "sum", party.world)
        send, receive = (party.memory.zeros(self.block.count, dtype) for _ in range(2))
        self.buffers = Buffers(send, receive, dtype)
        fill(self.buffers, Contents((self.block,), ()), self.what, party.memory)

    def __call__(self, pairs: Sequence[Pair]) -> dict[Pair, float]:
        """Median seconds of an exchange both ways, of the slower of the two; all pairs at the same time."""
        mine = next((pair for pair in pairs if self.party.rank in pair), None)
        warm_up, counted = self.spec.warm_up, self.spec.iterations
        label, ranks = f"pair, {self.size} bytes", mine or (self.party.rank,)
        clock = clock_of(self.party.memory, self.spec, self._act(mine), nothing)
        every = self.turns.run(clock, warm_up + counted, "exchange", label, ranks, mine is not None)
        if mine:
            self._look(mine)
        middle = [statistics.median(times[warm_up:]) for times in every]
        return {(a, b): max(middle[a], middle[b]) for a, b in pairs}

    def lost(self) -> dict[Pair, int]:
        """Wrong elements that came, by pair, where there were any. Collective."""
        found: Counter[Pair] = Counter()
        for of_rank in self.party.gather(self._lost):
            found.update(of_rank)
        return dict(found)

    def _act(self, mine: Pair | None) -> Act:
        if mine is None:
            return nothing
        self.buffers.receive[:] = self.party.memory.table([POISON], self.buffers.dtype)
        peer = sum(mine) - self.party.rank
        return self.group.exchange([(self.buffers.send, peer)], [(self.buffers.receive, peer)])

    def _look(self, mine: Pair) -> None:
        came = replace(self.block, source=sum(mine) - self.party.rank)
        if lost := wrong(self.buffers.receive, [came], self.what, self.buffers.dtype, self.party.memory):
            self._lost[mine] = self._lost.get(mine, 0) + lost


def pairs(spec: Spec, party: Party, where: list[Where], result: Result) -> Result:
    """The matrix of all pairs for the largest size, GB/s each way."""
    if party.world < 2:
        raise ConfigError("--ranks", party.world, "pairs are of two ranks at the least")
    size = spec.sizes[-1]
    meeting = Meeting(party, spec, size)
    found: dict[Pair, float] = {}
    began = time.monotonic()
    plan = schedule(where)
    if spec.alone:
        plan = [(pair,) for several in plan for pair in several]
    for several in plan:
        found |= meeting(several)
    rates = {pair: size / seconds / 1e9 for pair, seconds in found.items()}
    extra = {
        "size": size,
        "seconds": time.monotonic() - began,
        "pairs": [[a, b, seconds] for (a, b), seconds in sorted(found.items())],
        "ranks": ranks_matrix(rates, len(where)),
        "rails": rails_matrix(rates, where),
        "nodes": nodes_matrix(rates, where),
        "lost": _lost(meeting),
    }
    return replace(result, extra=extra)


def ranks_matrix(rates: dict[Pair, float], world: int) -> Matrix:
    """GB/s by rank and rank."""
    made: Matrix = [[None] * world for _ in range(world)]
    for (a, b), rate in rates.items():
        made[a][b] = made[b][a] = rate
    return made


def rails_matrix(rates: dict[Pair, float], where: Sequence[Where]) -> Matrix:
    """GB/s by local rank and local rank: the median over pairs on different hosts; empty on one host."""
    size = max(at.local_rank for at in where) + 1
    return _medians(rates, where, size, lambda at: at.local_rank, lambda a, b: a.host != b.host)


def nodes_matrix(rates: dict[Pair, float], where: Sequence[Where]) -> Matrix:
    """GB/s by host and host, the median over the pairs of equal local rank; on the diagonal over those inside."""
    hosts = list(dict.fromkeys(at.host for at in where))
    return _medians(
        rates, where, len(hosts), lambda at: hosts.index(at.host),
        lambda a, b: a.host == b.host or a.local_rank == b.local_rank,
    )  # fmt: skip


def _medians(rates: dict[Pair, float], where: Sequence[Where], size: int, index: Any, counts: Any) -> Matrix:
    cells: dict[tuple[int, int], list[float]] = {}
    for (a, b), rate in rates.items():
        if counts(where[a], where[b]):
            cells.setdefault((index(where[a]), index(where[b])), []).append(rate)
            if index(where[a]) != index(where[b]):
                cells.setdefault((index(where[b]), index(where[a])), []).append(rate)
    if not cells:
        return []
    return [[statistics.median(cells[i, j]) if (i, j) in cells else None for j in range(size)] for i in range(size)]


def slow(spec: Spec, party: Party, where: list[Where], result: Result) -> Result:
    """Who is slow: nodes where there are three with equally many ranks, else ranks, inside hosts and between them each
    beside its like. Of nodes nothing is known then."""
    if party.world < 2:
        raise ConfigError("--ranks", party.world, "pairs are of two ranks at the least")
    nodes = nodes_of(where)
    members = nodes if nodes is not None and len(nodes) > 2 else [[rank] for rank in range(party.world)]
    names = (
        [where[ranks[0]].host for ranks in members] if members is nodes else [f"rank {r}" for r in range(party.world)]
    )
    meeting = Meeting(party, spec, spec.sizes[-1])
    fault = Fault(**spec.fault) if spec.fault else None

    def measure(chosen: Sequence[Pair]) -> dict[Pair, Lanes]:
        lanes = {pair: list(zip(members[pair[0]], members[pair[1]])) for pair in chosen}
        times = meeting([_pair(*two) for several in lanes.values() for two in several])
        found = {pair: tuple(times[_pair(*two)] for two in several) for pair, several in lanes.items()}
        if fault is not None and fault.kind == "slow":  # for tests: as if that member were slower
            found = {
                p: tuple(t * fault.every for t in lanes) if fault.rank in p else lanes for p, lanes in found.items()
            }
        return found

    size, rate = spec.sizes[-1], spec.expected
    expected = size / rate / 1e9 if rate else None
    apart = members is not nodes and len({at.host for at in where}) > 1
    kind = kind_of(where) if apart else None
    found = [Search(len(members), measure, expected=expected, kind=kind).run() for _ in range(spec.searches)]
    if apart and not expected:
        found = [finding if finding.bad or finding.unclear else replace(finding, unclear=FEW) for finding in found]
    named = [plain(finding, names, size, bool(rate)) for finding in found]
    counted = Counter(name for one in named for name in {" - ".join(c["names"]) for c in one["culprits"]})
    extra = {"size": size, "members": names, "searches": spec.searches, "named": dict(counted), "lost": _lost(meeting)}
    # What is shown is the search that found most: with several, the counts tell what is steady.
    shown = max(named, key=lambda one: (len(one["culprits"]), one["bad"]))
    return replace(result, extra={**result.extra, **extra, **shown})


def kind_of(where: Sequence[Where]) -> Kind:
    """Pairs of ranks between hosts are 0, those inside one 1: another link, which has times of its own."""
    return lambda pair: int(where[pair[0]].host == where[pair[1]].host)


def plain(finding: Finding, names: Sequence[str], size: int, expected: bool) -> dict[str, Any]:
    """For JSON."""
    return {
        "culprits": [asdict(c) | {"names": [names[m] for m in c.members]} for c in finding.culprits],
        "bad": finding.bad,
        "everybody": finding.everybody,
        "lanes": list(finding.lanes),
        "said": sentences(finding, names, size, expected),
        "unclear": finding.unclear,
        "usual_s": list(finding.usual),
        "measured": [[a, b, list(lanes)] for (a, b), lanes in sorted(finding.measured.items())],
    }


def _lost(meeting: Meeting) -> list[list[int]]:
    return [[a, b, elements] for (a, b), elements in sorted(meeting.lost().items())]
