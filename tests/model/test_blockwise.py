"""Attention by tiles, against the plain one; what the blocks of a ring become, whatever the scores; and CUDA's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from hpctrain.layout.context import ring_block, spans
from hpctrain.model import blockwise
from hpctrain.model.blockwise import Partial, Sight
from hpctrain.model.transformer import document_mask

DOCUMENTS = {
    "one": None,
    "some": torch.tensor([[0] * 5 + [1] * 20 + [2] * 23, [0] * 24 + [3] * 24]),
    "each": torch.arange(48).expand(2, -1),
}


def draw(dtype=torch.float64, seq=48, scale=1.0, width=6, device="cpu"):
    """q, k, v and the gradient of the output: 2 samples, 6 heads over 2."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(2, heads, seq, width) for heads in (6, 2, 2, 6)]
    q, k, v, grad = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    return [t.to(device, dtype) for t in (q * scale, k, v, grad)]


def plain(q, k, v, grad, documents):
    """Output and gradients of PyTorch's attention with all scores, in float64 on the same values."""
    q, k, v = (t.double().requires_grad_() for t in (q, k, v))
    rows = torch.zeros(len(q), q.shape[2], dtype=torch.long) if documents is None else documents
    groups = q.shape[1] // k.shape[1]
    mask = document_mask(rows, q.dtype).to(q.device)
    out = F.scaled_dot_product_attention(q, *(t.repeat_interleave(groups, 1) for t in (k, v)), attn_mask=mask)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad.double())]


def ring(q, k, v, grad, documents, cp):
    """The same by blocks of `cp` ranks, merged as a ring does, one rank after the other."""
    parts = [torch.cat([torch.arange(*s) for s in spans("ring", q.shape[2], cp, i)]) for i in range(cp)]
    found = [torch.zeros(t.shape, dtype=torch.promote_types(t.dtype, torch.float32), device=t.device)
             for t in (q, q, k, v)]  # fmt: skip

    def block(i, j):
        b = ring_block(len(parts[i]), i, j)
        mine, theirs = parts[i][slice(*b.queries)], parts[j][slice(*b.keys)]
        seen = () if documents is None else (documents[:, mine], documents[:, theirs])
        return slice(*b.queries), mine, theirs, Sight(b.causal, *seen)

    for i in range(cp):
        for j in (j % cp for j in range(i, i - cp, -1)):
            rows, mine, theirs, sight = block(i, j)
            got = blockwise.forward(q[:, :, mine], k[:, :, theirs], v[:, :, theirs], sight)
            if i == j:
                whole = got
            else:
                whole.rows(rows).merge_(got)
        assert all(t.isfinite().all() for t in whole)
        found[0][:, :, parts[i]] = out = whole.output()
        for j in range(cp):
            rows, mine, theirs, sight = block(i, j)
            got = blockwise.backward(
                grad[:, :, mine], q[:, :, mine], k[:, :, theirs], v[:, :, theirs],
                out[:, :, rows].to(q.dtype), whole.rows(rows), sight,
            )  # fmt: skip
            for into, where, added in zip(found[1:], (mine, theirs, theirs), got):
                into[:, :, where] += added
    return found


def worst(found, want, scale=1.0):
    """Of the largest value, or of `scale` where all are smaller: with one key to see, queries and keys have no
    gradient, but terms of the size of keys and queries that take each other away."""
    return max(((a.double() - b).abs().max() / b.abs().max().clamp_min(scale)).item() for a, b in zip(found, want))


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """So that a block has many, and uneven ones at the ends."""
    monkeypatch.setattr(blockwise, "TILE_KEYS", 7)
    monkeypatch.setattr(blockwise, "TILE_SCORES", 1)


@pytest.mark.parametrize("cp", [1, 2, 4, 8])
@pytest.mark.parametrize("scale", [1.0, 50.0])
@pytest.mark.parametrize("documents", DOCUMENTS)
def test_blocks_are_plain_attention(documents, scale, cp):
    """Where every token is a document of its own, all blocks but the diagonal are hidden, and most of that."""
    inputs = draw(scale=scale)
    assert worst(ring(*inputs, DOCUMENTS[documents], cp), plain(*inputs, DOCUMENTS[documents]), scale) < 1e-13


