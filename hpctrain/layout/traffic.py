"""Bytes that parallelism sends, before anything is sent. Plain arithmetic, to hold what a run's meter counts against.

Payload is what the meter counts: a collective's input on one rank. `wire` turns it into bytes that leave the rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from hpctrain.config.schema import RunConfig
from hpctrain.layout.activations import COMPUTE_BYTES
from hpctrain.layout.bus import factor
from hpctrain.layout.layout import Layout, split
from hpctrain.layout.parameters import parameter_specs, trained_specs
from hpctrain.layout.placement import DENSE, cut_of, place, placements, tied_copy
from hpctrain.layout.recompute import forwards
from hpctrain.layout.schedule import ZERO_BUBBLE
from hpctrain.layout.shards import padded, replicas_of
from hpctrain.layout.stages import Stage, shares_embedding, stages, stages_of

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
    """Bytes that leave a rank, at the least: what rings send, and rank to rank as much (`layout.bus`).

    Of an all-gather the payload is one part, and its size all of them.
    """
    size = payload * ranks if operation == "all_gather" else payload
    return size * factor(operation, ranks)


def tensor_traffic(config: RunConfig, layout: Layout, rank: int = 0) -> Traffic:
    """Payload of a rank over tp in one optimizer step, with or without sequence parallelism, by engine `none`.

    With A bytes of an activation [micro_batch, seq, hidden] a micro-batch sends, without sequence parallelism, for
    each layer 4 all-reduces of A; with it, 4 reduce-scatters of A and 6 all-gathers of A / tp, two of which bring
    back the inputs of column-parallel linears that were not kept; a schedule that leaves weights for later has 2 more
    for output gradients of row-parallel ones. Full recomputation runs forward again, of the layers that it is asked of,
    and that of MLPs their half.
    Embedding, head and loss are sent for by the ranks of a pipeline that hold them. Half of a layer's is that of its
    MLP; experts have none of it, and what `_of_routed_layer` says instead, and a shared MLP has it. What is not
    trained, beside adapters, needs no gradient, nor an input for one: `_untrained`.
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
    regions = _regions(config, stage)
    boundaries = len(regions)  # into a region and out of it again
    passed = sum(region.runs for region in regions)  # of these, forward
    first, last = int(stage.first), int(stage.last)
    sums = Payload()  # of gradients that arise in parts
    for spec in filter(stage.holds, trained_specs(model)):
        record, alone = place(spec, model, layout, rank), spec.in_parts or any(spec.cuts) or model.adapter is not None
        if record.partial_over and alone:  # norms of heads; key/value heads held twice; adapters
            sums += Payload(1, math.prod(record.local_shape) * wide)
    gathers = Payload(1, NUMBERS_OF_LOSS * tokens * wide) * last
    scatters = Payload()
    left = _untrained(config, layout, stage) if model.adapter is not None else _Untrained()
    if layout.sp:
        norm = 0 if model.adapter is not None else model.hidden * (2 if model.norm == "layernorm" else 1)
        sums += Payload(1, norm * wide) * (2 * len(stage.layers) + last) * (norm > 0)
        scatters += whole * (passed + boundaries + first + last + left.inputs)  # embedding forward, head backward
        inputs = passed + 2 * boundaries + first + 2 * last - left.columns + left.dropped
        gathers += part * inputs
        if layout.schedule in ZERO_BUBBLE:
            gathers += part * (
                boundaries - left.rows
            )  # output gradients once more, for weights of row-parallel linears
        if model.position == "learned" and model.adapter is None:
            gathers += Payload(1, seq * model.hidden * width // layout.tp) * first
    else:
        sums += whole * (passed + boundaries + first + last + left.inputs)
    sums += Payload(1, model.hidden * wide) * left.norms
    for layer in filter(model.routed, stage.layers):
        times = forwards(train, stage.layers, ("moe",))[layer]
        of_layer = _of_routed_layer(config, layout, layout.coordinates(rank)["tp"], times)
        sums, gathers = sums + of_layer[0], gathers + of_layer[1]
    return {"all_reduce": sums, "all_gather": gathers, "reduce_scatter": scatters}


class _Region(NamedTuple):
    """A stretch of a layer between a column-parallel and a row-parallel linear, and how often it runs forward."""

    layer: int
    mlp: bool
    runs: int


def _regions(config: RunConfig, stage: Stage) -> list[_Region]:
    """Of a stage's layers in order: attention's, and that of the MLP or the shared MLP."""
    model, moe = config.model, config.model.moe
    of_layer = forwards(config.train, stage.layers)
    of_mlp = {
        False: forwards(config.train, stage.layers, ("mlp",)),
        True: forwards(config.train, stage.layers, ("moe", "shared_experts")),
    }
    out = []
    for i in stage.layers:
        out.append(_Region(i, False, of_layer[i]))
        if not model.routed(i) or (moe is not None and moe.shared_ffn):
            out.append(_Region(i, True, of_mlp[model.routed(i)][i]))
    return out


@dataclass(frozen=True)
class _Untrained:
    """What a virtual stage with adapters sends otherwise than one that is trained whole, for one micro-batch.

    Attributes:
        inputs: sums of inputs' gradients, more than one a boundary: adapters behind dropout have an input of their own,
            and before the first layer nothing is trained.
        columns: gathers of inputs, and of the embedding's gradient, for weights that are not trained.
        rows: row-parallel linears without an adapter.
        dropped: boundaries at which adapters have an input of their own, as often as they are passed forward.
        norms: row-parallel linears whose rows' norms are summed, as often as these run forward.
    """

    inputs: int = 0
    columns: int = 0
    rows: int = 0
    dropped: int = 0
    norms: int = 0


def _untrained(config: RunConfig, layout: Layout, stage: Stage) -> _Untrained:
    model, adapter = config.model, config.model.adapter
    assert adapter is not None

    def fan(mlp: bool) -> tuple[tuple[str, ...], str]:
        """The linears of one input, and the one out again, of a region."""
        return (("gate", "up") if model.gated else ("up",), "down") if mlp else (("q", "k", "v"), "output")

    fans = [(*fan(region.mlp), region.runs) for region in _regions(config, stage)]
    each = [(any(map(adapter.adapts, into)), adapter.adapts(out), runs) for into, out, runs in fans]
    columns, rows = sum(into for into, *_ in each), sum(out for _, out, _ in each)
    nothing = (1 + (adapter.dropout > 0 and each[0][0])) if stage.first and each else 0
    return _Untrained(
        inputs=(columns if adapter.dropout else 0) - nothing,
        columns=len(each) - columns + stage.first + stage.last,
        rows=len(each) - rows,
        dropped=sum(into * times for into, _, times in each) if adapter.dropout else 0,
        norms=sum(out * times for _, out, times in each) if adapter.kind == "dora" else 0,
    )


def _of_routed_layer(config: RunConfig, layout: Layout, index: int, times: int) -> tuple[Payload, Payload]:
    """All-reduces and all-gathers over tp of the experts of a layer and their router, for one micro-batch that goes
    forward so often, by the rank of an index on tp.

    Ranks with the same tokens send a share each to the experts: their outputs are gathered, and in backward the
    gradients of inputs and of weights. With sequence parallelism a router sums its counts of each sample and its
    weight's gradient, and with a capacity gathers the choices.
    """
    model, moe, train = config.model, config.model.moe, config.train
    assert moe is not None
    width = COMPUTE_BYTES[train.precision]
    wide, share = max(width, 4), split(train.micro_batch * config.data.seq // layout.cp, layout.tp, index)[1]
    if not layout.sp:
        rows = Payload(1, share * model.hidden * width)
        return Payload(), rows * (times + 1) + Payload(1, share * moe.top_k * wide)
    counts = Payload(1, train.micro_batch * (3 * moe.experts + 3) * wide)
    choices = Payload(1, share * moe.top_k * 8) * (moe.capacity is not None)
    weight = Payload(1, moe.experts * model.hidden * wide) * (model.adapter is None)
    return counts * times + weight, choices * times


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
    held = stages_of(model, layout, rank)
    runs = [times for stage in held for i, times in forwards(train, stage.layers, ("moe",)).items() if model.routed(i)]
    if moe is None or not runs:
        return {}
    forward, both = sum(runs), sum(runs) + len(runs)  # passes of a micro-batch
    tokens = train.micro_batch * config.data.seq // layout.cp
    padded = moe.capacity is not None and moe.overflow == "pad"
    sent = tokens * moe.top_k / layout.tp
    if padded:
        sent = moe.experts * min(train.micro_batch * moe.room(config.data.seq), split(tokens, layout.tp, 0)[1])
    rows = Payload(1, round(sent * model.hidden * COMPUTE_BYTES[train.precision]))
    counts = Payload() if padded else Payload(1, 8 * moe.experts) * forward
    out: dict[str, Traffic] = {}
    if layout.ep > 1:
        out["ep"] = {"all_to_all": counts + rows * 2 * both}
    if layout.etp > 1:
        summed = Payload(1, layout.etp * rows.bytes)
        out["etp"] = {"all_gather": counts + rows * both, "reduce_scatter": summed * both}
    rounds = train.global_batch // (layout.dp * train.micro_batch)
    return {axis: {op: payload * rounds for op, payload in traffic.items()} for axis, traffic in out.items()}


def data_bytes(config: RunConfig, layout: Layout, rank: int = 0, over: tuple[str, ...] = DENSE) -> dict[str, int]:
    """Payload of a rank over dp x cp, or over edp, in one optimizer step, by operation, but for some bytes of norms and
    flags.

    With N elements of parameters on the rank, in the width m of gradients (float32 or wider) and w of the weights:
    engine `none` all-reduces N m once. ZeRO 1 does so too and gathers its part of N w; ZeRO 2 all-reduces for every
    micro-batch; ZeRO 3 reduce-scatters N m for every micro-batch and gathers its part of the matrices twice, once if
    weights are kept for backward, and of the vectors once a step. Prefetching may keep some matrices for backward that
    would be let go: then less. The parts are padded (`sharding/deepspeed/traffic.py` says what DeepSpeed sends when).
    Of `fsdp`, `_fsdp_bytes` says it.

    Experts are reduced over edp; by DeepSpeed over dp x cp with all else, where those are the same ranks. N is that of
    what is trained; but ZeRO 3 gathers all weights, if they are not in 4 bits.
    """
    if config.engine == "fsdp":
        return _fsdp_bytes(config, layout, rank, over)
    ranks = math.prod(layout.sizes(over))
    together = config.engine == "deepspeed" and layout.ep * layout.etp == layout.tp
    width = COMPUTE_BYTES[config.train.precision]
    wide, rounds = max(width, 4), config.train.global_batch // (layout.dp * config.train.micro_batch)
    specs = {spec.name: spec for spec in parameter_specs(config.model) if spec.block is None}
    records = {n: r for n, r in placements(config.model, layout, rank).items() if n in specs}
    decays = {name: spec.decay for name, spec in specs.items()}
    chosen = {n: r for n, r in records.items() if (DENSE if together else r.reduced_over) == over}
    every = {name: math.prod(record.local_shape) for name, record in chosen.items()}
    sizes = {name: size for name, size in every.items() if specs[name].trained}
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
        decay: sum(-(-n // ranks) for name, n in every.items() if decays[name] == decay) for decay in (True, False)
    }
    times = rounds * (2 if config.sharding.reshard_after_forward else 1)
    return {
        "reduce_scatter": sum(-(-n // ranks) for n in sizes.values()) * ranks * wide * rounds,
        "all_gather": (parts[True] * times + parts[False]) * width,
    }


def _fsdp_bytes(config: RunConfig, layout: Layout, rank: int, over: tuple[str, ...]) -> dict[str, int]:
    """`data_bytes` of engine `fsdp`, over the ranks that have the parts of one copy of the state.

    Each rank sends its part of the layers for every forward and again for every backward, and of embedding, final norm
    and head for every forward: their backward needs no values, or comes next. If weights are kept, it sends its part of
    all once a step. An embedding whose copy is the head of another stage is gathered once more. Gradients of all are
    reduce-scattered for every micro-batch, or once a step. Parts are padded (`layout/shards.py`).
    """
    sharding, train = config.sharding, config.train
    total = math.prod(layout.sizes(over))
    ranks = total // replicas_of(sharding.replicas, total)
    records = [r for r in placements(config.model, layout, rank).values() if r.reduced_over == over]
    if ranks == 1 or not records:
        return {}
    rounds = train.global_batch // (layout.dp * train.micro_batch)
    layers = {spec.name for spec in parameter_specs(config.model) if spec.layer is not None}
    sizes = {record.name: padded(record.local_shape, ranks) for record in records}
    gathered = 0
    for name, size in sizes.items():
        times = 1 if not sharding.reshard_after_forward else rounds * (2 if name in layers else 1)
        times += name == "embedding.weight" and shares_embedding(config.model, layout)
        gathered += size // ranks * times
    reductions = 1 if sharding.reduce_every == "step" else rounds
    return {
        "reduce_scatter": sum(sizes.values()) * _reduce_width(config) * reductions,
        "all_gather": gathered * COMPUTE_BYTES[train.precision],
    }


def replica_bytes(config: RunConfig, layout: Layout, rank: int = 0, over: tuple[str, ...] = DENSE) -> int:
    """Payload of a rank in one optimizer step in the all-reduces of gradients over the replicas of state that engine
    `fsdp` shards: its part of all gradients, once."""
    total = math.prod(layout.sizes(over))
    replicas = replicas_of(config.sharding.replicas, total)
    if replicas == 1:
        return 0
    records = (r for r in placements(config.model, layout, rank).values() if r.reduced_over == over)
    parts = sum(padded(r.local_shape, total // replicas) // (total // replicas) for r in records)
    return parts * _reduce_width(config)


def _reduce_width(config: RunConfig) -> int:
    """Bytes of an element of a gradient that engine `fsdp` reduces."""
    compute = COMPUTE_BYTES[config.train.precision]
    return max(compute, COMPUTE_BYTES[config.sharding.reduce_dtype])


def context_traffic(config: RunConfig, layout: Layout, rank: int = 0) -> Traffic:
    """Payload of a rank over cp in one optimizer step, for the layers that it holds, by engine `none`.

    With K and Q bytes of the keys and of the queries of a micro-batch that a rank holds of one layer: a ring sends
    2K (keys and values) cp - 1 times forward, and again backward, and as often their gradients in float32 or wider.
    Ulysses trades Q + 2K and then Q (the output) forward, and the same backward. Attention that is computed again,
    alone or with its layer, runs forward again. Routers sum their counts of each sample, and with a capacity gather the
    choices.
    """
    model, train, held = config.model, config.train, stages_of(config.model, layout, rank)
    scored = [times for stage in held for times in forwards(train, stage.layers, ("core_attn",)).values()]
    if layout.cp == 1 or not scored:
        return {}
    rounds = train.global_batch // (layout.dp * train.micro_batch)
    routed = [n for stage in held for i, n in forwards(train, stage.layers, ("moe",)).items() if model.routed(i)]
    attention = _of_attention(config, layout, sum(scored) * rounds, len(scored) * rounds)
    return attention | _of_routers(config, layout, sum(routed) * rounds)


def _of_routers(config: RunConfig, layout: Layout, times: int) -> Traffic:
    """What a router sends over cp when a micro-batch goes forward, so many times."""
    moe, train = config.model.moe, config.train
    if moe is None or not times:
        return {}
    wide, tokens = max(COMPUTE_BYTES[train.precision], 4), train.micro_batch * config.data.seq // layout.cp
    out = {"all_reduce": Payload(1, train.micro_batch * (3 * moe.experts + 3) * wide) * times}
    return out | ({"all_gather": Payload(1, tokens * moe.top_k * 8) * times} if moe.capacity else {})


def _of_attention(config: RunConfig, layout: Layout, forward: int, backward: int) -> Traffic:
    """What a layer's attention sends over cp when a micro-batch goes forward and backward, so many times each."""
    model, train = config.model, config.train
    width = COMPUTE_BYTES[train.precision]
    heads, kv = (cut_of(model, cut, layout.tp, 0)[1] for cut in ("heads", "kv_heads"))
    held = train.micro_batch * config.data.seq // layout.cp * model.head_width  # elements of a head
    if config.parallel.cp_method == "ring":
        keys, gradients = Payload(1, 2 * kv * held * width), Payload(1, 2 * kv * held * max(width, 4))
        return {"send": (keys * (forward + backward) + gradients * backward) * (layout.cp - 1)}
    repeated = math.lcm(kv, layout.cp)
    there, back = Payload(1, (heads + 2 * repeated) * held * width), Payload(1, heads * held * width)
    return {"all_to_all": (there + back) * (forward + backward)}


def pipeline_bytes(config: RunConfig, layout: Layout, rank: int) -> int:
    """Sent over pp in one optimizer step, to whichever stage."""
    return sum(pipeline_sends(config, layout, rank).values())


def pipeline_sends(config: RunConfig, layout: Layout, rank: int) -> dict[int, int]:
    """Bytes sent over pp in one optimizer step, by the pp index of who gets them: hidden states to the stage after,
    their gradients to the stage before, where that is another rank.

    With m micro-batches of b samples of s tokens, each of n such boundaries costs m b s hidden elements in the
    precision of the computation, divided by cp, and by tp where the sequence is sharded over it. A tied embedding adds
    its weight once on the first stage, and on the last its gradient in the precision of accumulation.
    """
    homes = {stage.index: stage.home for stage in stages(config.model, layout)}
    mine = stages_of(config.model, layout, rank)
    tokens = config.train.global_batch // layout.dp * config.data.seq // layout.cp // (layout.tp if layout.sp else 1)
    width = COMPUTE_BYTES[config.train.precision]
    sent: dict[int, int] = {}
    for home in (homes[i] for stage in mine for i in (stage.index - 1, stage.index + 1) if i in homes):
        if home != mine[0].home:
            sent[home] = sent.get(home, 0) + tokens * config.model.hidden * width
    trained = config.model.adapter is None
    copy, ends = tied_copy(config.model, layout, rank), (homes[0], homes[len(homes) - 1])
    if copy is not None and ends[0] != ends[1] and mine[0].home in ends:
        other = ends[mine[0].home == ends[0]]
        each = width if mine[0].first else max(width, 4) * trained
        sent[other] = sent.get(other, 0) + math.prod(copy.local_shape) * each
    return sent
