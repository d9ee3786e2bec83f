"""The roll call in a store: every rank arrives once, rank 0 reads all arrivals and answers with one verdict.

Arrivals are numbered as they come, so rank 0 asks for new ones alone, however many are missing: a rank calls the store
a fixed number of times, its looks for the verdict aside, and rank 0 a few times for each batch that came.

On its way each rank also learns what the store can tell: how far its clock is from rank 0's (`rollcall.ahead`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from hpctrain.errors import LaunchError
from hpctrain.launch.life.identity import Identity
from hpctrain.launch.meet.rollcall import Arrival, Verdict, judge

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

GRACE_S = 3.0
"""How long rank 0 keeps the store for those that have not heard yet that they must not go on."""

BATCH = 512
"""Arrivals that are read with one call."""

_CAME, _CLOCK, _VERDICT, _TOLD = "came", "clock", "verdict", "told"

Examine = Callable[[Mapping[int, Arrival], Mapping[int, float]], str]
"""What rank 0 makes of all arrivals, and of when it heard of each, seconds since the epoch: why they must not go on, or
nothing."""


def roll_call(
    store: Store, identity: Identity, arrival: Arrival, deadline: float, timeout_s: float, examine: Examine | None
) -> Verdict:
    """Arrive, and hear what rank 0 concludes. Collective.

    Raises:
        LaunchError: ranks are missing, or must not go on; the same on all that came.
    """
    rank, world = identity.rank, identity.world
    if store.add(f"seen/{rank}", 1) > 1:
        raise LaunchError(
            f"two processes say that they are rank {rank} of {world}: "
            "start each rank once, and give each its own RANK if it is set by hand."
        )
    if rank == 0:
        verdict = _preside(store, world, arrival, deadline, timeout_s, examine)
    else:
        try:
            verdict = _attend(store, rank, arrival, timeout_s)
        except RuntimeError as error:
            raise LaunchError(
                f"rank {rank} lost rank 0 while the ranks were meeting ({error}): look at the end of its log."
            ) from None
    if verdict.error:
        raise LaunchError(verdict.error)
    return verdict


def judged(
    arrivals: Mapping[int, Arrival],
    heard: Mapping[int, float],
    world: int,
    waited_s: float,
    examine: Examine | None,
) -> Verdict:
    """What rank 0 concludes of those that came."""
    verdict = judge(arrivals, world, waited_s)
    if examine is not None and not verdict.error and (error := examine(arrivals, heard)):
        return Verdict(error)
    return verdict


def _preside(
    store: Store, world: int, arrival: Arrival, deadline: float, timeout_s: float, examine: Examine | None
) -> Verdict:
    now = time.time()
    here, heard = {0: replace(arrival, clock=now, told=now)}, {0: now}
    unread: set[int] = set()
    numbered = 0

    def read(numbers: list[int]) -> None:
        for text in store.multi_get([f"{_CAME}/{number}" for number in numbers]):
            rank, _, said = text.decode().partition(" ")
            here[int(rank)], heard[int(rank)] = Arrival.load(said), time.time()
        unread.difference_update(numbers)

    def all_here() -> bool:
        nonlocal numbered
        store.set(_CLOCK, repr(time.time()))
        came = store.add(_CAME, 0)
        unread.update(range(numbered + 1, came + 1))
        numbered = came
        for batch in _batches(sorted(unread)):
            if store.check([f"{_CAME}/{number}" for number in batch]):
                read(batch)
        return len(here) == world

    if not until(all_here, deadline):
        for number in sorted(unread):  # one has its number and has not said anything: the others of its batch have
            if store.check([f"{_CAME}/{number}"]):
                read([number])
    verdict = judged(here, heard, world, timeout_s, examine)
    store.set(_VERDICT, verdict.dump())
    if verdict.error:
        until(lambda: store.add(_TOLD, 0) >= len(here) - 1, time.monotonic() + GRACE_S)
    return verdict


def _batches(numbers: list[int]) -> list[list[int]]:
    return [numbers[i : i + BATCH] for i in range(0, len(numbers), BATCH)]


def _attend(store: Store, rank: int, arrival: Arrival, timeout_s: float) -> Verdict:
    told = float(store.get(_CLOCK)) if store.check([_CLOCK]) else None
    arrival = replace(arrival, clock=time.time(), told=told)
    store.set(f"{_CAME}/{store.add(_CAME, 1)}", f"{rank} {arrival.dump()}")
    # Rank 0 began to wait before this rank could reach it, so its verdict comes first.
    if not until(lambda: store.check([_VERDICT]), time.monotonic() + timeout_s + 2 * GRACE_S):
        raise LaunchError(f"rank {rank} reached the store of rank 0 but heard nothing in {timeout_s:.0f} s.")
    verdict = Verdict.load(store.get(_VERDICT))
    store.add(_TOLD, 1)
    return verdict


def until(condition: Callable[[], bool], deadline: float) -> bool:
    """Poll in steps that grow: a blocking wait of the store would hold signals back for as long."""
    pause = 0.005
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(pause * 1.5, 0.25)
    return True