@pytest.mark.parametrize("scale", [1.0, 50.0])
def test_float32_errors_do_not_grow_with_the_ring(scale):
    """Trap D18: merges that overflow, or round."""
    inputs = draw(torch.float32, 256, scale, 32)
    errors = {cp: worst(ring(*inputs, None, cp), plain(*inputs, None)) for cp in (1, 2, 4, 8)}
    assert max(errors.values()) < 1e-5 * scale
    assert max(errors.values()) < 1.4 * errors[1], errors


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_merged_in_float32(dtype):
    """bf16 has 8 bits: were outputs rounded at each merge, the error of 8 ranks would be some times that of one."""
    inputs = draw(dtype, 256, 1.0, 32)
    want = plain(*inputs, None)
    outputs = {cp: ring(*inputs, None, cp)[0] for cp in (1, 8)}
    assert all(out.dtype == torch.float32 for out in outputs.values())
    assert worst([outputs[8]], want) < 1e-5


def test_a_query_that_sees_nothing_is_zero_and_finite():
    q, k, v, grad = draw(torch.float32)
    documents = torch.ones(2, 48, dtype=torch.long), torch.zeros(2, 48, dtype=torch.long)
    for first in (0, 1):  # a tile that is left out, or, with one key of its own, one that is computed
        documents[1][0, :first] = 1
        sight = Sight(False, documents[0], documents[1].sort().values)
        found = blockwise.forward(q, k, v, sight)
        assert all(t.isfinite().all() for t in found)
        assert (found.output()[1] == 0).all() and (found.total[1] == 0).all()
        for added in blockwise.backward(grad, q, k, v, found.output(), found, sight):
            assert added.isfinite().all() and (added[1] == 0).all()
        merged = Partial(*(torch.full_like(t, x) for t, x in zip(found, (6.0, 3.0, 2.0))))
        merged.merge_(found)
        assert (merged.output()[1] == 3).all() and (merged.top[1] == 3).all()


def test_scores_are_never_there_as_a_whole(monkeypatch):
    monkeypatch.setattr(blockwise, "TILE_KEYS", 8)
    largest = [0]

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            if isinstance(out, Tensor):
                largest[0] = max(largest[0], out.numel())
            return out

    q, k, v, grad = draw(seq=128)
    with Watch():
        found = blockwise.forward(q, k, v, Sight(True))
        blockwise.backward(grad, q, k, v, found.output(), found, Sight(True))
    assert largest[0] <= q.numel() < 2 * 6 * 128 * 128 / 20


def test_tiles_of_other_documents_are_left_out(monkeypatch):
    worked = []
    scores = blockwise._scores
    monkeypatch.setattr(blockwise, "_scores", lambda *args: worked.append(args[2]) or scores(*args))
    documents = (torch.arange(48) // 16).expand(2, -1)
    q, k, v, _ = draw()
    monkeypatch.setattr(blockwise, "TILE_KEYS", 16)
    blockwise.forward(q, k, v, Sight(True, documents, documents))
    assert len(worked) == 3, "of 6 tiles on or below the diagonal"
    blockwise.forward(q[:, :, 32:], k[:, :, 32:], v[:, :, 32:], Sight(False, documents[:, 32:], documents[:, 32:]))
    assert worked[3] is None, "within a document nothing is hidden"


@pytest.mark.gpu
@pytest.mark.parametrize("cp", [1, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_blocks_on_a_gpu(dtype, cp):
    """Flash attention rounds each block's output to half precision, a share of the whole: no growth with the ring."""
    inputs = draw(dtype, 256, 1.0, 32, device="cuda")
    want = plain(*(t.cpu() for t in inputs), None)
    found = [t.cpu() for t in ring(*inputs, None, cp)]
    assert worst(found, want) < {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-5}[dtype]
