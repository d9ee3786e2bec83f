"""Training on one GPU. Two or more GPUs add a tensor-parallel run over NCCL."""

from __future__ import annotations

import os

import pytest
import torch

from hpctrain.layout.layout import Layout
from hpctrain.layout.placement import replica_groups
from hpctrain.parallel.mesh import build_mesh
from hpctrain.parallel.parallelize import build_model
from hpctrain.sharding.build import build_engine, takes_values
from tests.training import LR, global_batch, make_config, reference

pytestmark = pytest.mark.gpu


def losses(config, world: int, port: int = 0) -> list[float]:
    """Three steps on this process' GPU; with a port, in an NCCL group that meets there."""
    from hpctrain.parallel.comm import all_reduce_

    rank = int(os.environ.get("RANK", 0))
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    if port:
        torch.distributed.destroy_process_group()
        store = torch.distributed.TCPStore("127.0.0.1", port, world, rank == 0)
        torch.distributed.init_process_group("nccl", store=store, rank=rank, world_size=world, device_id=device)
    layout = Layout.of(config.parallel, world)
    mesh = build_mesh(layout, device, replica_groups(config.model, layout), 60)
    model, records = build_model(config, mesh, materialize=takes_values(config))
    engine = build_engine([model], records, mesh, config)
    out = []
    for step in range(3):
        batch = global_batch(config, step)
        mine = batch.split(config.train.global_batch // mesh.dp.size)[mesh.dp.index].split(config.train.micro_batch)
        engine.begin_step(batch.valid_tokens, len(mine))
        total = torch.zeros((), dtype=torch.float64, device=device)
        for micro_batch in mine:
            ticket = engine.forward(0, micro_batch.to(device))
            total += ticket.output.detach()
            engine.backward(ticket)
        engine.step(LR[step])
        out.append(all_reduce_(total, mesh.loss).item() / batch.valid_tokens)
    engine.close()
    return out


@pytest.mark.parametrize("model", [{}, dict(position="learned", norm="layernorm", bias=True, dropout=0.0, tied=True)])
def test_float64_on_a_gpu_equals_the_reference(ranks, model):
    config = make_config(model=model)
    assert ranks(0, losses, config, 1)[0] == pytest.approx(reference(config).losses, rel=1e-9)


@pytest.mark.parametrize("model", [{}, dict(position="learned", norm="layernorm", bias=True, dropout=0.0, tied=True)])
@pytest.mark.parametrize("place", ["none", "cpu"])
def test_fsdp2_in_float64_on_a_gpu_equals_the_reference(ranks, model, place):
    config = make_config(model=model, sharding=dict(engine="fsdp", offload=dict(params=place, optimizer=place)))
    assert ranks(0, losses, config, 1)[0] == pytest.approx(reference(config).losses, rel=1e-9)


@pytest.mark.parametrize("precision,tolerance", [("float32", 1e-4), ("bf16", 3e-2), ("fp16", 1e-2)])
def test_fsdp2_in_other_precisions_stays_beside_it(ranks, precision, tolerance):
    config = make_config(train=dict(precision=precision, loss_scale=256.0), sharding=dict(engine="fsdp"))
    assert ranks(0, losses, config, 1)[0] == pytest.approx(reference(config).losses, rel=tolerance)


@pytest.mark.parametrize("precision,tolerance", [("float32", 1e-4), ("bf16", 3e-2), ("fp16", 1e-2)])
def test_other_precisions_stay_beside_it(ranks, precision, tolerance):
    config = make_config(train=dict(precision=precision, loss_scale=256.0))
    assert ranks(0, losses, config, 1)[0] == pytest.approx(reference(config).losses, rel=tolerance)


@pytest.mark.parametrize("tp", [1, 2])
def test_two_gpus_equal_the_reference(ranks, tp, free_port):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    config = make_config(parallel=dict(tp=tp))
    for got in ranks(2, losses, config, 2, free_port):
        assert got == pytest.approx(reference(config).losses, rel=1e-9)


@pytest.mark.parametrize("counts", [[5, 0, 40, 19], [64, 0, 0, 0]])
def test_experts_by_the_kernel_equal_those_one_by_one(counts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Output and gradients in bf16, with experts of no token and of all."""
    from hpctrain.config.schema import ModelConfig, MoeConfig
    from hpctrain.model import moe

    made = moe.Experts(ModelConfig(hidden=64, moe=MoeConfig(experts=4, ffn=96))).bfloat16().cuda()
    generator = torch.Generator("cuda").manual_seed(0)
    for p in made.parameters():
        p.data.normal_(0.0, 0.1, generator=generator)
    x = torch.randn(64, 64, device="cuda", generator=generator).bfloat16().requires_grad_()
    found = []
    for kernel in (moe.has_kernel, lambda *_: False):
        monkeypatch.setattr(moe, "has_kernel", kernel)
        out = made(x, torch.tensor(counts, device="cuda"))
        found.append([out, *torch.autograd.grad(out.float().square().sum(), [x, *made.parameters()])])
    for a, b in zip(*found):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2 * float(b.abs().max()))
