"""What a layer, the embedding and the head cost a rank for one micro-batch: forward, and both parts of backward."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hpctrain.plan.adapters import Shape, adapted, shapes
from hpctrain.plan.attention import Core, core
from hpctrain.plan.gemm import Array, Device, streamed
from hpctrain.plan.links import CHANNELS, Machine
from hpctrain.plan.products import Products, linear
from hpctrain.plan.work import Phase, Points, Work


def cast_bytes(machine: Machine, work: Work, points: Points, own: Array, shared: Array, normed: bool) -> Array:
    """Bytes that making fp8 operands moves: each is read in bf16, and written as it is and, where products want that,
    transposed (TransformerEngine, documentation of FP8 primitives).

    Where tp gathers operands in fp8, each rank makes its part, and the whole is transposed after that
    (TransformerEngine, pytorch/module/linear.py). A norm that writes its result in fp8 saves writing it in bf16
    (pytorch/module/layernorm_linear.py).

    Args:
        own: elements that a rank of tp has alone.
        shared: elements that all ranks of tp need whole.
        normed: the shared ones are results of norms.
    """
    copies = machine.hardware.gpu.fp8_copies.value
    parts = np.where((points.sp == 1) & work.runtime.fp8_gathers, points.tp, 1)
    made = 1.0 - work.width if normed and work.runtime.fp8_norms else 3.0
    turned = np.where(parts > 1, 2.0, 2.0 if made < 0 else 1.0) * (copies - 1)
    return own * (2.0 + copies) + shared * (made / parts + turned)


@dataclass(frozen=True)
class Cost:
    """A part of the model on one rank, one micro-batch."""

    forward: Phase
    backward_input: Phase
    backward_weight: Phase

    @property
    def backward(self) -> Phase:
        return self.backward_input + self.backward_weight

    @property
    def total(self) -> Array:
        return self.forward.total + self.backward.total


def hidden_part(time: Array, beside: Array, share: float = CHANNELS) -> Array:
    """Seconds that communication adds to computation it runs beside: what is longer, and the share of the device that
    it takes away."""
    return np.maximum(0.0, time - beside) + share * np.minimum(time, beside)


SENDS = 0.02
"""That share for sends to one neighbour: NCCL gives a peer 2 channels for each port to it (ncclTopoGetNchannels,
src/graph/paths.cc), of 108 SMs or more."""

USER_BUFFERS = 0.1
"""That share for user buffers: rings of copies take 1 SM or 2, reductions up to 24 of 132 (NeMo,
collections/llm/recipes/tp_overlap_configs/userbuffers.py)."""


def _gates(
    work: Work, device: Device, rows: Array, out: Array, inner: Array, batch: Array, width: float, added: float
) -> Products:
    """Products into an MLP: up, and gate where there is one."""
    if work.model.gated and not work.runtime.fused:
        return linear(device, rows, out, inner, batch, width, added) * 2.0
    return linear(device, rows, out * (2 if work.model.gated else 1), inner, batch, width, added)


def layer(machine: Machine, work: Work, points: Points, routed: bool) -> Cost:
    """A transformer layer."""
    model, device, width = work.model, machine.device(work.dtype), work.width
    narrow = 1.0 if work.dtype == "fp8" else width
    tp, tokens = points.tp, points.micro_batch * work.seq / points.cp
    hidden, heads, kv = model.hidden, model.heads / tp, np.maximum(1.0, model.kv / tp)
    head, added = model.head_width, float(work.runtime.accumulate_bytes)
    column = linear(device, tokens, (heads + 2 * kv) * head, hidden, width=narrow, added=added)
    row = linear(device, tokens, hidden, heads * head, width=narrow, added=added)
    forward, backward = _pointwise(work, points, tokens)
    merged = _merged(work, points, tokens)
    forward, backward = forward + merged[0], backward + merged[1]
    ep = Phase()
    cast = 0.0 * tokens
    wide = hidden  # numbers of a token that norms give to products, and that gradients of outputs have
    own_in, own_out = heads * head, (heads + 2 * kv) * head
    if routed:
        experts, ep, more, cast = _experts(machine, work, points, tokens)
        row, forward, backward = row + experts, forward + more, backward + more
        shared = model.moe.shared_ffn if model.moe else 0
    ffn = shared if routed else model.ffn_width
    if ffn:
        column += _gates(work, device, tokens, ffn / tp, hidden, 1.0, narrow, added)
        row += linear(device, tokens, hidden, ffn / tp, width=narrow, added=added)
        inputs, passes = (2, (3, 5)) if model.gated else (1, work.runtime.activation_passes)
        forward += tokens * ffn / tp * width * passes[0]
        backward += tokens * ffn / tp * width * passes[1]
        wide, own_in, own_out = wide + hidden, own_in + ffn / tp, own_out + inputs * ffn / tp
    if work.dtype == "fp8":
        to_gather = tokens * wide
        forward += cast_bytes(machine, work, points, tokens * own_in + cast, to_gather, True)
        backward += cast_bytes(machine, work, points, tokens * own_out + cast, to_gather, False)
    scores = core(machine, work, points)
    kernels = 8.0 + 4 * routed
    linears = shapes(work, points, tokens, ffn) + (_of_experts(work, points, tokens) if routed else [])
    products, more, again = adapted(work, device, linears, column + row)
    forward, backward = forward + more, backward + again
    tp_forward, tp_inputs, tp_hidden = _tensor(machine, work, points, tokens, products, bool(ffn))
    overlap = work.runtime.tp_overlap
    cp_forward, cp_backward = _context(machine, work, points, scores)
    fore = Phase(products.forward, scores.forward, streamed(device, forward, kernels), tp_forward, cp_forward, ep.ep)
    selective = Phase(
        attention=np.where(points.recompute == 1, scores.forward, 0.0), cp=cp_forward * (points.recompute == 1)
    )
    full = fore * (points.recompute == 2)
    back = Phase(
        products.inputs, scores.backward, streamed(device, backward, 1.5 * kernels), tp_inputs, cp_backward, ep.ep
    )
    beside = products.weights if overlap != "none" else 0.0
    share = USER_BUFFERS if overlap == "all" else CHANNELS
    weights = Phase(products.weights, tp=hidden_part(tp_hidden, beside, share))
    return Cost(fore, back + selective + full, weights)


def _pointwise(work: Work, points: Points, tokens: Array) -> tuple[Array, Array]:
    """Bytes that norms, residual sums, dropout, rotation and reshaping move in a layer, forward and backward.

    A norm reads and writes, and backward reads twice and writes; a residual sum reads two and writes one, with a mask
    of a byte for dropout; backward adds two gradients. Queries, keys, values and attention's output are copied to
    another order once.
    """
    model, width = work.model, work.width
    hidden = tokens * model.hidden / np.where(points.sp == 1, points.tp, 1)
    heads = tokens * (2 * model.heads + 2 * model.kv) * model.head_width / points.tp
    turned = tokens * (model.heads + model.kv) * model.head_width / points.tp * (model.position == "rope")
    turned += tokens * (model.heads + model.kv) * model.head_width / points.tp * model.qk_norm
    mask = 1 if model.dropout else 0
    forward = 2 * hidden * (2 * width + 3 * width + mask) + (heads + turned) * 2 * width
    backward = 2 * hidden * (3 * width + 3 * width + (2 * width + mask) * mask + width * model.bias)
    return forward, backward + (heads + turned) * 2 * width


def _merged(work: Work, points: Points, tokens: Array) -> tuple[Array, Array]:
    """Bytes that a ring of cp moves to add up its blocks, forward and backward: outputs, and gradients of queries, keys
    and values, are read with their sum, which is written. Every second block after the first is of half of the
    positions, as ranks hold two pieces of the sequence each."""
    model = work.model
    queries, keys = model.heads / points.tp, np.maximum(1.0, model.kv / points.tp)
    blocks = 0.75 * (points.cp - 1) * (work.cp_method == "ring")
    each = 3 * work.width * tokens * model.head_width * blocks
    return queries * each, (queries + 2 * keys) * each


def _experts(machine: Machine, work: Work, points: Points, tokens: Array) -> tuple[Products, Phase, Array, Array]:
    """Experts' products, their exchange of tokens (in `ep`; backward takes as long), bytes of sorting tokens, and
    elements of the products' inputs."""
    model, device, moe, width = work.model, machine.device(work.dtype), work.model.moe, work.width
    assert moe is not None
    narrow = 1.0 if work.dtype == "fp8" else width
    mine, etp, added = moe.experts / points.ep, points.etp, float(work.runtime.accumulate_bytes)
    rows, each = _rows(work, points, tokens)
    together = np.minimum(mine, work.runtime.expert_streams) if work.runtime.expert_streams else mine
    apart = mine / together
    out = Products()
    out += _gates(work, device, each, model.expert_width / etp, model.hidden, together, narrow, added) * apart
    out += linear(device, each, model.hidden, model.expert_width / etp, together, narrow, added) * apart
    out += linear(device, tokens, moe.experts, model.hidden, width=4.0)  # router, in float32
    group = machine.group(points.ep, etp)
    sent = 2 * machine.collective("all_to_all", rows * model.hidden * width * work.skew, group)
    over = machine.group(etp, np.ones_like(points.tp))
    gathered = machine.collective("all_gather", rows * model.hidden * width, over)
    gathered = gathered + machine.collective("reduce_scatter", rows * etp * model.hidden * width, over)
    # The outputs of a rank of tp's share of tokens go to all its ranks where they hold the whole.
    whole = machine.group(points.tp, np.ones_like(points.tp))
    gathered = gathered + np.where(
        (points.tp > 1) & (points.sp == 0),
        machine.collective("all_gather", tokens / points.tp * model.hidden * width, whole),
        0.0,
    )
    moved = rows * model.hidden * width * 4 + rows * etp * model.expert_width / etp * width * 3
    operands = rows * etp * (model.hidden + model.expert_width / etp)
    return out, Phase(ep=sent + gathered), moved, operands


