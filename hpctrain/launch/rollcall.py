"""What ranks tell each other when they first meet, and what rank 0 concludes from it. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Arrival:
    """One rank's word about itself.

    Attributes:
        world: how many ranks it believes there are.
        host: name of its node.
        cpus: CPUs it may run on.
        gpu: UUID of the GPU it computes on; empty on the CPU.
    """

    world: int
    host: str
    cpus: tuple[int, ...]
    gpu: str = ""

    def dump(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def load(text: str | bytes) -> Arrival:
        fields = json.loads(text)
        return Arrival(**{**fields, "cpus": tuple(fields["cpus"])})


@dataclass(frozen=True)
class Verdict:
    """What rank 0 found.

    Attributes:
        error: why the world cannot start, as a sentence; empty when it can.
        sharing: rank -> ranks on its host, itself included, whose CPUs overlap with its own.
    """

    error: str
    sharing: tuple[int, ...] = ()

    def dump(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def load(text: str | bytes) -> Verdict:
        fields = json.loads(text)
        return Verdict(fields["error"], tuple(fields["sharing"]))


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
    return Verdict("", _sharing([arrivals[r] for r in range(world)]))


def _sharing(arrivals: Sequence[Arrival]) -> tuple[int, ...]:
    by_host: dict[str, list[frozenset[int]]] = {}
    for arrival in arrivals:
        by_host.setdefault(arrival.host, []).append(frozenset(arrival.cpus))
    return tuple(sum(not set(a.cpus).isdisjoint(other) for other in by_host[a.host]) for a in arrivals)


def name_ranks(ranks: Sequence[int]) -> str:
    """`rank 3`, or `ranks 1, 2, 3`, or the first few and a count."""
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) != 1 else ''} {shown}"
