"""Bytes of activations of one micro-batch, on a rank. Plain arithmetic; `layout/memory.py` says what is counted."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from hpctrain.config.schema import MoeConfig, RunConfig
from hpctrain.layout.layout import Layout
from hpctrain.layout.placement import cut_of
from hpctrain.layout.recompute import Again, recomputed
from hpctrain.layout.stages import Stage

COMPUTE_BYTES = {"float32": 4, "float64": 8, "bf16": 2, "fp16": 2}
"""Bytes of a weight and of an activation: the sizes of `parallel.precision.COMPUTE`, for code without torch."""


@dataclass(frozen=True)
class Keeps:
    """What a training program keeps for backward, where programs differ. The defaults are this one's.

    Attributes:
        scores: attention is not fused: softmax's result of every pair is kept, and with dropout its mask, a byte, and
            what dropout makes of it (arXiv 2205.05198, section 4.1).
        masks: bytes of each of a layer's two dropout masks, an element; None keeps what they were applied to.
        repeated: keys and values are repeated to all heads before attention.
        gate: numbers that a gated MLP keeps of a column: 4, or 3 where backward works silu out again.
        operands: bytes of an input of a linear in a layer; None keeps it in the precision of the computation.
        logit, of_loss: bytes of a logit from forward to backward, and besides while the loss is backward; None is
            the logit, and its gradient, in the precision of the computation.
        flowing: of a layer's backward, gradients that are there beside what was kept: that of its output, and so many
            numbers of a column of its MLP.
        routed: of a layer with experts, what is kept of its norm's output for the router, and of what experts give:
            `copies`, a copy in float32 or wider, and all of it, as it is weighted after the exchange; `norm`, that
            output as it is, and nothing, as it is weighted before the last product.
        gradient: bytes of a weight's gradient; None is float32 or wider.
        plain_norms: RMSNorm is not one kernel: the input in float32 or wider, where that is another tensor, and the
            input over its root mean square are kept.
        chunk: most logits that the loss works on at once.
        streams: the device is a GPU: collectives are hidden by its streams, not by threads of the host (engine fsdp),
            and AdamW updates all parameters together.
    """

    scores: bool = False
    masks: float | None = None
    repeated: bool = True
    gate: int = 4
    operands: float | None = None
    logit: float | None = None
    of_loss: float | None = None
    flowing: float = 0.0
    routed: Literal["copies", "norm"] = "copies"
    gradient: int | None = None
    plain_norms: bool = False
    chunk: int = 1 << 25
    streams: bool = True


OURS = Keeps()
"""What this program keeps on a GPU."""

ON_CPU = Keeps(plain_norms=True, chunk=1 << 18, streams=False)
"""What it keeps on a CPU, where RMSNorm is not one kernel, and a chunk of the loss is what a core's cache holds."""


@dataclass(frozen=True)
class Activations:
    """Bytes of one micro-batch in one stage, or in the whole model.

    Attributes:
        kept: from its forward to its backward.
        passing: besides, at most, while its backward runs: what is computed again, and the logits' gradient.
        left: between the parts of a split backward, for the weights: linears' inputs and their outputs' gradients.
        handed: the hidden states that stages give each other.
        logits: of what is kept.
        of_loss: of what is passing, the logits' gradient; the rest is one layer computed again.
        chunk: while the loss runs, forward or backward: its chunk in float32 or wider.
        layers: of what is kept, that of each layer.
        again: of what is passing, the most from the backward of each layer on, without the loss.
        working: what each layer's forward works with and does not keep, where something of it is computed again.
    """

    kept: int
    passing: int
    left: int
    handed: int
    logits: int = 0
    of_loss: int = 0
    chunk: int = 0
    layers: tuple[int, ...] = field(default=(), kw_only=True)
    again: tuple[int, ...] = field(default=(), kw_only=True)
    working: tuple[int, ...] = field(default=(), kw_only=True)