def _rows(work: Work, points: Points, tokens: Array) -> tuple[Array, Array]:
    """Tokens that a rank sends to experts, and those of each of its own."""
    moe = work.model.moe
    assert moe is not None
    share = moe.capacity if moe.capacity and moe.overflow == "pad" else 1.0
    rows = tokens * moe.top_k / points.tp * share
    return rows, rows * points.etp * work.skew * points.ep / moe.experts


def _of_experts(work: Work, points: Points, tokens: Array) -> list[Shape]:
    """The linears of a rank's experts."""
    model, each = work.model, _rows(work, points, tokens)[1]
    assert model.moe is not None
    width, mine = model.expert_width / points.etp, model.moe.experts / points.ep
    into = Shape("experts", each, width, model.hidden, mine)
    return [into] * (2 if model.gated else 1) + [Shape("experts", each, model.hidden, width, mine)]


def _tensor(
    machine: Machine, work: Work, points: Points, tokens: Array, products: Products, mlp: bool
) -> tuple[Array, Array, Array]:
    """Collectives over tp of a layer: what they add forward, and to the gradients of inputs; and those that the
    gradients of weights may run beside.

    Each region (attention, MLP) all-reduces its output, and its input's gradient; with sequence parallelism it gathers
    its input and reduce-scatters its output, and gathers its input once more for the gradients of weights. With user
    buffers a product begins with the part that is there while others arrive; of a product that is reduce-scattered the
    last of tp parts has nothing to run beside.
    """
    regions, tp = 2 if mlp else 1, points.tp
    group = machine.group(tp, np.ones_like(tp))
    overlap, sp = work.runtime.tp_overlap, points.sp == 1
    move = machine.copied if overlap == "all" else machine.collective
    whole = tokens * work.model.hidden * work.width
    narrower = 1 / work.width if work.runtime.fp8_gathers and work.dtype == "fp8" else 1.0
    summed = machine.collective("all_reduce", whole, group) * regions
    gathered = move("all_gather", whole / tp * narrower, group) * regions
    scattered = move("reduce_scatter", whole, group) * regions
    hidden = np.where(sp, gathered + scattered, summed)
    if overlap == "all":
        beside = hidden_part(gathered + scattered * (1 - 1 / tp), products.forward, USER_BUFFERS)
        forward = np.where(sp, scattered / tp + beside, summed)
        return forward, np.where(sp, hidden_part(gathered, products.inputs, USER_BUFFERS), 0.0), hidden
    forward, exposed = hidden, np.where(sp, gathered, 0.0)
    if overlap == "none":
        return forward, exposed + hidden, 0.0 * hidden
    return forward, exposed, hidden


