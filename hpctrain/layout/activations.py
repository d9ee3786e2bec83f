"""Bytes of activations of one micro-batch, on a rank. Plain arithmetic; `layout/memory.py` says what is counted."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hpctrain.config.schema import RunConfig
from hpctrain.layout.layout import Layout
from hpctrain.layout.placement import cut_of
from hpctrain.layout.stages import Stage

COMPUTE_BYTES = {"float32": 4, "float64": 8, "bf16": 2, "fp16": 2}
"""Bytes of a weight and of an activation: the sizes of `parallel.precision.COMPUTE`, for code without torch."""


@dataclass(frozen=True)
class Activations:
    """Bytes of one micro-batch in one stage, or in the whole model.

    Attributes:
        kept: from its forward to its backward.
        passing: besides, at most, while its backward runs: what is computed again, and the logits' gradient.
        left: between the parts of a split backward, for the weights: linears' inputs and their outputs' gradients.
        handed: the hidden states that stages give each other.
    """

    kept: int
    passing: int
    left: int
    handed: int


def activations(config: RunConfig, layout: Layout, stage: Stage | None = None) -> Activations:
    """See `Activations`."""
    model, width, tp = config.model, COMPUTE_BYTES[config.train.precision], layout.tp
    wide, vocab = max(width, 4), cut_of(model, "vocab", tp, 0)[1]
    hidden = model.hidden / tp if layout.sp else model.hidden  # tp divides the sequence
    attention, spared = _attention(config, layout)
    if model.qk_norm:  # queries and keys before it
        attention += sum(cut_of(model, cut, tp, 0)[1] for cut in ("heads", "kv_heads")) * model.head_width
    always = 4 * hidden + attention + (2 * hidden if model.dropout else 0)
    held = range(model.layers) if stage is None else stage.layers
    whole = [always + _mlp(config, layout, model.routed(layer)) for layer in held]
    kept = [{"none": n, "selective": n - spared, "full": hidden}[config.train.recompute] for n in whole]
    last = stage is None or stage.last
    ends = (2 if last else 1) * hidden  # the last norm's input and output, or what is handed on
    head = last * (not model.tied) * (hidden + vocab)
    of_token = (
        (sum(kept) + ends) * width + last * vocab * wide + _documents(config, layout),  # the logits' exponentials
        max((n - k for n, k in zip(whole, kept)), default=0) * width
        + last * vocab * (width + wide),  # their gradient, also as computed
        (sum(_for_weights(config, layout, model.routed(layer)) for layer in held) + head) * width,
        hidden * width,
    )
    tokens = config.train.micro_batch * config.data.seq / layout.cp
    return Activations(*(round(tokens * size) for size in of_token))


def activation_bytes(config: RunConfig, layout: Layout, stage: Stage | None = None) -> int:
    """Activations of one micro-batch that a whole backward needs, and the logits with their gradient; of one stage, or
    of the whole model."""
    of_stage = activations(config, layout, stage)
    return of_stage.kept + of_stage.passing


def _for_weights(config: RunConfig, layout: Layout, routed: bool) -> float:
    """Numbers of a token of a layer that a split backward leaves for the gradients of its weights. Those of experts do
    not wait."""
    model, tp = config.model, layout.tp
    hidden = model.hidden / tp if layout.sp else model.hidden
    heads, kv_heads = (cut_of(model, cut, tp, 0)[1] for cut in ("heads", "kv_heads"))
    attention = 2 * hidden + 2 * (heads + kv_heads) * model.head_width
    if not routed:
        return attention + 2 * hidden + (3 if model.gated else 2) * cut_of(model, "ffn", tp, 0)[1]
    shared = model.moe is not None and model.moe.shared_ffn
    return attention + (2 * hidden + 3 * cut_of(model, "shared_ffn", tp, 0)[1] if shared else 0)


def _attention(config: RunConfig, layout: Layout) -> tuple[float, float]:
    """Elements that attention keeps of a token of a layer, and how many of them are spared by computing it again.

    Queries, keys, values and output; keys and values repeated to all heads, but not where attention is ours: in a
    ring, and under Ulysses with documents.
    """
    model, wide = config.model, max(COMPUTE_BYTES[config.train.precision], 4)
    heads, kv = (cut_of(model, cut, layout.tp, 0)[1] for cut in ("heads", "kv_heads"))
    inputs, output = (heads + 2 * kv) * model.head_width, heads * model.head_width
    sums = heads * wide / COMPUTE_BYTES[config.train.precision]  # one of each query
    ring = config.parallel.cp_method == "ring"
    if layout.cp > 1 and ring:
        return inputs + output + sums, sums
    if layout.cp == 1:
        return 4 * output, 3 * output - inputs
    kv = math.lcm(kv, layout.cp)
    traded = (heads + 2 * kv) * model.head_width + sums if config.data.document_mask else 3 * output
    return traded + 2 * output, traded + output - inputs  # its output before and after it is traded back


def _documents(config: RunConfig, layout: Layout) -> int:
    """Bytes a token: what each sees as a mask, or, under context parallelism, the documents of the whole sample."""
    if not config.data.document_mask:
        return 0
    return 8 * layout.cp if layout.cp > 1 else config.data.seq


def _mlp(config: RunConfig, layout: Layout, routed: bool) -> float:
    """Numbers in the precision of the computation that a layer keeps of a token between its second norm and the
    residual. Tokens are taken to be spread evenly over experts."""
    model, moe, tp = config.model, config.model.moe, layout.tp
    inner = 4 if model.gated else 2
    if moe is None or not routed:
        return inner * cut_of(model, "ffn", tp, 0)[1]
    wider = max(COMPUTE_BYTES[config.train.precision], 4) / COMPUTE_BYTES[config.train.precision]
    router = wider * (model.hidden + 3 * moe.experts)  # its input, logits, scores, and these over their sum
    share = moe.capacity or 1.0
    rows = moe.top_k * (share if moe.overflow == "pad" else min(share, 1.0)) / tp
    experts = rows * (layout.etp * model.hidden + inner * model.expert_width) + moe.top_k * model.hidden / tp
    shared = inner * cut_of(model, "shared_ffn", tp, 0)[1] if moe.shared_ffn else 0
    return (router / tp if layout.sp else router) + experts + shared
