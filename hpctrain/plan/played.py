"""A step's time by playing the runtime's own schedule, one layout at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np

from hpctrain.layout.layout import Layout
from hpctrain.layout.schedule import make_schedule
from hpctrain.layout.stages import stages
from hpctrain.plan.layer import Cost
from hpctrain.plan.links import Machine
from hpctrain.plan.replay import end
from hpctrain.plan.screen import FEW
from hpctrain.plan.step import (
    Price,
    blocked,
    blocks,
    crossed,
    deferred,
    drained,
    everything_else,
    sends,
    stage_cost,
    zero3,
)
from hpctrain.plan.work import Phase, Points, Work

MOST = 12_000
"""Forwards of one schedule that are played; of longer ones the steady part is played once and counted."""

_schedule = cache(make_schedule)


def price(machine: Machine, work: Work, layout: Layout, points: Points) -> Price:
    """What a step of one layout costs.

    Args:
        points: the same layout as arrays of one, with micro-batch, recomputation and sharding.
    """
    cost = blocks(machine, work, points)
    number = int(points.micro_batches(work)[0])
    kind = cost.routed or cost.dense
    last, waiting = deferred(work, layout.pp, np.array([number]), cost.last)
    cost = replace(cost, last=last)
    numel = (cost.numel_routed + cost.numel_expert) if cost.routed else cost.numel_dense
    extra = zero3(machine, work, points, numel, kind)
    parts = [stage_cost(stage, cost, work.model, extra) for stage in stages(work.model, layout)]
    near, far = map(_one, sends(machine, work, points))
    leaves = crossed(layout.dp * layout.cp * layout.tp, layout.pp, machine.hardware.domain.devices)
    ways = [far if away else near for away in leaves]
    done, busiest, chosen, blocking = _pipeline(work, layout, parts, ways, number)
    if layout.pp > 1:
        back = [np.atleast_1d(part.backward.total) for part in parts]
        done = _one(drained(np.array([done]), waiting, back, layout.pp))
    spent = _sum(parts, chosen, number)
    layers = max(sum(len(s.layers) for s in stages(work.model, layout) if s.home == rank) for rank in range(layout.pp))
    backward = np.atleast_1d(sum(parts[i].backward.total for i in chosen))
    rest = everything_else(machine, work, points, cost, layers, backward)
    first = {
        "compute": _one(spent.compute),
        "tp": _one(spent.tp),
        "cp": _one(spent.cp),
        "ep": _one(spent.ep),
        "pp bubble": max(0.0, done - busiest),
        "pp sends": blocking * number,
        "shard": _one(spent.shard),
    }
    parts_of = first | {name: _one(value) for name, value in rest.items()}
    detail = {name: _one(getattr(spent, name)) for name in ("matmul", "attention", "pointwise")}
    return Price(parts_of, detail)


def _one(value: object) -> float:
    return float(np.atleast_1d(np.asarray(value, float))[0])


def _sum(parts: Sequence[Cost], chosen: Sequence[int], number: int) -> Phase:
    """Of the busiest rank, all its micro-batches."""
    out = Phase()
    for index in chosen:
        out = out + (parts[index].forward + parts[index].backward) * number
    return out


def _pipeline(
    work: Work, layout: Layout, parts: Sequence[Cost], ways: Sequence[float], number: int
) -> tuple[float, float, list[int], float]:
    """When the last rank is done, how long the busiest one computes (with sends that it waits for), its stages, and how
    long it waits for sends of a micro-batch."""
    made = _schedule(layout.schedule, layout.pp, layout.chunks, 1)
    beside = work.runtime.sends_beside(layout.schedule) or layout.pp == 1
    waits = [(0.0, 0.0) if beside else blocked(layout.schedule, ways, rank) for rank in range(layout.pp)]
    home = {stage: rank for rank, held in enumerate(made.held) for stage in held}
    forward = [_one(p.forward.total) + waits[home[i]][0] for i, p in enumerate(parts)]
    inputs = [_one(p.backward_input.total) + waits[home[i]][1] for i, p in enumerate(parts)]
    weights = [_one(p.backward_weight.total) for p in parts]
    busy = [sum(forward[i] + inputs[i] + weights[i] for i in held) for held in made.held]
    rank = int(np.argmax(busy))
    chosen = list(made.held[rank])
    done = played(layout, number, (forward, inputs, weights), ways if beside else [0.0] * layout.pp)
    return done, max(busy) * number, chosen, len(chosen) * sum(waits[rank])


def played(layout: Layout, number: int, times: Sequence[Sequence[float]], latency: Sequence[float]) -> float:
    """When the last rank is done.

    Args:
        times: forward, and both parts of backward, of virtual stages.
        latency: of the ways between ranks (`crossed`).

    A long schedule is periodic in the middle: of more micro-batches than `MOST` allows two shorter ones are played,
    multiples of the pipeline's ranks apart, and the rest goes on at their difference.
    """
    virtual, ranks = layout.pp * layout.chunks, layout.pp
    shape = (layout.schedule, ranks, layout.chunks)
    forward, inputs, weights = times
    if number * virtual <= MOST or number <= 5 * ranks:
        return end(*shape, number, forward, inputs, weights, latency)
    short = (4 if ranks <= FEW else 2) * ranks + number % ranks
    longer = short + ranks
    ends = [end(*shape, n, forward, inputs, weights, latency) for n in (short, longer)]
    return ends[1] + (number - longer) / ranks * (ends[1] - ends[0])