def _context(machine: Machine, work: Work, points: Points, scores: Core) -> tuple[Array, Array]:
    """What attention over cp shows, forward and backward: a ring sends keys and values beside the blocks it computes;
    Ulysses trades heads for positions with nothing beside."""
    model, cp = work.model, points.cp
    if np.all(cp == 1):
        return 0.0 * cp, 0.0 * cp
    group = machine.group(cp, points.tp)
    held = points.micro_batch * work.seq / cp * model.head_width * work.width
    heads, kv = model.heads / points.tp, np.maximum(1.0, model.kv / points.tp)
    if work.cp_method == "ulysses":
        repeated = np.maximum(kv, cp)
        traded = machine.collective("all_to_all", (heads + 2 * repeated) * held, group)
        traded = traded + machine.collective("all_to_all", heads * held, group)
        return np.where(cp > 1, traded, 0.0), np.where(cp > 1, traded, 0.0)
    away = group.domains > 1
    back = 1 + work.runtime.ring_bytes / work.width  # keys and values, and their gradients
    one, two = machine.send(2 * kv * held, away), machine.send(2 * kv * held * back, away)
    forward = (cp - 1) * hidden_part(one, scores.forward / cp, SENDS)
    backward = (cp - 1) * hidden_part(two, scores.backward / cp, SENDS)
    return forward, backward


