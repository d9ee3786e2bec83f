"""What waits for its backward on a rank at once: a schedule's list played once, whatever the sizes are. No torch.

A list of many micro-batches repeats itself, so a few of them are played. Of the moments that come up those alone are
kept beside which no other has as much of everything.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cache
from itertools import chain
from typing import NamedTuple

from hpctrain.layout.actions import Order
from hpctrain.layout.activations import Activations
from hpctrain.layout.layout import Layout
from hpctrain.layout.schedule import make_schedule

Counts = tuple[tuple[int, ...], tuple[int, ...]]

MANY = 2
"""Backwards of a step after which a further one changes nothing of what an engine holds."""


class Alive(NamedTuple):
    """A moment of a rank's list, while an action of it runs.

    Attributes:
        forward: it is a forward; otherwise a backward, or that part of one that makes the gradient of the input.
        chunk: of the rank, whose action it is.
        backwards: of the step before it; `MANY` are as many or more.
        whole: micro-batches by chunk from their forward to their backward, this one too.
        parts: micro-batches by chunk of which a split backward has left what gradients of weights need.
    """

    forward: bool
    chunk: int
    backwards: int
    whole: tuple[int, ...]
    parts: tuple[int, ...]

    def kept(self, sizes: Sequence[Activations]) -> int:
        """Bytes that wait, of chunks of these sizes."""
        whole = sum(number * size.kept for number, size in zip(self.whole, sizes))
        return whole + sum(number * size.left for number, size in zip(self.parts, sizes))

    def logits(self, sizes: Sequence[Activations]) -> int:
        """Of these, bytes of logits."""
        return sum(number * size.logits for number, size in zip(self.whole, sizes))


def alive(layout: Layout, micro_batches: int, place: int) -> tuple[Alive, ...]:
    """The moments at which a rank keeps most.

    Args:
        micro_batches: of a step, 1 or more.
        place: of the rank on pp.
    """
    shape = layout.schedule, layout.pp, layout.chunks
    return _of_all(*shape, *few(*shape, micro_batches))[place]


def few(schedule: str, pp: int, chunks: int, micro_batches: int) -> tuple[int, int]:
    """Micro-batches with which a list has all its moments, and how many more each rank keeps beside these.

    Of the groups of an interleaved schedule (`schedule.groups`) some are of the larger size and some of the smaller, as
    they were.
    """
    if schedule == "gpipe":  # all wait until the first backward
        return min(micro_batches, MANY + 1), max(0, micro_batches - MANY - 1)
    groups, larger = divmod(micro_batches, pp)
    some = 2 * chunks
    return (micro_batches if groups - larger <= some or groups <= 2 * some else 2 * some * pp + min(larger, some)), 0


@cache
def _of_all(schedule: str, pp: int, chunks: int, micro_batches: int, besides: int) -> tuple[tuple[Alive, ...], ...]:
    """By place on pp."""
    made = make_schedule(schedule, pp, chunks, micro_batches)
    return tuple(_moments(order, held, besides) for order, held in zip(made.ranks, made.held))


def _moments(order: Order, held: tuple[int, ...], besides: int) -> tuple[Alive, ...]:
    found: dict[tuple[bool, int, int], set[Counts]] = {}
    whole, parts, backwards = [besides] * len(held), [0] * len(held), 0
    for action in order:
        chunk, forward = held.index(action.stage), action.kind == "forward"
        if action.kind == "backward_weight":
            parts[chunk] -= 1
            continue
        whole[chunk] += forward
        found.setdefault((forward, chunk, min(backwards, MANY)), set()).add((tuple(whole), tuple(parts)))
        if not forward:
            whole[chunk] -= 1
            parts[chunk] += action.kind == "backward_input"
            backwards += 1
    return tuple(Alive(*at, *counts) for at, all_counts in found.items() for counts in _most(all_counts))


def _most(counts: Collection[Counts]) -> list[Counts]:
    """Those beside which no other has as much of everything."""

    def less(one: Counts, other: Counts) -> bool:
        return one != other and all(a <= b for a, b in zip(chain(*one), chain(*other)))

    return sorted(one for one in counts if not any(less(one, other) for other in counts))
