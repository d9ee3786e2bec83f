"""A step's time by formula, for very many layouts at once: the first tier of the search.

Costs of layers, sharding and the optimizer are those of `step.py`. Only the pipeline's time is found otherwise than by
playing each layout's own schedule as `played.py` does: 1F1B by a formula, others by playing a few for all. What a
layout's layers cost depends on a few of its numbers, so it is worked out once for each combination of these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import TypeVar

import numpy as np

from hpctrain.config.schema import ModelConfig
from hpctrain.layout.layout import Layout
from hpctrain.layout.stages import even, stages
from hpctrain.plan.gemm import Array
from hpctrain.plan.layer import Cost
from hpctrain.plan.links import Machine
from hpctrain.plan.replay import end
from hpctrain.plan.step import (
    Blocks,
    Price,
    blocked,
    blocks,
    crossed,
    deferred,
    drained,
    everything_else,
    sends,
    zero3,
)
from hpctrain.plan.work import NAMES, Phase, Points, Work

T = TypeVar("T")

FEW = 8
"""Ranks of a pipeline up to which 4 micro-batches a rank are played to see how long it waits with more; above, 2."""

KEYS = ("tp", "sp", "cp", "ep", "etp", "micro_batch", "recompute")
"""What the cost of a layer depends on."""

PIPELINE = ("schedule", "pp", "chunks")
"""What the spread of layers depends on."""


def unique(points: Points, names: tuple[str, ...]) -> tuple[Array, Array]:
    """Places of one point of each combination of some numbers, and of each point the place among these."""
    code = np.zeros(len(points), dtype=np.int64)
    for name in names:
        column = getattr(points, name).astype(np.int64)
        code = code * (int(column.max(initial=0)) + 1) + column
    _, index, inverse = np.unique(code, return_index=True, return_inverse=True)
    return index, inverse


def taken(value: T, index: Array) -> T:
    """A tree of dataclasses with every array indexed."""
    if isinstance(value, tuple):
        return tuple(taken(part, index) for part in value)  # type: ignore[return-value]
    if is_dataclass(value) and not isinstance(value, type):
        return type(value)(**{f.name: taken(getattr(value, f.name), index) for f in fields(value)})
    if isinstance(value, np.ndarray) and value.ndim:
        return value[index]  # type: ignore[return-value]
    return value


@cache
def counts(
    model: ModelConfig, schedule: str, pp: int, chunks: int, equal: bool = False
) -> tuple[tuple[int, int, int, int], ...]:
    """Of each virtual stage in model order: its rank, layers, those with experts, and 1 for the first, 2 for the last,
    3 for both.

    Args:
        equal: layers are spread evenly where that goes, and not balanced.
    """
    cut = even(model.layers, pp * chunks) if equal and pp > 1 else None
    parts = stages(model, Layout(pp=pp, schedule=schedule, chunks=chunks, stage_layers=cut))
    return tuple(
        (s.home, len(s.layers), sum(map(model.routed, s.layers)), int(s.first) + 2 * int(s.last)) for s in parts
    )


def screen(machine: Machine, work: Work, points: Points) -> Price:
    """Prices of all points."""
    index, inverse = unique(points, KEYS)
    cost = taken(blocks(machine, work, points.take(index)), inverse)
    numel = (cost.numel_routed + cost.numel_expert) if cost.routed else cost.numel_dense
    extra = zero3(machine, work, points, numel, cost.routed or cost.dense)
    (near, far), number = sends(machine, work, points), points.micro_batches(work)
    index, inverse = unique(points, PIPELINE)
    out = Columns(len(points))
    for place, which in enumerate(index):
        chosen = np.flatnonzero(inverse == place)
        shape = (NAMES[int(points.schedule[which])], int(points.pp[which]), int(points.chunks[which]))
        leaves = crossed((points.dp * points.cp * points.tp)[chosen], shape[1], machine.hardware.domain.devices)
        ways = [np.where(away, far[chosen], near[chosen]) for away in leaves]
        kind = points.recompute[chosen] * (shape[1] + 1) + sum(away.astype(np.int64) for away in leaves)
        some = (taken(cost, chosen), taken(extra, chosen), ways, number[chosen], kind)
        out.put(chosen, _pipeline(work, shape, *some))
    rest = everything_else(machine, work, points, cost, out["layers"], out["backward"])
    names = ("compute", "tp", "cp", "ep", "pp bubble", "pp sends", "shard")
    parts = {name: out[name] for name in names} | dict(rest)
    return Price(parts, {name: out[name] for name in ("matmul", "attention", "pointwise")})


class Columns(dict[str, Array]):
    """Arrays of one length, filled some places at a time."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length

    def put(self, where: Array, values: dict[str, Array]) -> None:
        for name, value in values.items():
            self.setdefault(name, np.zeros(self.length))[where] = value