def first(machine: Machine, work: Work, points: Points) -> Cost:
    """The embedding: rows are looked up and summed over tp; backward adds float32 rows."""
    device, width = machine.device(work.dtype), work.width
    tokens = points.micro_batch * work.seq / points.cp
    size = tokens * work.model.hidden
    group = machine.group(points.tp, np.ones_like(points.tp))
    whole = size * width
    sp = points.sp == 1
    summed = np.where(
        sp, machine.collective("reduce_scatter", whole, group), machine.collective("all_reduce", whole, group)
    )
    gathered = np.where(sp, machine.collective("all_gather", whole / points.tp, group), 0.0)
    passes = 2 * width + (2 * width if work.model.position == "learned" else 0) + (3 if work.model.dropout else 0)
    forward = Phase(pointwise=streamed(device, size * passes, 3), tp=summed)
    if work.model.adapter is not None:
        return Cost(forward, Phase(), Phase())
    return Cost(forward, Phase(tp=gathered), Phase(pointwise=streamed(device, size * (width + 8), 2)))


def last(machine: Machine, work: Work, points: Points) -> Cost:
    """The last norm, the head and the loss."""
    device, width, model = machine.device(work.dtype), work.width, work.model
    tokens = points.micro_batch * work.seq / points.cp
    # fp8 leaves the head in the precision of activations
    plain = machine.device("bf16") if work.dtype == "fp8" else device
    head = linear(plain, tokens, model.vocab / points.tp, model.hidden, width=width)
    size = tokens * model.hidden
    group = machine.group(points.tp, np.ones_like(points.tp))
    sp = points.sp == 1
    gathered = machine.collective("all_gather", size * width / points.tp, group)
    forward_tp = np.where(sp, gathered, 0.0) + 3 * machine.collective("all_reduce", tokens * 4.0, group)
    backward_tp = np.where(
        sp,
        machine.collective("reduce_scatter", size * width, group),
        machine.collective("all_reduce", size * width, group),
    )
    loss = tokens * model.vocab / points.tp * work.runtime.loss_bytes
    fore = Phase(head.forward, 0.0, streamed(device, loss / 2 + size * 2 * width, 8), forward_tp)
    overlap = work.runtime.tp_overlap != "none"
    back = Phase(head.inputs, 0.0, streamed(device, loss / 2 + size * 3 * width, 6), 0.0 if overlap else backward_tp)
    product = head.weights if model.adapter is None else 0.0 * head.weights
    weights = Phase(product, tp=hidden_part(backward_tp, product) if overlap else 0.0)
    return Cost(fore, back, weights)
