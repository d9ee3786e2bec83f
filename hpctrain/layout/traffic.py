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
from hpctrain.layout.placement import cut_of, place, tied_copy
from hpctrain.layout.stages import stages, stages_of

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
            "all_to_all": (ranks - 1) / ranks,
            "send": 1,
        }[operation]
    )


def tensor_traffic(config: RunConfig, layout: Layout) -> Traffic:
    """Payload of a rank over tp in one optimizer step without a pipeline, with or without sequence parallelism, by
    engine `none`.

    With A bytes of an activation [micro_batch, seq, hidden] a micro-batch sends, without sequence parallelism, for
    each layer 4 all-reduces of A; with it, 4 reduce-scatters of A and 6 all-gathers of A / tp, two of which bring
    back the inputs of column-parallel linears that were not kept. Full recomputation runs a layer's forward again.
    """
    assert layout.pp == 1, layout
    if layout.tp == 1:
        return {}
    model, train = config.model, config.train
    width = COMPUTE_BYTES[train.precision]
    wide = max(width, 4)
    seq = config.data.seq // layout.cp
    tokens = train.micro_batch * seq
    whole = Payload(1, tokens * model.hidden * width)
    part = Payload(1, tokens * model.hidden * width // layout.tp)
    forwards = 2 if train.recompute == "full" else 1
    boundaries = 2 * model.layers  # into a region and out of it again: attention, MLP
    sums = Payload()  # of gradients that arise in parts
    for spec in parameter_specs(model):
        record = place(spec, model, layout, 0)
        if record.partial_over and any(spec.cuts):  # key/value heads that several ranks hold
            sums += Payload(1, math.prod(record.local_shape) * wide)
    gathers = Payload(1, NUMBERS_OF_LOSS * tokens * wide)
    scatters = Payload()
    if layout.sp:
        norm = model.hidden * (2 if model.norm == "layernorm" else 1)
        sums += Payload(1, norm * wide) * (boundaries + 1)
        scatters += whole * (boundaries * (forwards + 1) + 2)  # embedding forward, head backward
        gathers += part * (boundaries * (forwards + 2) + 3)  # head forward and twice backward: embedding, input kept
        if model.position == "learned":
            gathers += Payload(1, seq * model.hidden * width // layout.tp)
    else:
        sums += whole * (boundaries * (forwards + 1) + 2)
    rounds = train.global_batch // (layout.dp * train.micro_batch)
    found = {"all_reduce": sums, "all_gather": gathers, "reduce_scatter": scatters}
    return {operation: payload * rounds for operation, payload in found.items() if payload.calls}


def context_traffic(config: RunConfig, layout: Layout) -> Traffic:
    """Payload of a rank over cp in one optimizer step without a pipeline, by engine `none`.

    With K and Q bytes of the keys and of the queries of a micro-batch that a rank holds of one layer: a ring sends
    2K (keys and values) cp - 1 times forward, and again backward, and as often their gradients in float32 or wider.
    Ulysses trades Q + 2K and then Q (the output) forward, and the same backward. Recomputation of either kind runs
    forward again.
    """
    assert layout.pp == 1, layout
    if layout.cp == 1:
        return {}
    model, train = config.model, config.train
    width = COMPUTE_BYTES[train.precision]
    heads, kv = (cut_of(model, cut, layout.tp, 0)[1] for cut in ("heads", "kv_heads"))
    forwards = 1 if train.recompute == "none" else 2
    held = train.micro_batch * config.data.seq // layout.cp * model.head_width  # elements of a head
    rounds = model.layers * train.global_batch // (layout.dp * train.micro_batch)
    if config.parallel.cp_method == "ring":
        keys, gradients = Payload(1, 2 * kv * held * width), Payload(1, 2 * kv * held * max(width, 4))
        return {"send": (keys * (forwards + 1) + gradients) * ((layout.cp - 1) * rounds)}
    repeated = math.lcm(kv, layout.cp)
    there, back = Payload(1, (heads + 2 * repeated) * held * width), Payload(1, heads * held * width)
    return {"all_to_all": (there + back) * ((forwards + 1) * rounds)}


def pipeline_bytes(config: RunConfig, layout: Layout, rank: int) -> int:
    """Sent over pp: hidden states to the stage after, their gradients to the stage before, where that is another rank.

    With m micro-batches of b samples of s tokens, each of n such boundaries costs m b s hidden elements in the
    precision of the computation, divided by cp, and by tp where the sequence is sharded over it. A tied embedding adds
    its weight once on the first stage, and as much for its gradient on the last.
    """
    homes = {stage.index: stage.home for stage in stages(config.model, layout)}
    mine = stages_of(config.model, layout, rank)
    neighbours = [homes[i] for stage in mine for i in (stage.index - 1, stage.index + 1) if i in homes]
    boundaries = sum(home != mine[0].home for home in neighbours)
    tokens = config.train.global_batch // layout.dp * config.data.seq // layout.cp // (layout.tp if layout.sp else 1)
    sent = boundaries * tokens * config.model.hidden
    copy, ends = tied_copy(config.model, layout, rank), (homes[0], homes[len(homes) - 1])
    if copy is not None and ends[0] != ends[1] and mine[0].home in ends:
        sent += math.prod(copy.local_shape)
    return sent * COMPUTE_BYTES[config.train.precision]
