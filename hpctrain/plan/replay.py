"""One schedule played many times with other times: what depends on the schedule alone is worked out once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from hpctrain.layout.schedule import make_schedule

KINDS = ("forward", "backward_input", "backward_weight", "backward")

Step = tuple[int, int, int, int, int, int]
"""Rank, place of its time, and twice a step that it waits for (-1: none) and the place of the way from there: that
between ranks i and i + 1 is i, that between the last and the first is the last, and -1 is none."""


PROGRAMS = 512
"""Schedules that are kept ready: a search takes 50 to 70, and studies search again and again. Each is some 0.3 MB."""


@lru_cache(maxsize=PROGRAMS)
def program(name: str, stages: int, chunks: int, micro_batches: int) -> tuple[Step, ...]:
    """All actions of a schedule in an order in which they can be worked out.

    What an action waits for is as in `Schedule.needs`, in numbers instead of names, for speed.
    """
    schedule = make_schedule(name, stages, chunks, micro_batches)
    virtual = schedule.virtual_stages
    gradients, last = virtual * micro_batches, virtual - 1
    made = [-1] * (2 * gradients)  # the step of activations by stage and micro-batch, then of gradients
    ways = [[way(one, other, stages) for other in range(stages)] for one in range(stages)]
    kinds = {kind: place * virtual for place, kind in enumerate(KINDS)}
    waiting: dict[int, int] = {}
    at = [0] * stages
    out: list[Step] = []
    runnable = list(range(stages))
    while runnable:
        rank = runnable.pop()
        order = schedule.ranks[rank]
        for action in order[at[rank] :]:
            kind, stage = action.kind, action.stage
            own = stage * micro_batches + action.micro_batch
            one = two = -1
            if kind == "forward":
                one = own - micro_batches if stage else -1
            elif kind == "backward_weight":
                one = gradients + own
            else:
                one, two = own, -1 if stage == last else gradients + own + micro_batches
            missing = one if one >= 0 and made[one] < 0 else two if two >= 0 and made[two] < 0 else -1
            if missing >= 0:
                waiting[missing] = rank
                break
            a, b = made[one] if one >= 0 else -1, made[two] if two >= 0 else -1
            way_a = ways[out[a][0]][rank] if a >= 0 else -1
            way_b = ways[out[b][0]][rank] if b >= 0 else -1
            if kind != "backward_weight":
                made[key := own if kind == "forward" else gradients + own] = len(out)
                if (other := waiting.pop(key, None)) is not None:
                    runnable.append(other)
            out.append((rank, kinds[kind] + stage, a, way_a, b, way_b))
            at[rank] += 1
    return tuple(out)


def way(one: int, other: int, ranks: int) -> int:
    """The place of the way between two ranks."""
    if one == other:
        return -1
    return min(one, other) if abs(one - other) == 1 else ranks - 1


def end(
    name: str,
    stages: int,
    chunks: int,
    micro_batches: int,
    forward: Sequence[float],
    inputs: Sequence[float],
    weights: Sequence[float],
    latency: Sequence[float],
) -> float:
    """When the last rank is done; the same as `play` says.

    Args:
        latency: of the ways between ranks, in the order of `Step`.
    """
    times = [*forward, *inputs, *weights, *(i + w for i, w in zip(inputs, weights))]
    steps = program(name, stages, chunks, micro_batches)
    done, free, ways = [0.0] * (len(steps) + 1), [0.0] * stages, [*latency, 0.0]
    for place, (rank, key, a, way_a, b, way_b) in enumerate(steps):
        start = free[rank]
        one = done[a] + ways[way_a]
        two = done[b] + ways[way_b]
        if one > start:
            start = one
        if two > start:
            start = two
        free[rank] = done[place] = start + times[key]
    return max(free)
