"""PyTorch's own: DistributedDataParallel, FSDP2, DTensor tensor parallelism, torch.distributed.pipelining."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.ours import random_tokens
from benchmarks.peers.llama import Llama, adamw, cross_entropy
from benchmarks.rounds import Work
from hpctrain.config.schema import RunConfig


def alone(config: RunConfig) -> Work:
    """One process."""
    model = Llama(config)
    return Work(_plain_step(config, model, model, 0, 1), _count(model))


def ddp(config: RunConfig) -> Work:
    """Gradients are reduced beside the backward of the last micro-batch."""
    from torch.nn.parallel import DistributedDataParallel

    model = Llama(config)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    world = dist.get_world_size()
    return Work(_plain_step(config, model, wrapped, dist.get_rank(), world), _count(model) / world)


def fully_sharded(config: RunConfig, reshard: bool) -> Work:
    """FSDP2 as PyTorch's tutorial has it: every block, and then the model; weights let go after forward or kept."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    world = dist.get_world_size()
    model, mesh = Llama(config), init_device_mesh("cpu", (world,))
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh, reshard_after_forward=reshard)
    return Work(_plain_step(config, model, model, dist.get_rank(), world), _count(model) / world)


def tensor_parallel(config: RunConfig, sequence: bool) -> Work:
    """The plan of PyTorch's tutorial for Llama, with loss_parallel; with SequenceParallel norms or without."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import loss_parallel, parallelize_module

    world = dist.get_world_size()
    model: nn.Module = Llama(config)
    parallelize_module(model, init_device_mesh("cpu", (world,)), _plan(config.model.layers, sequence))
    held = list(model.parameters())
    whole = sum(p.numel() for p in held if not isinstance(p, DTensor))
    cut = sum(p.to_local().numel() for p in held if isinstance(p, DTensor) and any(d.is_shard() for d in p.placements))
    copies = sum(p.numel() for p in held if isinstance(p, DTensor) and not any(d.is_shard() for d in p.placements))
    step = _plain_step(config, model, model, 0, 1, loss_parallel)
    return Work(step, cut + (whole + copies) / world)


def _plan(layers: int, sequence: bool) -> dict[str, Any]:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
    )

    outside = Shard(1) if sequence else Replicate()
    plan: dict[str, Any] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=outside),
        "output.head": ColwiseParallel(input_layouts=outside, output_layouts=Shard(-1), use_local_output=False),
    }
    if sequence:
        plan["output.norm"] = SequenceParallel()
    for i in range(layers):
        at = f"blocks.{i}"
        plan |= {f"{at}.attention.{name}": ColwiseParallel() for name in "qkv"}
        plan |= {f"{at}.ffn.{name}": ColwiseParallel() for name in ("gate", "up")}
        plan |= {f"{at}.{name}": RowwiseParallel(output_layouts=outside) for name in ("attention.out", "ffn.down")}
        if sequence:
            gather = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
            plan |= {f"{at}.{name}": gather for name in ("attention", "ffn")}
            plan |= {f"{at}.{name}": SequenceParallel() for name in ("attention_norm", "ffn_norm")}
    return plan


def pipeline(config: RunConfig, schedule: str, chunks: int) -> Work:
    """A schedule of torch.distributed.pipelining, with `chunks` stages a rank; those of ZBV go there and back."""
    from torch.distributed import pipelining

    rank, world = dist.get_rank(), dist.get_world_size()
    number = world * chunks
    there_and_back = schedule == "ScheduleZBVZeroBubble"
    mine = [rank, number - 1 - rank] if there_and_back else [rank + world * i for i in range(chunks)]
    sizes = [config.model.layers * (i + 1) // number - config.model.layers * i // number for i in range(number)]
    parts = [Llama(config, sizes[i], i == 0, i == number - 1) for i in mine]
    device = torch.device("cpu")
    stages = [pipelining.PipelineStage(part, i, number, device) for part, i in zip(parts, mine)]
    make = getattr(pipelining.schedules, schedule)
    many = issubclass(make, pipelining.schedules.PipelineScheduleMulti)
    micro_batches = config.train.global_batch // config.train.micro_batch
    runner = make(stages if many else stages[0], n_microbatches=micro_batches, loss_fn=cross_entropy)
    held = [p for part in parts for p in part.parameters()]
    optimizer = adamw(held, config.optimizer)
    inputs, labels = random_tokens(config)

    def step() -> float | None:
        optimizer.zero_grad()
        losses: list[Tensor] = []
        given = (inputs,) if 0 in mine else ()
        runner.step(*given, **({"target": labels, "losses": losses} if number - 1 in mine else {}))
        clip(held, config.optimizer.clip, across=True)
        optimizer.step()
        return torch.stack(losses).mean().item() if losses else None

    return Work(step, float(sum(p.numel() for p in held)))


def _plain_step(
    config: RunConfig,
    model: nn.Module,
    wrapped: nn.Module,
    part: int,
    parts: int,
    context: Callable[[], Any] | None = None,
) -> Callable[[], float]:
    """The loop over micro-batches that anybody would write."""
    optimizer = adamw(model.parameters(), config.optimizer)
    inputs, labels = random_tokens(config, part, parts)
    pieces = list(zip(inputs.split(config.train.micro_batch), labels.split(config.train.micro_batch)))

    def step() -> float:
        optimizer.zero_grad()
        total = 0.0
        for i, (x, y) in enumerate(pieces):
            quiet = getattr(wrapped, "no_sync", nullcontext) if i + 1 < len(pieces) else nullcontext
            with quiet(), (context or nullcontext)():
                loss = cross_entropy(wrapped(x), y) / len(pieces)
                loss.backward()
            total += float(getattr(loss, "full_tensor", lambda loss=loss: loss)().detach())
        clip(model.parameters(), config.optimizer.clip)
        optimizer.step()
        return total

    return step


def clip(parameters: Iterable[nn.Parameter], limit: float, across: bool = False) -> None:
    """torch's clipping by the global norm; of DTensors and tensors together, and over the stages of a pipeline."""
    from torch.distributed.tensor import DTensor

    held = [p for p in parameters if p.grad is not None]
    kinds = [[p for p in held if isinstance(p, DTensor) == kind] for kind in (False, True)]
    norms = [nn.utils.get_total_norm([p.grad for p in kind if p.grad is not None]) for kind in kinds if kind]
    norm = torch.stack([n.full_tensor() if isinstance(n, DTensor) else n for n in norms]).norm()
    if across:
        squares = norm.square()
        dist.all_reduce(squares)
        norm = squares.sqrt()
    for kind in kinds:
        nn.utils.clip_grads_with_norm_(kind, limit, norm)


def _count(model: nn.Module) -> float:
    return float(sum(p.numel() for p in model.parameters()))
