"""Bytes that parallelism sends, before anything is sent. Plain arithmetic, to hold what a run's meter counts against.

Payload is what the meter counts: a collective's input on one rank. `wire` turns it into bytes that leave the rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hpctrain.config.schema import RunConfig
from hpctrain.layout.layout import Layout
from hpctrain.layout.memory import COMPUTE_BYTES
from hpctrain.layout.parameters import parameter_specs
from hpctrain.layout.placement import place, placements, tied_copy
from hpctrain.layout.schedule import ZERO_BUBBLE
from hpctrain.layout.stages import Stage, stages, stages_of

NUMBERS_OF_LOSS = 4
"""What vocabulary-parallel cross-entropy gathers of each token: maximum, sum of exponentials, target, sum of logits."""


@dataclass(frozen=True)
class Payload:
    """Collectives of one kind: how many, and bytes put into them by one rank."""

    calls: int = 0
    bytes: int = 0

    def __add__(self, other: Payload) -> Payload:
        return Payload(self.calls + other.calls, self.bytes + other.bytes)

    def __mul__(self, times: int) -> Payload:
        return Payload(self.calls * times, self.bytes * times)


Traffic = dict[str, Payload]
"""By operation."""


def wire(operation: str, payload: int, ranks: int) -> float:
    """Bytes that leave a rank, at the least: what rings send, and rank to rank as much.

    An all-reduce is a reduce-scatter and an all-gather of a part (Thakur et al., 2005, doi 10.1177/1094342005051521).
    """
    return (
        payload
        * {
            "all_reduce": 2 * (ranks - 1) / ranks,
            "all_gather": ranks - 1,
            "reduce_scatter": (ranks - 1) / ranks,
        }[operation]
    )


def tensor_traffic(config: RunConfig, layout: Layout, rank: int = 0) -> Traffic:
    """Payload of a rank over tp in one optimizer step, with or without sequence parallelism, by engine `none`.

    With A bytes of an activation [micro_batch, seq, hidden] a micro-batch sends, without sequence parallelism, for
    each layer 4 all-reduces of A; with it, 4 reduce-scatters of A and 6 all-gathers of A / tp, two of which bring
    back the inputs of column-parallel linears that were not kept; a schedule that leaves weights for later has 2 more
    for output gradients of row-parallel ones. Full recomputation runs a layer's forward again.
    Embedding, head and loss are sent for by the ranks of a pipeline that hold them.
    """
    if layout.tp == 1:
        return {}
    total: Traffic = {}
    for stage in stages_of(config.model, layout, rank):
        for operation, payload in _of_stage(config, layout, rank, stage).items():
            total[operation] = total.get(operation, Payload()) + payload
    rounds = config.train.global_batch // (layout.dp * config.train.micro_batch)
    return {operation: payload * rounds for operation, payload in total.items() if payload.calls}


def _of_stage(config: RunConfig, layout: Layout, rank: int, stage: Stage) -> Traffic:
    """What a virtual stage sends over tp for one micro-batch."""
    model, train = config.model, config.train
    width = COMPUTE_BYTES[train.precision]
    wide = max(width, 4)
    tokens = train.micro_batch * config.data.seq
    whole = Payload(1, tokens * model.hidden * width)
    part = Payload(1, tokens * model.hidden * width // layout.tp)
    forwards = 2 if train.recompute == "full" else 1
    boundaries = 2 * len(stage.layers)  # into a region and out of it again: attention, MLP
    first, last = int(stage.first), int(stage.last)
    sums = Payload()  # of gradients that arise in parts
    for spec in filter(stage.holds, parameter_specs(model)):
        record = place(spec, model, layout, rank)
        if record.partial_over and any(spec.cuts):  # key/value heads that several ranks hold
            sums += Payload(1, math.prod(record.local_shape) * wide)
    gathers = Payload(1, NUMBERS_OF_LOSS * tokens * wide) * last
    scatters = Payload()
    if layout.sp:
        norm = model.hidden * (2 if model.norm == "layernorm" else 1)
        sums += Payload(1, norm * wide) * (boundaries + last)
        scatters += whole * (boundaries * (forwards + 1) + first + last)  # embedding forward, head backward
        gathers += part * (boundaries * (forwards + 2) + first + 2 * last)  # embedding backward, head both ways
        if layout.schedule in ZERO_BUBBLE:
            gathers += part * boundaries  # output gradients once more, for weights of row-parallel linears
        if model.position == "learned":
            gathers += Payload(1, config.data.seq * model.hidden * width // layout.tp) * first
    else:
        sums += whole * (boundaries * (forwards + 1) + first + last)
    return {"all_reduce": sums, "all_gather": gathers, "reduce_scatter": scatters}


def data_bytes(config: RunConfig, layout: Layout, rank: int = 0) -> dict[str, int]:
    """Payload of a rank over dp x cp in one optimizer step, by operation, but for some bytes of norms and flags.

    With N elements of parameters on the rank, in the width m of gradients (float32 or wider) and w of the weights:
    engine `none` all-reduces N m once. ZeRO 1 does so too and gathers its part of N w; ZeRO 2 all-reduces for every
    micro-batch; ZeRO 3 reduce-scatters N m for every micro-batch and gathers its part of the matrices twice, once if
    weights are kept for backward, and of the vectors once a step. Prefetching may keep some matrices for backward that
    would be let go: then less. The parts are padded (`sharding/deepspeed/traffic.py` says what DeepSpeed sends when).
    """
    ranks = layout.dp * layout.cp
    if ranks == 1:
        return {}
    width = COMPUTE_BYTES[config.train.precision]
    wide, rounds = max(width, 4), config.train.global_batch // (layout.dp * config.train.micro_batch)
    records, decays = placements(config.model, layout, rank), {s.name: s.decay for s in parameter_specs(config.model)}
    sizes = {name: math.prod(record.local_shape) for name, record in records.items()}
    stage, total = config.sharding.stage, sum(sizes.values())
    if stage == 0:
        return {"all_reduce": total * wide}
    if stage < 3:
        groups = [sum(n for name, n in sizes.items() if decays[name] == decay) for decay in (True, False)]
        gathered = sum(-(-size // (2 * ranks)) * 2 for size in groups)
        return {"all_reduce": total * wide * (rounds if stage == 2 else 1), "all_gather": gathered * width}
    parts = {
        decay: sum(-(-n // ranks) for name, n in sizes.items() if decays[name] == decay) for decay in (True, False)
    }
    times = rounds * (2 if config.sharding.reshard_after_forward else 1)
    return {
        "reduce_scatter": sum(parts.values()) * ranks * wide * rounds,
        "all_gather": (parts[True] * times + parts[False]) * width,
    }


def pipeline_bytes(config: RunConfig, layout: Layout, rank: int) -> int:
    """Sent over pp: hidden states to the stage after, their gradients to the stage before, where that is another rank.

    With m micro-batches of b samples of s tokens, each of n such boundaries costs m b s hidden elements in the
    precision of the computation, divided by tp where the sequence is sharded over it. A tied embedding adds its
    weight once on the first stage, and on the last its gradient in the precision of accumulation.
    """
    homes = {stage.index: stage.home for stage in stages(config.model, layout)}
    mine = stages_of(config.model, layout, rank)
    neighbours = [homes[i] for stage in mine for i in (stage.index - 1, stage.index + 1) if i in homes]
    boundaries = sum(home != mine[0].home for home in neighbours)
    tokens = config.train.global_batch // layout.dp * config.data.seq // (layout.tp if layout.sp else 1)
    width = COMPUTE_BYTES[config.train.precision]
    sent = boundaries * tokens * config.model.hidden * width
    copy, ends = tied_copy(config.model, layout, rank), (homes[0], homes[len(homes) - 1])
    if copy is not None and ends[0] != ends[1] and mine[0].home in ends:
        sent += math.prod(copy.local_shape) * (width if mine[0].first else max(width, 4))
    return sent
