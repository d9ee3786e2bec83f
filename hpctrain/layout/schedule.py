"""Pipeline schedules as plain data: what each rank of the pp axis computes, and in which order.

A model is cut into `stages x chunks` virtual stages in model order. Which rank holds which of them, and everything
else about a schedule, can be read off the lists of actions: one runtime executes any of them, one validator proves
them (`schedule_check`), one player prices them (`timeline`). Transfers follow from the lists (`transfers`); what a
schedule promises is in `schedule_claims`.

A number of micro-batches that a pattern is not made for takes the pattern of a number that it is made for, and leaves
out the micro-batches beyond. Actions of different micro-batches do not depend on each other, so an order without
deadlock has none after that either.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, count, product, repeat
from typing import NamedTuple

from hpctrain.errors import ConfigError
from hpctrain.layout.actions import Action, Kind, Order, Payload, Schedule, ScheduleError, Tensor
from hpctrain.layout.layout import split
from hpctrain.layout.zero_bubble import split_backwards

__all__ = ["Action", "Kind", "Order", "Payload", "Schedule", "ScheduleError", "Tensor", "make_schedule"]


class _Step(NamedTuple):
    """An action on the micro-batch whose turn it is."""

    kind: Kind
    stage: int


def make_schedule(name: str, stages: int, chunks: int, micro_batches: int) -> Schedule:
    """The schedule of that name, a pure function of its arguments.

    Args:
        name: one of `SCHEDULES`.
        stages: ranks of the pp axis, 1 or more.
        chunks: virtual stages a rank holds.
        micro_batches: of one step, 1 or more.

    Raises:
        ConfigError: no schedule of that name, or one that cannot have so many chunks.
    """
    if name not in SCHEDULES:
        raise ConfigError("parallel.schedule", name, f"must be one of {', '.join(SCHEDULES)}")
    for key, value in (("parallel.pp", stages), ("parallel.chunks", chunks), ("micro_batches", micro_batches)):
        if value < 1:
            raise ConfigError(key, value, "must be 1 or more")
    _check_chunks(name, chunks)
    orders = tuple(SCHEDULES[name](stages, chunks, micro_batches, rank) for rank in range(stages))
    schedule = Schedule(name, stages, chunks, micro_batches, orders)
    return split_backwards(schedule) if name in ZERO_BUBBLE else schedule


def _check_chunks(name: str, chunks: int) -> None:
    key = "parallel.chunks"
    if name in ("gpipe", "1f1b") and chunks != 1:
        fix = "use parallel.chunks=1, or parallel.schedule=interleaved or zb-h1"
        raise ConfigError(key, chunks, f"{name} has 1 chunk a rank", fix)
    if name == "interleaved" and chunks == 1:
        fix = "use parallel.chunks=2, or parallel.schedule=1f1b, which it is with one"
        raise ConfigError(key, chunks, "interleaved has 2 or more chunks a rank", fix)
    if name == "zb-v" and chunks != 2:
        fix = "use parallel.chunks=2, or parallel.schedule=zb-h1 for another number"
        raise ConfigError(key, chunks, "zb-v has 2 chunks a rank", fix)


def gpipe(stages: int, chunks: int, micro_batches: int, rank: int) -> Order:
    """All forwards, then all backwards. GPipe, Huang et al. 2019, arXiv 1811.06965."""
    return (*_run("forward", [rank], range(micro_batches)), *_run("backward", [rank], range(micro_batches)))


def one_f_one_b(stages: int, chunks: int, micro_batches: int, rank: int) -> Order:
    """One forward for every rank after this one, then forward and backward in turn.

    PipeDream-Flush, Narayanan et al. 2021, arXiv 2006.09503.
    """
    forwards = _run("forward", [rank], range(micro_batches))
    backwards = _run("backward", [rank], range(micro_batches))
    return _alternate(forwards, backwards, warmup=stages - 1 - rank)


def interleaved(stages: int, chunks: int, micro_batches: int, rank: int) -> Order:
    """1F1B over chunks: virtual stage v on rank v % stages, micro-batches chunk by chunk in groups.

    Narayanan et al. 2021, arXiv 2104.04473. Before the first backward one group has to pass all chunks, and each rank
    runs two forwards more than the next.
    """
    held, batches = range(rank, stages * chunks, stages), groups(stages, micro_batches)
    forwards = [action for batch in batches for action in _run("forward", held, batch)]
    backwards = [action for batch in batches for action in _run("backward", held[::-1], batch)]
    order = _alternate(forwards, backwards, warmup=(chunks - 1) * len(batches[0]) + 2 * (stages - 1 - rank))
    return tuple(action for action in order if action.micro_batch < micro_batches)


def groups(stages: int, micro_batches: int) -> list[range]:
    """Micro-batches that pass a chunk of an interleaved schedule before the next chunk begins.

    Groups of at least `stages`, as even as can be, the larger first, keep every rank busy but hold activations in
    proportion to their size. Where they would be more than a third larger than `stages`, they are of just `stages`,
    and the last reaches beyond the micro-batches there are: a little more bubble for much less memory.
    """
    parts = max(1, micro_batches // stages)
    if 3 * split(micro_batches, parts, 0)[1] > 4 * stages:
        return [range(start, start + stages) for start in range(0, micro_batches, stages)]
    cuts = (split(micro_batches, parts, index) for index in range(parts))
    return [range(start, start + size) for start, size in cuts]


def zero_bubble_h1(stages: int, chunks: int, micro_batches: int, rank: int) -> Order:
    """ZB-H1 is 1F1B with backwards split (Qi et al. 2023, arXiv 2401.10241); over chunks, interleaved 1F1B."""
    return (one_f_one_b if chunks == 1 else interleaved)(stages, chunks, micro_batches, rank)


def zero_bubble_v(stages: int, chunks: int, micro_batches: int, rank: int) -> Order:
    """ZB-V: rank r holds virtual stages r, on the way down the ranks, and 2 x stages - 1 - r, on the way up.

    Qi et al. 2023, arXiv 2401.10241, section 6; as V-ZB in Qi et al. 2024, arXiv 2405.15362. A rank fills up with
    forwards down, then with forwards of both chunks, until 2 x stages are alive, as many as half-stages 1F1B keeps.
    """
    below, full = stages - 1 - rank, max(micro_batches, 2 * stages - 1)
    ends = rank, 2 * stages - 1 - rank
    down, up = (_Step("forward", stage) for stage in ends)
    back_down, back_up = (_Step("backward", stage) for stage in ends)
    pattern = chain(
        repeat(down, 2 * below + 1),
        [up, down] * rank,
        [up, back_up] * (below + 1),
        [down, back_down, up, back_up] * (full - stages - below),
        [back_down, up, back_up] * below,
        [back_down, back_up] * rank,
        [back_down] * (below + 1),
    )
    counters: dict[_Step, Iterator[int]] = defaultdict(count)
    order = (Action(step.kind, step.stage, next(counters[step])) for step in pattern)
    return tuple(action for action in order if action.micro_batch < micro_batches)


def _run(kind: Kind, stages: Iterable[int], micro_batches: Iterable[int]) -> list[Action]:
    """The micro-batches through one stage after another."""
    return [Action(kind, stage, micro_batch) for stage, micro_batch in product(stages, micro_batches)]


def _alternate(forwards: list[Action], backwards: list[Action], warmup: int) -> Order:
    """`warmup` forwards, then a forward and a backward in turn, then the backwards that are left."""
    warmup = min(warmup, len(forwards))
    steady = [action for pair in zip(forwards[warmup:], backwards) for action in pair]
    return (*forwards[:warmup], *steady, *backwards[len(forwards) - warmup :])


SCHEDULES: dict[str, Callable[[int, int, int, int], Order]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zb-h1": zero_bubble_h1,
    "zb-v": zero_bubble_v,
}
"""Per name, the order of one rank, backwards whole: `(stages, chunks, micro_batches, rank) -> actions`."""

ZERO_BUBBLE = ("zb-h1", "zb-v")
"""Schedules whose backwards are split."""
