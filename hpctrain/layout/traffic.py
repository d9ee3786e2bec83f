"""Bytes that parallelism sends, before anything is sent. Plain arithmetic, to hold what a run's meter counts against.

Payload is what the meter counts: a collective's input on one rank. `wire` turns it into bytes that leave the rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hpctrain.config.schema import RunConfig
from hpctrain.layout.layout import Layout, split
from hpctrain.layout.memory import COMPUTE_BYTES
from hpctrain.layout.parameters import parameter_specs
from hpctrain.layout.placement import DENSE, cut_of, place, placements, tied_copy
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
            "all_to_all": (ranks - 1) / ranks,
            "send": 1,
        }[operation]
    )


def tensor_traffic(config: RunConfig, layout: Layout, rank: int = 0) -> Traffic:
    """Payload of a rank over tp in one optimizer step, with or without sequence parallelism, by engine `none`.

    With A bytes of an activation [micro_batch, seq, hidden] a micro-batch sends, without sequence parallelism, for
    each layer 4 all-reduces of A; with it, 4 reduce-scatters of A and 6 all-gathers of A / tp, two of which bring
    back the inputs of column-parallel linears that were not kept. Full recomputation runs a layer's forward again.
    Embedding, head and loss are sent for by the ranks of a pipeline that hold them. Half of a layer's is that of its
    MLP; experts have none of it, and what `_of_routed_layer` says instead, and a shared MLP has it.
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
    seq = config.data.seq // layout.cp
    tokens = train.micro_batch * seq
    whole = Payload(1, tokens * model.hidden * width)
    part = Payload(1, tokens * model.hidden * width // layout.tp)
    forwards = 2 if train.recompute == "full" else 1
    routed = [layer for layer in stage.layers if model.routed(layer)]
    mlps = len(stage.layers) - (0 if model.moe and model.moe.shared_ffn else len(routed))
    boundaries = len(stage.layers) + mlps  # into a region and out of it again: attention, MLP
    first, last = int(stage.first), int(stage.last)
    sums = Payload()  # of gradients that arise in parts
    for spec in filter(stage.holds, parameter_specs(model)):
        record = place(spec, model, layout, rank)
        if record.partial_over and (spec.by_head or any(spec.cuts)):  # norms of heads; key/value heads held twice
            sums += Payload(1, math.prod(record.local_shape) * wide)
    gathers = Payload(1, NUMBERS_OF_LOSS * tokens * wide) * last
    scatters = Payload()
    if layout.sp:
        norm = model.hidden * (2 if model.norm == "layernorm" else 1)
        sums += Payload(1, norm * wide) * (2 * len(stage.layers) + last)
        scatters += whole * (boundaries * (forwards + 1) + first + last)  # embedding forward, head backward
        gathers += part * (boundaries * (forwards + 2) + first + 2 * last)  # embedding backward, head both ways
        if model.position == "learned":
            gathers += Payload(1, seq * model.hidden * width // layout.tp) * first
    else:
        sums += whole * (boundaries * (forwards + 1) + first + last)
    if routed:
        of_layer = _of_routed_layer(config, layout, layout.coordinates(rank)["tp"])
        sums, gathers = sums + of_layer[0] * len(routed), gathers + of_layer[1] * len(routed)
    return {"all_reduce": sums, "all_gather": gathers, "reduce_scatter": scatters}


def _of_routed_layer(config: RunConfig, layout: Layout, index: int) -> tuple[Payload, Payload]:
    """All-reduces and all-gathers over tp of the experts of a layer and their router, for one micro-batch, by the rank
    of an index on tp.

    Ranks with the same tokens send a share each to the experts: their outputs are gathered, and in backward the
    gradients of inputs and of weights. With sequence parallelism a router sums its counts of each sample and its
    weight's gradient, and with a capacity gathers the choices.
    """
    model, moe, train = config.model, config.model.moe, config.train
    assert moe is not None
    width, forwards = COMPUTE_BYTES[train.precision], 2 if train.recompute == "full" else 1
    wide, share = max(width, 4), split(train.micro_batch * config.data.seq // layout.cp, layout.tp, index)[1]
    if not layout.sp:
        rows = Payload(1, share * model.hidden * width)
        return Payload(), rows * (forwards + 1) + Payload(1, share * moe.top_k * wide)
    counts = Payload(1, train.micro_batch * (3 * moe.experts + 3) * wide)
    choices = Payload(1, share * moe.top_k * 8) * (moe.capacity is not None)
    return counts * forwards + Payload(1, moe.experts * model.hidden * wide), choices * forwards


def expert_traffic(config: RunConfig, layout: Layout, rank: int = 0) -> dict[str, Traffic]:
    """Payload over ep and over etp in one optimizer step, by axis, by engine `none`: the mean over the ranks of a
    stage, as which of them has how much depends on where tokens go. With a capacity that drops it is the most there can
    be.

    With R bytes of rows, `micro_batch x seq / (cp tp) x top_k x hidden` (with a capacity that pads, what it is padded
    to), a layer with experts sends for each micro-batch over ep an all-to-all of R to the experts and one back, and as
    much in backward; over etp it gathers R and reduce-scatters etp R on the way, and as much in backward. Before, ranks
    tell each other how many rows go where: 8 bytes an expert, unless they are padded.
    """
    model, moe, train = config.model, config.model.moe, config.train
    number = sum(model.routed(layer) for stage in stages_of(model, layout, rank) for layer in stage.layers)
    if moe is None or not number:
        return {}
    forwards = 2 if train.recompute == "full" else 1
    tokens = train.micro_batch * config.data.seq // layout.cp
    padded = moe.capacity is not None and moe.overflow == "pad"
    sent = tokens * moe.top_k / layout.tp
    if padded:
        sent = moe.experts * min(train.micro_batch * moe.room(config.data.seq), split(tokens, layout.tp, 0)[1])
    rows = Payload(1, round(sent * model.hidden * COMPUTE_BYTES[train.precision]))
    counts = Payload() if padded else Payload(1, 8 * moe.experts) * forwards
    out: dict[str, Traffic] = {}
    if layout.ep > 1:
        out["ep"] = {"all_to_all": counts + rows * 2 * (forwards + 1)}
    if layout.etp > 1:
        summed = Payload(1, layout.etp * rows.bytes)
        out["etp"] = {"all_gather": counts + rows * (forwards + 1), "reduce_scatter": summed * (forwards + 1)}
    rounds = number * (train.global_batch // (layout.dp * train.micro_batch))
    return {axis: {op: payload * rounds for op, payload in traffic.items()} for axis, traffic in out.items()}


def data_bytes(config: RunConfig, layout: Layout, rank: int = 0, over: tuple[str, ...] = DENSE) -> dict[str, int]:
    """Payload of a rank over dp x cp, or over edp, in one optimizer step, by operation, but for some bytes of norms and
    flags.

    With N elements of parameters on the rank, in the width m of gradients (float32 or wider) and w of the weights:
    engine `none` all-reduces N m once. ZeRO 1 does so too and gathers its part of N w; ZeRO 2 all-reduces for every
    micro-batch; ZeRO 3 reduce-scatters N m for every micro-batch and gathers its part of the matrices twice, once if
    weights are kept for backward, and of the vectors once a step. Prefetching may keep some matrices for backward that
    would be let go: then less. The parts are padded (`sharding/deepspeed/traffic.py` says what DeepSpeed sends when).

    Experts are reduced over edp; by DeepSpeed over dp x cp with all else, where those are the same ranks.
    """
    ranks = math.prod(layout.sizes(over))
    together = config.engine == "deepspeed" and layout.ep * layout.etp == layout.tp
    width = COMPUTE_BYTES[config.train.precision]
    wide, rounds = max(width, 4), config.train.global_batch // (layout.dp * config.train.micro_batch)
    records, decays = placements(config.model, layout, rank), {s.name: s.decay for s in parameter_specs(config.model)}
    chosen = {n: r for n, r in records.items() if (DENSE if together else r.reduced_over) == over}
    sizes = {name: math.prod(record.local_shape) for name, record in chosen.items()}
    if ranks == 1 or not sizes:
        return {}
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


def context_traffic(config: RunConfig, layout: Layout) -> Traffic:
    """Payload of a rank over cp in one optimizer step without a pipeline, by engine `none`.

    With K and Q bytes of the keys and of the queries of a micro-batch that a rank holds of one layer: a ring sends
    2K (keys and values) cp - 1 times forward, and again backward, and as often their gradients in float32 or wider.
    Ulysses trades Q + 2K and then Q (the output) forward, and the same backward. Recomputation of either kind runs
    forward again. Routers sum their counts of each sample, and with a capacity gather the choices.
    """
    assert layout.pp == 1, layout
    if layout.cp == 1:
        return {}
    return _of_attention(config, layout) | _of_routers(config, layout)


def _of_routers(config: RunConfig, layout: Layout) -> Traffic:
    """What routers send over cp."""
    model, moe, train = config.model, config.model.moe, config.train
    number = sum(map(model.routed, range(model.layers)))
    if moe is None or not number:
        return {}
    times = number * (2 if train.recompute == "full" else 1) * (train.global_batch // (layout.dp * train.micro_batch))
    wide, tokens = max(COMPUTE_BYTES[train.precision], 4), train.micro_batch * config.data.seq // layout.cp
    out = {"all_reduce": Payload(1, train.micro_batch * (3 * moe.experts + 3) * wide) * times}
    return out | ({"all_gather": Payload(1, tokens * moe.top_k * 8) * times} if moe.capacity else {})


def _of_attention(config: RunConfig, layout: Layout) -> Traffic:
    """What attention sends over cp."""
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