def activations(config: RunConfig, layout: Layout, stage: Stage | None = None, keeps: Keeps = OURS) -> Activations:
    """See `Activations`."""
    model, width, tp = config.model, COMPUTE_BYTES[config.train.precision], layout.tp
    vocab = cut_of(model, "vocab", tp, 0)[1]
    hidden, norm = _hidden(config, layout), _of_norm(config, keeps)
    held = range(model.layers) if stage is None else stage.layers
    routed = [model.routed(layer) for layer in held]
    for_weights = {kind: _for_weights(config, layout, kind) for kind in set(routed)}
    ways = recomputed(config.train, held).values()
    of_kind = {kind: _of_layer(config, layout, *kind, keeps) for kind in set(zip(routed, ways))}
    of_layer = [of_kind[kind] for kind in zip(routed, ways)]
    kept = [layer.kept for layer in of_layer]
    flowing = max((_flowing(config, layout, kind, keeps) for kind in set(routed)), default=0.0)
    again = [0.0]  # of the backward of no layers, of the first, of the first two; the last of them goes first
    for layer in of_layer:
        again.append(max(layer.again + flowing, again[-1] - layer.kept))
    last = stage is None or stage.last
    ends = (2 + norm if last else 1) * hidden  # the last norm's input and output, or what is handed on
    head = last * (not model.tied) * (hidden + vocab)
    logit = width if keeps.logit is None else keeps.logit
    of_loss = width if keeps.of_loss is None else keeps.of_loss  # their gradient
    of_token = (
        (sum(kept) + ends) * width + last * vocab * logit + _documents(config, layout),
        again[-1] * width + last * vocab * of_loss,
        (sum(for_weights[kind] for kind in routed) + head) * width,
        hidden * width,
        last * vocab * logit,
        last * vocab * of_loss,
    )
    tokens = config.train.micro_batch * config.data.seq / layout.cp
    of_chunk = min(tokens, max(1, keeps.chunk // vocab)) * vocab * max(width, 4) * (2 if width < 4 else 1)
    sizes = [*(tokens * size for size in of_token), last * of_chunk]
    working = [layer.working for layer in of_layer]
    layers, after, works = (tuple(round(tokens * width * size) for size in each) for each in (kept, again[1:], working))
    return Activations(*map(round, sizes), layers=layers, again=after, working=works)


class _OfLayer(NamedTuple):
    """Numbers of a token, in the precision of the computation, of a layer.

    Attributes:
        kept: from forward to backward.
        again: at most, what its backward computes again at a time.
        working: at most, what its forward works with and does not keep.
    """

    kept: float
    again: float = 0.0
    working: float = 0.0


def _of_layer(config: RunConfig, layout: Layout, routed: bool, again: Again, keeps: Keeps) -> _OfLayer:
    """See there. What is computed again one after the other is not there together; what norms return is asked for when
    the MLP behind is done with, and so has left room."""
    model, width, tp = config.model, COMPUTE_BYTES[config.train.precision], layout.tp
    hidden, norm = _hidden(config, layout), _of_norm(config, keeps)
    attention, core = _attention(config, layout, keeps)
    mask = 1.0 if keeps.masks is None else keeps.masks / width
    if model.qk_norm:  # queries and keys before it, and what it keeps
        queries_and_keys = sum(cut_of(model, cut, tp, 0)[1] for cut in ("heads", "kv_heads")) * model.head_width
        attention += (1 + norm) * queries_and_keys
    of_attention, outputs = _before_magnitudes(config, layout, routed)
    inner = _mlp(config, layout, routed, keeps) + outputs
    kept = (
        2 * norm * hidden
        + (2 + 2 * _operand(keeps, width)) * hidden
        + attention
        + of_attention
        + (2 * mask * hidden if model.dropout else 0)
        + inner
    )
    if again == "none":
        return _OfLayer(kept)
    if again == "full":
        columns = inner_columns(config, layout, routed)
        return _OfLayer(hidden, kept - hidden, 2 * model.hidden + (4 if model.gated else 2) * columns)
    operations = set(config.train.recompute_ops)
    core *= "core_attn" in operations
    after_norm = (norm + _operand(keeps, width)) * hidden * ("layernorm" in operations)
    of_mlp = _mlp_again(config, layout, routed, keeps)
    spared = core + 2 * after_norm + sum(of_mlp)
    whole = ("moe" if routed else "mlp") in operations
    parts = [core, *(size + after_norm * whole for size in of_mlp)]
    again_after = after_norm - (inner - sum(of_mlp))
    return _OfLayer(kept - spared, max(*parts, again_after), max(*parts, after_norm))


def _mlp_again(config: RunConfig, layout: Layout, routed: bool, keeps: Keeps) -> list[float]:
    """Of what `_mlp` says, and of what magnitudes there are multiplied with, what named operations spare; each is
    computed again when the one before is done with."""
    model, moe, operations = config.model, config.model.moe, set(config.train.recompute_ops)
    inner, (_, outputs) = _inner(config, keeps), _before_magnitudes(config, layout, routed)
    activation = (inner - (2 if model.gated else 1)) * ("activation" in operations)
    if moe is None or not routed:
        columns = cut_of(model, "ffn", layout.tp, 0)[1]
        return [inner * columns + outputs if "mlp" in operations else activation * columns]
    if "moe" in operations:
        return [_mlp(config, layout, routed, keeps) + outputs]
    shared = cut_of(model, "shared_ffn", layout.tp, 0)[1] if moe.shared_ffn else 0
    return [
        activation * _rows(moe, layout.tp) * model.expert_width,
        inner * shared + outputs if "shared_experts" in operations else activation * shared,
    ]


def _hidden(config: RunConfig, layout: Layout) -> float:
    """Numbers of a token of hidden states between a layer's regions, where sp divides the sequence."""
    return config.model.hidden / layout.tp if layout.sp else config.model.hidden


def _of_norm(config: RunConfig, keeps: Keeps) -> float:
    """Numbers, in the precision of the computation, that a norm keeps of an element besides its input and output."""
    width = COMPUTE_BYTES[config.train.precision]
    if not keeps.plain_norms or config.model.norm != "rmsnorm":
        return 0.0
    return 1.0 if width >= 4 else 2 * 4 / width - 1


def activation_bytes(config: RunConfig, layout: Layout, stage: Stage | None = None) -> int:
    """Activations of one micro-batch that a whole backward needs, and the logits with their gradient; of one stage, or
    of the whole model."""
    of_stage = activations(config, layout, stage)
    return of_stage.kept + of_stage.passing


def _inner(config: RunConfig, keeps: Keeps) -> float:
    """Numbers that an MLP keeps of a column of a token."""
    width = COMPUTE_BYTES[config.train.precision]
    return (keeps.gate if config.model.gated else 2) - 1 + _operand(keeps, width)


def _flowing(config: RunConfig, layout: Layout, routed: bool, keeps: Keeps) -> float:
    """Numbers of a token that are gradients of activations in a layer's backward; those of experts' outputs are there
    before and after they are exchanged."""
    model = config.model
    hidden = _hidden(config, layout)
    if model.moe is None or not routed:
        return keeps.flowing and hidden + keeps.flowing * cut_of(model, "ffn", layout.tp, 0)[1]
    inner = max(keeps.flowing * model.expert_width, 2 * model.hidden)
    return keeps.flowing and hidden + _rows(model.moe, layout.tp) * inner


def _before_magnitudes(config: RunConfig, layout: Layout, routed: bool) -> tuple[float, float]:
    """Numbers of a token of a layer that DoRA's magnitudes are multiplied with: outputs of linears that have them, of
    attention and of the MLP, or the shared one."""
    model, adapter, tp = config.model, config.model.adapter, layout.tp
    if adapter is None or adapter.kind != "dora":
        return 0.0, 0.0
    hidden = _hidden(config, layout)
    heads, kv = (cut_of(model, cut, tp, 0)[1] * model.head_width for cut in ("heads", "kv_heads"))
    attention, mlp = {"q": heads, "k": kv, "v": kv, "output": hidden}, {}
    if not routed or (model.moe is not None and model.moe.shared_ffn):
        columns = cut_of(model, "shared_ffn" if routed else "ffn", tp, 0)[1]
        mlp = {"up": columns, "down": hidden} | ({"gate": columns} if model.gated else {})
    of_attention, of_mlp = (sum(n for name, n in out.items() if adapter.adapts(name)) for out in (attention, mlp))
    return of_attention, of_mlp


def _operand(keeps: Keeps, width: int) -> float:
    """What an input of a linear takes, in numbers of the precision of the computation."""
    return 1.0 if keeps.operands is None else keeps.operands / width


def _for_weights(config: RunConfig, layout: Layout, routed: bool) -> float:
    """Numbers of a token of a layer that a split backward leaves for the gradients of its weights. Those of experts do
    not wait."""
    model, tp = config.model, layout.tp
    hidden = _hidden(config, layout)
    heads, kv_heads = (cut_of(model, cut, tp, 0)[1] for cut in ("heads", "kv_heads"))
    attention = 2 * hidden + 2 * (heads + kv_heads) * model.head_width
    if not routed:
        return attention + 2 * hidden + (3 if model.gated else 2) * cut_of(model, "ffn", tp, 0)[1]
    shared = model.moe is not None and model.moe.shared_ffn
    return attention + (2 * hidden + 3 * cut_of(model, "shared_ffn", tp, 0)[1] if shared else 0)


def _attention(config: RunConfig, layout: Layout, keeps: Keeps) -> tuple[float, float]:
    """Elements that attention keeps of a token of a layer, and how many of them are spared by computing it again.

    Queries, keys, values and output; keys and values repeated to all heads, but not where attention is ours: in a
    ring, and under Ulysses with documents.
    """
    model, width = config.model, COMPUTE_BYTES[config.train.precision]
    heads, kv = (cut_of(model, cut, layout.tp, 0)[1] for cut in ("heads", "kv_heads"))
    inputs, output = (heads + 2 * kv) * model.head_width, heads * model.head_width
    copy = 0.0 if keeps.operands is None else output * keeps.operands / width  # of its output, for the linear after it
    sums = heads * max(width, 4) / width  # one of each query
    if keeps.scores:
        scores = heads * config.data.seq * (1 + (1 + 1 / width) * bool(model.dropout))
        return inputs + output + copy + scores, scores
    ring = config.parallel.cp_method == "ring"
    if (layout.cp > 1 and ring) or (layout.cp == 1 and not keeps.repeated):
        return inputs + output + copy + sums, sums
    if layout.cp == 1:
        return 4 * output + copy, 3 * output - inputs
    kv = math.lcm(kv, layout.cp)
    traded = (heads + 2 * kv) * model.head_width + sums if config.data.document_mask else 3 * output
    return traded + 2 * output + copy, traded + output - inputs  # its output before and after it is traded back


def _documents(config: RunConfig, layout: Layout) -> int:
    """Bytes a token: what is added to its scores, or, under context parallelism, the documents of the whole sample."""
    if not config.data.document_mask:
        return 0
    return 4 * layout.cp if layout.cp > 1 else config.data.seq * COMPUTE_BYTES[config.train.precision]


def _mlp(config: RunConfig, layout: Layout, routed: bool, keeps: Keeps) -> float:
    """Numbers in the precision of the computation that a layer keeps of a token between its second norm and the
    residual. Tokens are taken to be spread evenly over experts."""
    model, moe, tp = config.model, config.model.moe, layout.tp
    width = COMPUTE_BYTES[config.train.precision]
    operand, inner = _operand(keeps, width), _inner(config, keeps)
    if moe is None or not routed:
        return inner * cut_of(model, "ffn", tp, 0)[1]
    wider = max(width, 4) / width
    router = wider * 3 * moe.experts  # logits, scores, and these over their sum
    if keeps.routed == "copies":  # of float32 or wider none is made
        router += wider * model.hidden * (wider > 1)
    else:
        router += (1 - operand) * model.hidden
    experts = _rows(moe, tp) * (layout.etp * model.hidden * operand + inner * model.expert_width)
    experts += moe.top_k * model.hidden / tp * (keeps.routed == "copies")
    shared = inner * cut_of(model, "shared_ffn", tp, 0)[1] if moe.shared_ffn else 0
    return (router / tp if layout.sp else router) + experts + shared


def _rows(moe: MoeConfig, tp: int) -> float:
    """Rows of experts that a token is, by rank of tp."""
    share = moe.capacity or 1.0
    return moe.top_k * (share if moe.overflow == "pad" else min(share, 1.0)) / tp


def inner_columns(config: RunConfig, layout: Layout, routed: bool) -> float:
    """Columns of an MLP that a token goes through on a rank: of experts those of all its rows, and of a shared MLP."""
    model, moe, tp = config.model, config.model.moe, layout.tp
    if moe is None or not routed:
        return cut_of(model, "ffn", tp, 0)[1]
    return _rows(moe, tp) * model.expert_width + (cut_of(model, "shared_ffn", tp, 0)[1] if moe.shared_ffn else 0)