def _pipeline(
    work: Work,
    shape: tuple[str, int, int],
    cost: Blocks,
    extra: tuple[Array, Array],
    ways: Sequence[Array],
    number: Array,
    kind: Array,
) -> dict[str, Array]:
    """What the busiest rank spends in a step, and how long it waits, for points of one shape of pipeline.

    Args:
        ways: seconds of sends between ranks, in the order of `crossed`.
        kind: points that recompute and leave domains alike are alike.
    """
    schedule, pp, chunks = shape
    each = counts(work.model, schedule, pp, chunks, work.runtime.even_stages)
    last, waiting = deferred(work, pp, number, cost.last)
    cost = replace(cost, last=last)
    kinds = {
        (layers, routed, end): _rank(cost, extra, layers, routed, *_ends(cost, end)) for _, layers, routed, end in each
    }
    parts = [kinds[layers, routed, end] for _, layers, routed, end in each]
    beside = work.runtime.sends_beside(schedule) or pp == 1
    blocking = [(0.0, 0.0) if beside else blocked(schedule, ways, rank) for rank in range(pp)]
    forward = [part.forward.total + blocking[stage[0]][0] for part, stage in zip(parts, each)]
    inputs = [part.backward_input.total + blocking[stage[0]][1] for part, stage in zip(parts, each)]
    weights = [part.backward_weight.total for part in parts]
    held = [[i for i, stage in enumerate(each) if stage[0] == rank] for rank in range(pp)]
    busy = np.array([sum(forward[i] + inputs[i] + weights[i] for i in mine) for mine in held])
    most, every = busy.max(axis=0), busy.argmax(axis=0)
    if pp == 1:
        done = number * most
    else:
        latency = ways if beside else [0.0 * way for way in ways]
        done = number * most
        if schedule == "1f1b":
            done = _one_f_one_b(forward, [i + w for i, w in zip(inputs, weights)], latency, number)
        else:
            done = done + _waits(shape, (forward, inputs, weights), latency, number, most, kind)
    after = drained(done, waiting, [i + w for i, w in zip(inputs, weights)], pp) if pp > 1 else done
    layers = [sum(each[i][1] for i in mine) for mine in held]
    out: dict[str, Array] = {"pp bubble": np.maximum(0.0, after - number * most)}
    out["pp sends"] = 0.0 * number
    for rank in () if beside else np.unique(every):
        waits = number * chunks * sum(blocking[rank])
        out["pp sends"] = np.where(every == rank, waits, out["pp sends"])
    out["layers"] = np.full_like(most, max(layers))
    spent: dict[str, Array] = {}
    for rank in np.unique(every):
        mask = every == rank
        phase = Phase()
        for i in held[rank]:
            phase = phase + parts[i].forward + parts[i].backward
        back = sum(parts[i].backward.total for i in held[rank])
        for name, value in {**_parts(phase * number), "backward": back}.items():
            spent[name] = np.where(mask, value, spent.get(name, 0.0))
    return out | spent


def _parts(phase: Phase) -> dict[str, Array]:
    names = ("matmul", "attention", "pointwise", "compute", "tp", "cp", "ep", "shard")
    return {name: getattr(phase, name) for name in names}


