"""What is held against the plan, and what comes out of it. Plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpctrain.cluster.cpus import format_list
from hpctrain.launch.place.bind import Binding
from hpctrain.launch.proof.probe import Found


@dataclass(frozen=True)
class Finding:
    """One thing that is not as it should be on one rank."""

    rank: int
    what: str
    planned: str
    found: str
    cause: str
    mend: str
    stops: bool = True


@dataclass(frozen=True)
class Rank:
    """What one rank reported.

    Attributes:
        binding: None where nothing was planned for it.
        ranks_here: ranks on its host.
        world: ranks of the job.
        hosts: of the job.
        reach, sockets_reach: whether the interfaces that gloo and NCCL are told to use reach other hosts; None: not
            known.
    """

    rank: int
    binding: Binding | None
    found: Found
    ranks_here: int = 1
    world: int = 1
    hosts: int = 1
    reach: bool | None = None
    sockets_reach: bool | None = None


def ranges(ranks: Sequence[int]) -> str:
    """`0-3,8`."""
    return format_list(tuple(sorted(ranks)))


def grouped(findings: Sequence[Finding]) -> list[tuple[str, Finding]]:
    """Findings that differ in their ranks alone as one, what stops first."""
    groups: dict[tuple[object, ...], list[Finding]] = {}
    for one in findings:
        groups.setdefault((not one.stops, one.what, one.planned, one.found, one.cause), []).append(one)
    keys: Mapping[tuple[object, ...], list[Finding]] = dict(sorted(groups.items(), key=lambda item: item[0][0] is True))
    return [(ranges([one.rank for one in found]), found[0]) for found in keys.values()]
