"""What each rank of the health step leaves on the disk, and what is read from that.

A rank writes before it measures links, and again before each round of them. So where one hangs, and all others with it,
its file says where it was.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hpctrain.files import write_whole
from hpctrain.launch.health.judge import Device, Pair
from hpctrain.launch.health.measure import Met

STOPPED = "stopped"
"""In the folder of a life: it was asked to stop while it measured."""

End = tuple[str, int]
"""Host and local rank."""


class Record:
    """Of one rank.

    Args:
        life: folder of this life of the job.
        device: what the rank measured alone.
    """

    def __init__(self, life: Path, rank: int, device: Device) -> None:
        self._path = life / f"rank-{rank}.json"
        self._tree: dict[str, Any] = {"device": asdict(device), "met": []}
        self._write()

    def begin(self, number: int, peer: int | None) -> None:
        """The rank is about to enter a round of links."""
        self._tree |= {"round": number, "peer": peer}
        self._write()

    def add(self, met: Met) -> None:
        """What came of a round; it is on the disk with the beginning of the next."""
        self._tree["met"].append(asdict(met))

    def end(self) -> None:
        """All rounds are done."""
        self._tree |= {"round": None, "peer": None, "done": True}
        self._write()

    def _write(self) -> None:
        write(self._path, self._tree)


@dataclass(frozen=True)
class Left:
    """What the ranks of a step have left.

    Attributes:
        devices: those that reported.
        pairs: each once, by its slower end.
        hung: of those at which the step came to a halt, where they were, in words.
        notes: what was odd.
    """

    devices: tuple[Device, ...] = ()
    pairs: tuple[Pair, ...] = ()
    hung: Mapping[End, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def read(life: Path) -> Left:
    """Read the files of a step; those that are damaged count as missing."""
    trees: dict[int, dict[str, Any]] = {}
    devices: dict[int, Device] = {}
    for path in sorted(life.glob("rank-*.json")):
        with suppress(ValueError, KeyError, TypeError):
            rank, tree = int(path.stem.removeprefix("rank-")), json.loads(path.read_text())
            samples = {name: tuple(values) for name, values in tree["device"]["samples"].items()}
            devices[rank] = Device(**{**tree["device"], "samples": samples})
            trees[rank] = tree
    ranks = sorted(trees)
    pairs, wrong = _pairs({rank: trees[rank] for rank in ranks}, devices)
    hung, notes = _hung({rank: trees[rank] for rank in ranks}, devices)
    return Left(tuple(devices[rank] for rank in ranks), tuple(pairs), hung, (*wrong, *notes))


def _pairs(trees: Mapping[int, Mapping[str, Any]], devices: Mapping[int, Device]) -> tuple[list[Pair], list[str]]:
    """Pairs that have met, and sentences about bytes that arrived wrong."""
    pairs: dict[tuple[int, int], Pair] = {}
    wrong = []
    for rank, tree in trees.items():
        for met in tree["met"]:
            peer = met["peer"]
            if peer not in devices:
                continue
            if met["wrong"]:
                wrong.append(f"rank {rank} did not get from rank {peer} what that sent")
            a, b = sorted((rank, peer))
            pair = Pair(met["metric"], end_of(devices[a]), end_of(devices[b]), tuple(met["samples"]))
            if (a, b) not in pairs or sum(pair.samples) < sum(pairs[a, b].samples):
                pairs[a, b] = pair
    return list(pairs.values()), wrong


def _hung(trees: Mapping[int, Mapping[str, Any]], devices: Mapping[int, Device]) -> tuple[dict[End, str], list[str]]:
    """At which ranks the step came to a halt: those in the earliest round. The others wait for them in the next one."""
    begun = {rank: tree.get("round", -1) for rank, tree in trees.items() if not tree.get("done")}
    if not begun or (len(begun) == len(trees) and max(begun.values()) < 0):  # all came to their end, or none began
        return {}, []
    first = min(begun.values())
    last = {rank for rank, number in begun.items() if number == first}
    if last == set(trees):
        return {}, [f"all ranks waited for each other in round {first + 1} of links, and nobody can be blamed"]
    found: dict[End, str] = {}
    for rank in last:
        peer = trees[rank].get("peer")
        if peer in last and peer in devices:
            host, local = end_of(devices[peer])
            found[end_of(devices[rank])] = f"bytes to and from device {local} of {host} did not arrive"
        else:
            where = f"in round {first + 1} of links" if first >= 0 else "before links were measured"
            found[end_of(devices[rank])] = f"hung {where}"
    return found, []


def end_of(device: Device) -> End:
    """As pairs name it."""
    return device.host, device.local


def write(path: Path, tree: Any) -> None:
    """JSON, whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(tree, indent=2) + "\n")