def _ends(cost: Blocks, end: int) -> tuple[Cost, ...]:
    return ((cost.first,) if end & 1 else ()) + ((cost.last,) if end & 2 else ())


def _waits(
    shape: tuple[str, int, int],
    times: Sequence[list[Array]],
    latency: Sequence[Array],
    number: Array,
    most: Array,
    kind: Array,
) -> Array:
    """Seconds that the busiest rank waits in a step, of schedules for which no formula holds when stages differ.

    In units of its work for a micro-batch that hardly depends on how many there are, once there are some for each rank,
    nor on much else but how unlike the stages are. So the schedule is played for few points and read off between them.

    Args:
        kind: see `_pipeline`.
    """
    schedule, pp, chunks = shape
    forward, inputs, weights = (np.array(np.broadcast_arrays(*t)) for t in times)
    unlike = (forward[-1] + inputs[-1] + weights[-1]) / (forward[0] + inputs[0] + weights[0])
    out = np.zeros_like(most)
    enough = 4 * pp if pp <= FEW else 2 * pp
    kind = kind * 5 + np.minimum(number, enough) // pp
    for one in np.unique(kind):
        some = np.flatnonzero(kind == one)
        ends = sorted({int(some[np.argmin(unlike[some])]), int(some[np.argmax(unlike[some])])}, key=lambda i: unlike[i])
        ratios = []
        for i in ends:
            count = int(min(number[i], enough + number[i] % pp))
            f, b, w = (column[:, i].tolist() for column in (forward, inputs, weights))
            done = end(schedule, pp, chunks, count, f, b, w, [float(way[i]) for way in latency])
            ratios.append((done - count * most[i]) / most[i])
        out[some] = np.interp(unlike[some], unlike[ends], ratios) * most[some]
    return out


def _one_f_one_b(forward: list[Array], backward: list[Array], latency: Sequence[Array], number: Array) -> Array:
    """1F1B: a path goes down to a rank, stays there, and goes up; or, where that is longer, makes round trips to the
    last rank from there. Between a rank's forward and backward of one micro-batch there are as many others as ranks
    follow, fewer at the start and at the end."""
    pp = len(forward)
    below = 0.0 * number  # round trip from a rank to the last and back, its own work included
    end = below
    above = [0.0 * number]
    for f, b, way in zip(forward, backward, latency):
        above.append(above[-1] + f + b + 2 * way)
    for rank in reversed(range(pp)):
        f, b = forward[rank], backward[rank]
        below = below + f + b + (2 * latency[rank] if rank < pp - 1 else 0.0)
        follow = pp - rank
        stay = number * (f + b)
        once = below + np.maximum(number - follow, 0) * f + (number - 1) * b
        other = below + (number - 1) * f + np.maximum(number - follow, 0) * b
        trips = np.maximum((number - 1) // follow + 1, 1)
        often = np.where(trips > 1, trips * below + (number - 1 - (trips - 1) * follow) * (f + b), 0.0)
        twice = np.where(number > follow, 2 * below + (number - 1 - follow) * (f + b), 0.0)
        longest = np.maximum.reduce([stay, once, other, often, twice])
        end = np.maximum(end, above[rank] + longest)
    return end


def _rank(cost: Blocks, extra: tuple[Array, Array], layers: Array, routed: Array, *ends: Cost) -> Cost:
    """What layers and ends cost a rank for a micro-batch."""
    dense = layers - routed

    def of(name: str) -> Phase:
        out: Phase = getattr(cost.dense, name) * dense
        if cost.routed is not None:
            out = out + getattr(cost.routed, name) * routed
        for one in ends:
            out = out + getattr(one, name)
        return out

    forward, backward = of("forward"), of("backward_input")
    return Cost(
        forward.with_(shard=forward.shard + extra[0] * layers),
        backward.with_(shard=backward.shard + extra[1] * layers),
        of("backward_weight"),
    )
