"""Adapters, weights in 4 bits and paged moments on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hpctrain.model import moe, nf4
from hpctrain.model.adapters import AdaptedExperts
from hpctrain.model.packed import Packed, packed_weights
from hpctrain.sharding.paged import paged_zeros_like
from hpctrain.verify.samples import global_batch
from tests.adapting import Given, adapted, plain_model, reference
from tests.training import LR, make_mesh

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)
CPU = torch.device("cpu")


def losses(config: Any) -> list[float]:
    """Three steps of engine `none` on this process' GPU."""
    from dataclasses import replace

    from hpctrain.parallel.parallelize import build_chunks
    from hpctrain.sharding.build import build_engine

    mesh = replace(make_mesh(config, 1), device=CUDA)
    chunks, records = build_chunks(config, mesh)
    engine = build_engine(chunks, records, mesh, config)
    engine.load(Given(config))
    out = []
    for step in range(3):
        batch = global_batch(config, step)
        parts = batch.split(config.train.micro_batch)
        engine.begin_step(batch.valid_tokens, len(parts))
        total = 0.0
        for part in parts:
            ticket = engine.forward(0, part.to(CUDA))
            total += ticket.output.item()
            engine.backward(ticket)
        engine.step(LR[step])
        out.append(total / batch.valid_tokens)
    engine.close()
    return out


@pytest.mark.parametrize("kind", ["lora", "dora", "qlora"])
def test_float64_on_a_gpu_equals_the_reference(ranks: Any, kind: str) -> None:
    assert ranks(0, losses, adapted(kind))[0] == pytest.approx(reference(adapted(kind)).losses, rel=1e-9)


@pytest.mark.parametrize("kind", ["lora", "qlora"])
def test_paged_moments_are_the_same_moments(ranks: Any, kind: str) -> None:
    found = [
        ranks(0, losses, adapted(kind, optimizer=dict(paged=paged), train=dict(precision="bf16")))[0]
        for paged in (False, True)
    ]
    assert found[0] == found[1]


def test_paged_memory_is_there_when_the_gpu_is_full(ranks: Any) -> None:
    assert ranks(0, crowded) == [True]


def crowded() -> bool:
    """With 64 MiB left, 256 MiB more hold what is written to them."""
    torch.cuda.set_device(CUDA)
    free, _ = torch.cuda.mem_get_info()
    full = torch.empty(max(0, free - (64 << 20)), dtype=torch.uint8, device=CUDA)
    paged = paged_zeros_like(torch.empty(1, device=CUDA).expand(64 << 20))
    paged.add_(1.5)
    return bool((paged == 1.5).all()) and full.numel() > 0


def test_bits_do_not_depend_on_the_device_nor_on_who_unpacks() -> None:
    values = torch.randn(96, 512, generator=torch.Generator().manual_seed(0))
    held = {}
    for device in (CPU, CUDA):
        held[device] = Packed(values.shape, 64)
        held[device].fill(lambda start, shape: values[start[0] : start[0] + shape[0]], device)
    assert all(map(torch.equal, held[CPU].tensors(), (t.cpu() for t in held[CUDA].tensors())))
    codes, magnitudes = nf4.quantize(values.to(CUDA), 64)
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(held[CPU].values(dtype), held[CUDA].values(dtype).cpu())
        ours = nf4.dequantize(codes.cpu(), magnitudes.cpu(), dtype)
        assert torch.equal(nf4.dequantize(codes, magnitudes, dtype).cpu(), ours)


@pytest.mark.parametrize("kind", ["lora", "qlora"])
def test_experts_with_adapters_by_the_kernel_are_those_one_by_one(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    shape = dict(hidden=64, moe=dict(experts=4, top_k=2, ffn=32))
    config = adapted(kind, adapter=dict(targets=["experts"], rank=8, block=8 if kind == "qlora" else 64), model=shape)
    model = plain_model(config)
    for packed in packed_weights(model).values():
        packed.fill(lambda start, shape: torch.randn(shape, generator=torch.Generator().manual_seed(sum(start))), CUDA)
    experts = next(m for m in model.modules() if isinstance(m, AdaptedExperts)).to(CUDA, torch.bfloat16)
    x, counts = torch.randn(40, 64, device=CUDA, dtype=torch.bfloat16), torch.tensor([13, 0, 20, 7], device=CUDA)
    found = []
    for kernel in (moe.has_kernel, lambda *_: False):
        monkeypatch.setattr(moe, "has_kernel", kernel)
        given = x.clone().requires_grad_()
        out = experts(given, counts)
        out.square().sum().backward()
        found.append((out.detach(), given.grad))
    for one, other in zip(*found):
        assert torch.allclose(one, other, rtol=3e-2, atol=3e-2 * float(other.abs().max()))
