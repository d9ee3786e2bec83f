"""Names the rank that the others wait for in vain, and ends the job instead of waiting on.

Every rank has two threads. The *talker* puts a beat (`heartbeat.Beat`) into the store every half second and reads the
beats that the *watcher* wants. The watcher never touches the store, so it goes on when rank 0, which holds the store,
is the one that hangs. It counts time in its own ticks: of a job that was suspended as a whole no rank is blamed.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from hpctrain.errors import LaunchError
from hpctrain.launch.meet.heartbeat import Beat, silent, stuck
from hpctrain.telemetry.meter import Collective, Meter

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

SILENCE_S = 30.0
"""A rank that others wait for and that has given no sign of life for so long hangs: it is stopped, or its node is."""

LOOK_S = 5.0
"""How long a collective lasts before the ranks in it are looked at."""

RANKS_A_SECOND = 500
"""Beats a second that one store is asked to take, at most."""

BEATS = 4
"""So many have to be missing at least: of thousands of ranks beats are many seconds apart, and one may be late."""

LOOKERS = (2, 16, 64)
"""Of the ranks that wait in one collective the first two look for those that are missing: all of them would ask the
store for all others. When nothing has come of it for as long as it takes, those two may be missing, and more look."""

FAILURE = "failure"
"""Key of the sentence about what failed first."""


class PeerLost(LaunchError):
    """This rank stops because another one is gone: a consequence, never the cause."""


class RankHung(LaunchError):
    """Another rank hangs; the sentence names it."""


class Watchdog:
    """See the module's docstring.

    Args:
        store: of this life of the job; only clones of it are used.
        rank: this one.
        world: number of ranks.
        meter: what this rank does.
        timeout_s: longest wait for ranks that live.
        leave: ends the process with an error; called from a thread.
        silence_s: see `SILENCE_S`; at least `BEATS` beats.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world: int,
        meter: Meter,
        timeout_s: float,
        leave: Callable[[LaunchError], None],
        silence_s: float,
    ) -> None:
        self.rank, self.world, self.meter, self.timeout_s, self.leave = rank, world, meter, timeout_s, leave
        self.every_s = max(0.5, world / RANKS_A_SECOND)
        self.silence_s = max(silence_s, BEATS * self.every_s)
        self._store: Store = store.clone()  # type: ignore[attr-defined]
        self._ended = threading.Event()
        self._wanted: tuple[int, ...] = ()
        self._heard: dict[int, Beat] = {}
        self._answers = self._count = 0
        self._idle_s = 0.0
        self._watching = True
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._talk, self._watch)]

    def start(self) -> None:
        self._beat()  # so that everybody has been heard of who gets as far as this
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End both threads; what they last heard remains."""
        self._ended.set()
        for thread in self._threads:
            thread.join(self.every_s)

    def lost(self) -> str:
        """After the connection to a peer broke: a sentence about ranks of the last collective that are gone, found in
        a few beats; empty where all still live."""
        last = self.meter.last
        if last is None or self._ended.is_set():
            return ""
        self._watching = False
        seen, answers = _Seen(), self._answers
        self._threads[1].join()
        self._wanted = self._others(last.ranks)
        for _ in range(12):
            time.sleep(self.every_s)
            if answers != self._answers:
                answers = self._answers
                seen.note(self._wanted, self._heard, self.every_s)
            if said := silent(self._heard, seen.quiet_s, BEATS * self.every_s):
                return said
        return ""

    def _others(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(r for r in ranks if r != self.rank)

    def _beat(self) -> None:
        self._count += 1
        self._store.set(f"beat/{self.rank}", self._mine().dump())

    def _mine(self) -> Beat:
        return Beat.of(self.meter, self._count, socket.gethostname(), os.getpid(), self._idle_s)

    def _talk(self) -> None:
        while not self._ended.wait(self.every_s):
            try:
                self._beat()
                if self._store.check([FAILURE]):
                    self._follow(self._store.get(FAILURE).decode())
                self._listen(self._wanted)
                self._answers += 1
            except RuntimeError:  # the store went with rank 0, and the collectives with it
                return

    def _listen(self, ranks: tuple[int, ...]) -> None:
        keys = {rank: f"beat/{rank}" for rank in ranks}
        if ranks and not self._store.check(list(keys.values())):  # some never came as far as to beat
            keys = {rank: key for rank, key in keys.items() if self._store.check([key])}
        for rank, text in zip(keys, self._store.multi_get(list(keys.values())) if keys else []):
            self._heard[rank] = Beat.load(text)

    def _follow(self, failure: str) -> None:
        """Another rank has failed: give this one a moment to find out by itself, then leave."""
        if not self._ended.wait(4 * self.every_s):
            self.leave(PeerLost(f"rank {self.rank} stopped because {failure}"))

    def _watch(self) -> None:
        changes, answers, answered_s = -1, -1, 0.0
        seen = _Seen()
        while not self._ended.wait(self.every_s) and self._watching:
            blocked = self.meter.awaited()
            if changes != self.meter.changes or blocked is None:
                self._idle_s = self._idle_s + self.every_s if changes == self.meter.changes else 0.0
                changes, seen, answered_s, self._wanted = self.meter.changes, _Seen(), 0.0, ()
                continue
            self._idle_s += self.every_s
            answered_s += self.every_s
            if not self._looks(blocked):
                continue
            late = self._idle_s >= self.timeout_s
            self._wanted = self._others(tuple(range(self.world)) if late else blocked.ranks)
            if answers != self._answers:  # else nothing was heard of anybody, which says nothing of them
                seen.note(self._wanted, self._heard, answered_s)
                answers, answered_s = self._answers, 0.0
            if said := self._verdict(blocked, seen, answered_s):
                self._end(said)
                return

    def _looks(self, blocked: Collective) -> bool:
        """Whether it is this rank's turn to look."""
        late = max(0.0, self._idle_s - LOOK_S) / (self.silence_s + 4 * LOOK_S)
        turn = LOOKERS[min(int(late), len(LOOKERS) - 1)]
        waited = self._idle_s >= min(LOOK_S, self.timeout_s)
        return waited and (self.rank not in blocked.ranks or blocked.ranks.index(self.rank) < turn)

    def _verdict(self, blocked: Collective, seen: _Seen, answered_s: float) -> str:
        if said := silent(self._heard, seen.quiet_s, self.silence_s):
            return said
        if self.rank != 0 and answered_s >= self.silence_s:
            return f"rank 0, which holds the store, has given no sign of life for {answered_s:.0f} s"
        if self._idle_s >= self.timeout_s + 4 * self.every_s:  # by now all have been heard
            return stuck({**self._heard, self.rank: self._mine()}, blocked, self._idle_s)
        return ""

    def _end(self, said: str) -> None:
        """Tell the others, whose talkers look every beat, and leave."""
        teller = threading.Thread(target=self._tell, args=(said,), daemon=True)
        teller.start()
        teller.join(4 * self.every_s)
        if not self._ended.is_set():
            self.leave(RankHung(f"{said}: the job ends here; rank {self.rank} waited for it."))

    def _tell(self, said: str) -> None:
        with suppress(RuntimeError):
            tell_failure(self._store.clone(), said)  # type: ignore[attr-defined]
            time.sleep(2 * self.every_s)


def tell_failure(store: Store, said: str) -> None:
    """Leave the sentence about the first failure for all ranks."""
    if store.add("failures", 1) == 1:
        store.set(FAILURE, said)


class _Seen:
    """For how long the beats of other ranks have not changed, in seconds of this rank."""

    def __init__(self) -> None:
        self.quiet_s: dict[int, float] = {}
        self._counts: dict[int, int] = {}

    def note(self, wanted: tuple[int, ...], heard: dict[int, Beat], seconds: float) -> None:
        """Take note of what was heard of some ranks `seconds` after the last time."""
        for rank in wanted:
            count = heard[rank].count if rank in heard else 0
            same = self._counts.get(rank) == count
            self.quiet_s[rank] = self.quiet_s.get(rank, 0.0) + seconds if same else 0.0
            self._counts[rank] = count
