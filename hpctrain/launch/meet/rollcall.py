"""What ranks tell each other when they first meet, and what rank 0 concludes from it. Pure."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from hpctrain.cluster.cpus import format_list, parse_list


@dataclass(frozen=True)
class Arrival:
    """One rank's word about itself.

    Attributes:
        world: how many ranks it believes there are.
        host: name of its node.
        cpus: CPUs it may run on.
        gpu: UUID of the GPU it computes on; empty on the CPU.
        report: what it was to have and what it found, for the proof; empty where none is made.
        address: its own, by which it has reached rank 0; empty for rank 0, and where the launcher served the store.
        clock: its time when it arrived, seconds since the epoch.
        told: rank 0's time that it read just before; None where there was none yet.
    """

    world: int
    host: str
    cpus: tuple[int, ...]
    gpu: str = ""
    report: Mapping[str, Any] = field(default_factory=dict)
    address: str = ""
    clock: float = 0.0
    told: float | None = None

    def dump(self) -> str:
        return json.dumps({**asdict(self), "cpus": format_list(tuple(sorted(set(self.cpus))))})

    @staticmethod
    def load(text: str | bytes) -> Arrival:
        fields = json.loads(text)
        return Arrival(**{**fields, "cpus": parse_list(fields["cpus"]) if fields["cpus"] else ()})


def ahead(arrival: Arrival, heard: float) -> tuple[float, float]:
    """By how many seconds a rank's clock is ahead of rank 0's, at the least and at the most.

    A cause comes before its effect by any clock: rank 0 noted its time before this rank read that and looked at its own
    clock, and heard of it after that. So no wait, however long, is taken for a difference of clocks.

    Args:
        heard: when rank 0 read the arrival, by its clock.
    """
    return arrival.clock - heard, math.inf if arrival.told is None else arrival.clock - arrival.told


@dataclass(frozen=True)
class Verdict:
    """What rank 0 found.

    Attributes:
        error: why the world cannot start, as a sentence; empty when it can.
        sharing: rank -> ranks on its host, itself included, whose CPUs overlap with its own.
        other: address of a rank on another host than rank 0's; empty where there is none, or it is not known.
        route: interface by which this rank reaches other hosts; each rank's own, and empty where it is not known.
    """

    error: str
    sharing: tuple[int, ...] = ()
    other: str = ""
    route: str = ""

    def dump(self) -> str:
        """All ranks read it, and mostly all numbers are the same: so each is there once, with how often it comes."""
        runs = [(number, len(list(same))) for number, same in itertools.groupby(self.sharing)]
        return json.dumps({**asdict(self), "sharing": runs})

    @staticmethod
    def load(text: str | bytes) -> Verdict:
        fields = json.loads(text)
        sharing = (number for number, times in fields["sharing"] for _ in range(times))
        return Verdict(fields["error"], tuple(sharing), fields["other"])


def judge(arrivals: Mapping[int, Arrival], world: int, waited_s: float) -> Verdict:
    """Whether these ranks are a world.

    Args:
        arrivals: rank -> what it said, of those that came in time.
        world: number of ranks, as rank 0 has it.
        waited_s: how long rank 0 waited.
    """
    missing = [r for r in range(world) if r not in arrivals]
    if missing:
        return Verdict(
            f"{name_ranks(missing)} of {world} did not arrive within {waited_s:.0f} s: look at the end of "
            f"{'its log' if len(missing) == 1 else 'their logs'}, and whether their nodes reach rank 0 on "
            f"{arrivals[0].host if 0 in arrivals else 'its node'}."
        )
    believed: dict[int, list[int]] = {}
    for rank, arrival in arrivals.items():
        believed.setdefault(arrival.world, []).append(rank)
    if set(believed) != {world}:
        said = ", ".join(f"{name_ranks(sorted(who))} of {size}" for size, who in sorted(believed.items()))
        return Verdict(f"ranks disagree on how many there are ({said}): start all of them with one command.")
    users: dict[str, list[int]] = {}
    for rank, arrival in arrivals.items():
        if arrival.gpu:
            users.setdefault(arrival.gpu, []).append(rank)
    for gpu, who in users.items():
        if len(who) > 1:
            return Verdict(
                f"{name_ranks(sorted(who))} on {arrivals[who[0]].host} all have GPU {gpu}: "
                "ask for as many GPUs as ranks on each node, or set cluster.device=cpu."
            )
    return Verdict("", _sharing([arrivals[r] for r in range(world)]), away_from(arrivals))


def away_from(arrivals: Mapping[int, Arrival]) -> str:
    """Address of a rank on another host than rank 0's; "" where there is none."""
    away = (a.address for _, a in sorted(arrivals.items()) if a.address and a.host != arrivals[0].host)
    return next(away, "")


def _sharing(arrivals: Sequence[Arrival]) -> tuple[int, ...]:
    by_host: dict[str, list[frozenset[int]]] = {}
    for arrival in arrivals:
        by_host.setdefault(arrival.host, []).append(frozenset(arrival.cpus))
    return tuple(sum(not set(a.cpus).isdisjoint(other) for other in by_host[a.host]) for a in arrivals)


def name_ranks(ranks: Sequence[int]) -> str:
    """`rank 3`, or `ranks 1, 2, 3`, or the first few and a count."""
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) != 1 else ''} {shown}"
