"""Context parallelism: every rank of cp holds a part of each sequence, and all of the model.

Only attention looks at other positions. The ring (Liu et al., arXiv 2310.01889) passes keys and values around while
queries stay; Ulysses (Jacobs et al., arXiv 2309.14509) gives each rank some heads of the whole sequence instead. What
else has to know that it sees a part: dropout, and positions, which come with the batch. Gradients of parameters are
sums over dp x cp, which the engine makes anyway. Documents are those of whole samples on every rank: none are sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hpctrain.config.schema import CpMethod, RunConfig
from hpctrain.layout.context import ring_block, spans
from hpctrain.model import blockwise
from hpctrain.model.batch import Batch
from hpctrain.model.blockwise import Partial, Sight
from hpctrain.model.random import Dropout
from hpctrain.model.transformer import DotProductAttention, Transformer
from hpctrain.parallel.autograd import reshard
from hpctrain.parallel.comm import Axis, Leg, start_exchange
from hpctrain.parallel.mesh import Mesh

HEADS, SEQ = 1, 2
"""Dims of `[batch, heads, seq, head_width]`."""


def own_part(batch: Batch, config: RunConfig, mesh: Mesh) -> Batch:
    """This rank's part of whole samples."""
    return batch.part(spans(config.parallel.cp_method, batch.tokens.shape[1], mesh.cp.size, mesh.cp.index))


def apply_context_parallelism(model: Transformer, mesh: Mesh, config: RunConfig) -> None:
    """Swap what sees more than one position, or must know which it sees."""
    method, axis = config.parallel.cp_method, mesh.cp
    inner = mesh.tp if config.parallel.sp else mesh.alone

    def dropout(plain: Dropout) -> Dropout:
        return ContextDropout(plain, method, axis, inner)

    core = RingAttention(axis) if method == "ring" else UlyssesAttention(axis, mesh.alone)

    model.mask = whole_documents
    model.dropout = dropout(model.dropout)
    for _, layer in model.numbered_layers():
        layer.attention.core = core
        layer.attention_dropout = dropout(layer.attention_dropout)
        layer.mlp_dropout = dropout(layer.mlp_dropout)


def whole_documents(documents: Tensor, _: torch.dtype) -> Tensor:
    """What attention here is told in the place of a mask: the documents themselves."""
    return documents


class ContextDropout(Dropout):
    """`Dropout` of a part of the sequence: it drops what that drops there.

    Args:
        dropout: the module replaced.
        method: that decides which part.
        axis: cp.
        inner: the ranks over which sequence parallelism shards the part again.
    """

    def __init__(self, dropout: Dropout, method: CpMethod, axis: Axis, inner: Axis) -> None:
        super().__init__(dropout.p, dropout.seed, dropout.site)
        self.method, self.axis, self.inner = method, axis, inner

    def mask(self, samples: Sequence[int], shape: torch.Size, device: torch.device) -> Tensor:
        part, hidden = shape
        whole = torch.Size((part * self.inner.size * self.axis.size, hidden))
        own = spans(self.method, whole[0], self.axis.size, self.axis.index)
        masks = []
        for sample in samples:  # one whole mask at a time
            mask = super().mask([sample], whole, device)
            held = torch.cat([mask[:, start:end] for start, end in own], 1)
            masks.append(held[:, part * self.inner.index :][:, :part])
        return torch.cat(masks)


class UlyssesAttention(nn.Module):
    """Attention over the whole sequence by some of the heads. in, out: sharded over the sequence in equal parts.

    Key/value heads that cp does not divide are repeated, as often as it takes.

    Args:
        axis: cp.
        alone: this rank only.
    """

    def __init__(self, axis: Axis, alone: Axis) -> None:
        super().__init__()
        self.axis, self.alone, self.core = axis, alone, DotProductAttention()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> Tensor:
        copies = self.axis.size // math.gcd(k.shape[HEADS], self.axis.size)
        if copies > 1:
            k, v = k.repeat_interleave(copies, HEADS), v.repeat_interleave(copies, HEADS)
        parts = [torch.unflatten(t, HEADS, (self.axis.size, -1)) for t in (q, k, v)]
        heads = [t.shape[HEADS + 1] for t in parts]
        together = reshard(torch.cat(parts, HEADS + 1).flatten(HEADS, HEADS + 1), self.axis, split=HEADS, join=SEQ)
        q, k, v = torch.split(together, heads, HEADS)
        out = self.core(q, k, v, None) if documents is None else attend(q, k, v, documents, self.alone)
        return reshard(out, self.axis, split=SEQ, join=HEADS)


