"""What ranks tell of themselves while they run, and who is at fault when some of them wait in vain. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from hpctrain.launch.meet.rollcall import name_ranks
from hpctrain.telemetry.meter import Collective, Meter


@dataclass(frozen=True)
class Beat:
    """One sign of life.

    Attributes:
        count: of this rank's beats; one that does not grow is a rank that does not run.
        host: its node.
        pid: its process there.
        step: of the optimizer, that is under way.
        doing: the phase it is in.
        idle_s: seconds since it last began or ended a phase, a collective or a wait.
        blocked: the collective it waits in.
        last: the collective it began last.
    """

    count: int
    host: str
    pid: int
    step: int
    doing: str
    idle_s: float
    blocked: Collective | None
    last: Collective | None

    @staticmethod
    def of(meter: Meter, count: int, host: str, pid: int, idle_s: float) -> Beat:
        return Beat(count, host, pid, meter.step, meter.doing, idle_s, meter.awaited(), meter.last)

    def dump(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def load(text: str | bytes) -> Beat:
        fields = json.loads(text)
        return Beat(**fields | {key: _collective(fields[key]) for key in ("blocked", "last")})


def _collective(plain: Sequence[object] | None) -> Collective | None:
    if plain is None:
        return None
    operation, axis, ranks, number = plain
    assert isinstance(ranks, list)
    return Collective(str(operation), str(axis), tuple(ranks), int(str(number)))


def in_words(collective: Collective) -> str:
    """`all_reduce 17 over tp (ranks 2, 3)`."""
    return f"{collective.operation} {collective.number} over {collective.axis} ({name_ranks(collective.ranks)})"


def silent(beats: Mapping[int, Beat], quiet_s: Mapping[int, float], limit_s: float) -> str:
    """The sentence about ranks that give no sign of life; empty where there are none.

    Args:
        beats: the last beat of each rank that was looked at.
        quiet_s: for how long it has not changed, seconds.
        limit_s: from where on that means something.
    """
    gone = sorted(rank for rank, seconds in quiet_s.items() if seconds >= limit_s)
    if not gone:
        return ""
    shown = "; ".join(_described(rank, beats.get(rank)) for rank in gone[:4])
    more = f" and {len(gone) - 4} more" if len(gone) > 4 else ""
    quiet = min(quiet_s[rank] for rank in gone)
    verb = "has" if len(gone) == 1 else "have"
    return f"{shown}{more} {verb} given no sign of life for {quiet:.0f} s"


def stuck(beats: Mapping[int, Beat], waited: Collective, waited_s: float) -> str:
    """The sentence about ranks that live, while some of them wait in vain for others.

    Args:
        beats: fresh ones, of all ranks that could be reached.
        waited: the collective that somebody has waited in for too long.
        waited_s: for how long, seconds.
    """
    where = f"{in_words(waited)} has not ended in {waited_s:.0f} s"
    free = {rank: beat for rank, beat in beats.items() if beat.blocked is None}
    late = {rank: beat for rank, beat in free.items() if rank in waited.ranks} or free
    if late:
        rank, beat = max(late.items(), key=lambda pair: pair[1].idle_s)
        others = f" (as do {name_ranks(sorted(set(late) - {rank}))})" if len(late) > 1 else ""
        return f"{where}: {_who(rank, beat)}, lives but does not take part{others}, {_did(beat)}"
    first = sorted(beats)[:8]
    said = "; ".join(f"rank {r} in {in_words(b.blocked)}" for r in first if (b := beats[r]).blocked is not None)
    return f"{where}: all ranks wait for each other, {said}"


def _described(rank: int, beat: Beat | None) -> str:
    return f"rank {rank}" if beat is None else f"{_who(rank, beat)}, {_did(beat)},"


def _who(rank: int, beat: Beat) -> str:
    return f"rank {rank} (process {beat.pid} on {beat.host})"


def _did(beat: Beat) -> str:
    last = f", after {in_words(beat.last)}" if beat.last else ""
    return f"in step {beat.step} in {beat.doing} for {beat.idle_s:.0f} s{last}"
