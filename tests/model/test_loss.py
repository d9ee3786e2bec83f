"""The loss goes over logits in chunks: none of its intermediate results is wider and as large as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from hpctrain.model import loss as module
from hpctrain.model.batch import IGNORED
from hpctrain.model.loss import CrossEntropy
from hpctrain.telemetry.live import LiveBytes


class Results(TorchDispatchMode):
    """Notes every tensor that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[torch.Tensor] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        self.made += [t for t in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(t, torch.Tensor)]
        return out


@pytest.mark.parametrize("chunk", [1, 100, 161, 10**6])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_any_chunk_is_the_loss_of_torch(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, chunk: int) -> None:
    monkeypatch.setattr(module, "CHUNK_OF_CPU", chunk)
    generator = torch.Generator().manual_seed(1)
    logits = (5 * torch.randn(3, 7, 53, generator=generator)).to(dtype).requires_grad_()
    labels = torch.randint(0, 53, (3, 7), generator=generator).masked_fill(torch.arange(7) % 3 == 1, IGNORED)
    got = CrossEntropy(0.1, 1e-3)(logits, labels)
    (gradient,) = torch.autograd.grad(2 * got, logits)
    wide = logits.detach().double().requires_grad_()
    want = F.cross_entropy(wide.flatten(0, 1), labels.flatten(), reduction="sum", label_smoothing=0.1)
    want = want + 1e-3 * wide.logsumexp(-1).square()[labels != IGNORED].sum()
    (expected,) = torch.autograd.grad(2 * want, wide)
    assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32) and gradient.dtype == dtype
    close = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2**-8}[dtype]
    torch.testing.assert_close(got.double(), want, rtol=min(close, 1e-5), atol=0.0)
    torch.testing.assert_close(gradient.double(), expected, rtol=close, atol=close)


def test_logits_are_never_whole_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_OF_CPU", 1000)
    logits = torch.randn(2, 32, 500).bfloat16().requires_grad_()
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with Results() as results:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = CrossEntropy(0.1, 1e-3)(logits, torch.randint(0, 500, (2, 32)))
        loss.backward()
    large = [t for t in results.made if t.numel() > 1000]
    assert {t.dtype for t in large} == {torch.bfloat16}, "beside chunks there are logits and their gradient"
    assert sum(t.numel() * t.element_size() for t in kept) < 2.1 * logits.numel(), "the logits, and few numbers a token"


@pytest.mark.parametrize(("dtype", "copies"), [(torch.float32, 1), (torch.bfloat16, 2)])
def test_one_chunk_is_there_at_a_time(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, copies: int) -> None:
    """Besides the logits' gradient: one of 8 in float32, and what it is made of if that is another tensor."""
    monkeypatch.setattr(module, "CHUNK_OF_CPU", 100 * 501)
    logits = torch.randn(2, 400, 501, dtype=dtype, requires_grad=True)
    with LiveBytes() as live:
        loss = CrossEntropy()(logits, torch.randint(501, (2, 400)))
        forward, before, live.peak = live.peak - logits.nbytes, live.now(), 0
        loss.backward()
    chunk, of_tokens = 100 * 501 * 4, 10 * 800 * 4
    assert chunk * copies <= forward < chunk * copies + 2 * of_tokens
    assert chunk * copies <= live.peak - before - logits.nbytes < chunk * copies + of_tokens