class RingAttention(nn.Module):
    """Attention of this rank's queries to the keys of all ranks. in, out: sharded over the sequence, in zig-zag."""

    def __init__(self, axis: Axis) -> None:
        super().__init__()
        self.axis = axis

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> Tensor:
        return attend(q, k, v, documents, self.axis)


def attend(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, axis: Axis) -> Tensor:
    """Causal attention of the queries of this rank to the keys of all ranks of a ring, which may be of one.

    Args:
        q: [batch, heads, part, head_width].
        k, v: [batch, kv_heads, part, head_width].
        documents: [batch, seq] of the whole samples; attention stays within equal values. None: it does not stop.
    """
    return _Ring.apply(q, k, v, documents, axis)  # type: ignore[no-any-return, no-untyped-call]


class _Ring(torch.autograd.Function):
    """Forward sends keys and values once around; backward again, and behind them their gradients.

    A block is worked on while the next one comes. Outputs are merged, and gradients travel, in float32 or wider.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, axis: Axis) -> Tensor:
        for rank, (keys, values) in _turns(torch.stack((k, v)), axis):
            queries, there, sight = _block(q.shape[SEQ], documents, axis, rank)
            found = blockwise.forward(q[:, :, queries], keys[:, :, there], values[:, :, there], sight)
            if rank == axis.index:
                whole = found
            else:
                whole.rows(queries).merge_(found)
        out = whole.output().to(q.dtype)
        ctx.save_for_backward(q, k, v, out, whole.top, whole.total)
        ctx.documents, ctx.axis = documents, axis
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, out, top, total = ctx.saved_tensors
        axis: Axis = ctx.axis
        whole = Partial(out, top, total)
        of_q, own = top.new_zeros(q.shape), top.new_zeros((2, *k.shape))
        on_its_way: Callable[[], Tensor] | None = None
        for rank, (keys, values) in _turns(torch.stack((k, v)), axis):
            queries, there, sight = _block(q.shape[SEQ], ctx.documents, axis, rank)
            added = blockwise.backward(
                grads[0][:, :, queries],
                q[:, :, queries],
                keys[:, :, there],
                values[:, :, there],
                out[:, :, queries],
                whole.rows(queries),
                sight,
            )
            of_q[:, :, queries] += added[0]
            if rank == axis.index:
                of_kv = own
            elif on_its_way is None:
                of_kv = torch.zeros_like(own)
            else:
                of_kv = on_its_way()
            of_kv[0][:, :, there] += added[1]
            of_kv[1][:, :, there] += added[2]
            on_its_way = None if rank == axis.index else _pass_on(of_kv, axis)
        if on_its_way is not None:
            own += on_its_way()
        return of_q.to(q.dtype), own[0].to(k.dtype), own[1].to(v.dtype), None, None


def _turns(held: Tensor, axis: Axis) -> Iterator[tuple[int, Tensor]]:
    """What each rank of the axis holds, its own first, then those before it; one comes while the last is used."""
    for turn in range(axis.size):
        coming = _pass_on(held, axis) if turn + 1 < axis.size else None
        yield (axis.index - turn) % axis.size, held
        if coming is not None:
            held = coming()


def _pass_on(t: Tensor, axis: Axis) -> Callable[[], Tensor]:
    """Begin to send a tensor to the next rank of the ring; gives what waits for that of the rank before."""
    legs = [
        Leg(t, (axis.index + 1) % axis.size, send=True),
        Leg(torch.empty_like(t), (axis.index - 1) % axis.size, send=False),
    ]
    sent, coming = start_exchange(legs, axis)

    def wait() -> Tensor:
        sent.wait()
        return coming.wait()

    return wait


def _block(part: int, documents: Tensor | None, axis: Axis, rank: int) -> tuple[slice, slice, Sight]:
    """Which places of this rank's queries and of a rank's keys are worked on, and what is seen there."""
    block = ring_block(part, axis.index, rank)
    queries, keys = slice(*block.queries), slice(*block.keys)
    if documents is None:
        return queries, keys, Sight(block.causal)
    mine, theirs = (_held(documents, axis, r) for r in (axis.index, rank))
    return queries, keys, Sight(block.causal, mine[:, queries], theirs[:, keys])


def _held(documents: Tensor, axis: Axis, rank: int) -> Tensor:
    own = spans("ring", documents.shape[1], axis.size, rank)
    return torch.cat([documents[:, start:end] for start, end in own], 1)
