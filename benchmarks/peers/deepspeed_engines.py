"""DeepSpeed's own: ZeRO on the plain module, its pipeline engine, its automatic tensor parallelism.

Settings are its defaults but for buckets of our size; its shared-memory op, which training does not use and which
takes minutes to compile, is left out, as in our own engine.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.ours import random_tokens
from benchmarks.peers.llama import Block, Llama, Output, adamw, cross_entropy, draw
from benchmarks.rounds import Work
from hpctrain.config.schema import RunConfig
from hpctrain.sharding.deepspeed.config import zero_section
from hpctrain.sharding.deepspeed.engine import load_deepspeed
from hpctrain.sharding.deepspeed.ops import extensions_folder, obstacle, op_status


def zero(config: RunConfig, stage: int, lean: bool = False) -> Work:
    """ZeRO of a stage; `lean` lets gathered weights go as soon as ours does."""
    model = Llama(config)
    count, world = sum(p.numel() for p in model.parameters()), dist.get_world_size()
    size = int(config.sharding.bucket_mib * 2**20 / 4)
    section: dict[str, Any] = {"stage": stage, "reduce_bucket_size": size, "allgather_bucket_size": size}
    if lean:
        zero3 = config.sharding.model_copy(update={"engine": "deepspeed", "stage": stage})
        ours = zero_section(config.model_copy(update={"sharding": zero3}))
        section |= {key: value for key, value in ours.items() if key.startswith("stage3_")}
    settings = _settings(config, world) | {"zero_optimization": section}
    engine = _initialize(model, settings, adamw(model.parameters(), config.optimizer))
    return Work(_step(config, engine, dist.get_rank(), world), count / world)


def on_disk(config: RunConfig, folder: str) -> Work:
    """ZeRO 3 with weights and optimizer state on the disk of a folder, as its documentation sets it up: every size of
    buffers, blocks and queues is its default, and so the first billion weights stay in memory (`max_in_cpu`).

    torch's AdamW updates, as in ours; its own needs another op.

    Raises:
        RuntimeError: its op `async_io` is not built.
    """
    if (status := op_status("async_io", extensions_folder(), obstacle)).state != "built":
        raise RuntimeError(f"DeepSpeed's op async_io: {status.state} ({status.detail})")
    model = Llama(config)
    count, world = sum(p.numel() for p in model.parameters()), dist.get_world_size()
    away = {"device": "nvme", "nvme_path": folder}
    settings = _settings(config, world) | {
        "zero_optimization": {"stage": 3, "offload_optimizer": away, "offload_param": away},
        "zero_force_ds_cpu_optimizer": False,
    }
    engine = _initialize(model, settings, adamw(model.parameters(), config.optimizer))
    return Work(_step(config, engine, dist.get_rank(), world), count / world)


def tensor_parallel(config: RunConfig) -> Work:
    """AutoTP on transformers' Llama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    m, world = config.model, dist.get_world_size()
    shape = LlamaConfig(
        vocab_size=m.vocab,
        hidden_size=m.hidden,
        intermediate_size=m.ffn_width,
        num_hidden_layers=m.layers,
        num_attention_heads=m.heads,
        num_key_value_heads=m.kv,
        max_position_embeddings=config.data.seq,
        rms_norm_eps=m.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": m.rope_theta},
        use_cache=False,
        attn_implementation="sdpa",
    )
    model: Any = LlamaForCausalLM(shape)
    draw(model, m)
    whole = {name: p.numel() for name, p in model.named_parameters()}
    deepspeed = load_deepspeed(torch.device("cpu"))
    model = deepspeed.tp_model_init(model, tp_size=world, dtype=torch.float32)
    settings = _settings(config, 1) | {"tensor_parallel": {"autotp_size": world}}
    engine = _initialize(model, settings, adamw(model.parameters(), config.optimizer))
    count = sum(p.numel() / (1 if p.numel() < whole[name] else world) for name, p in model.named_parameters())
    return Work(_step(config, lambda x: engine(x).logits, 0, 1, engine), count)


def pipeline(config: RunConfig) -> Work:
    """PipelineModule: 1F1B, half of the layers on each rank."""
    deepspeed = load_deepspeed(torch.device("cpu"))
    from deepspeed.pipe import LayerSpec, PipelineModule

    m, seq = config.model, config.data.seq
    blocks = [LayerSpec(Block, m, seq) for _ in range(m.layers)]
    layers = [LayerSpec(nn.Embedding, m.vocab, m.hidden), *blocks, LayerSpec(Output, m)]
    model = PipelineModule(layers, num_stages=dist.get_world_size(), loss_fn=cross_entropy, partition_method="uniform")
    draw(model, m)
    count = float(sum(p.numel() for p in model.parameters()))
    engine = _initialize(model, _settings(config, 1), adamw(model.parameters(), config.optimizer))
    size = config.train.micro_batch
    inputs, labels = random_tokens(config)
    batches = itertools.cycle(list(zip(inputs.split(size), labels.split(size))))
    assert deepspeed is not None
    return Work(lambda: float(engine.train_batch(batches)), count)


def _settings(config: RunConfig, dp: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": config.train.micro_batch,
        "gradient_accumulation_steps": config.train.global_batch // config.train.micro_batch // dp,
        "gradient_clipping": config.optimizer.clip,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }


def _initialize(model: nn.Module, settings: dict[str, Any], optimizer: torch.optim.Optimizer) -> Any:
    deepspeed = load_deepspeed(torch.device("cpu"))
    return deepspeed.initialize(model=model, config=settings, optimizer=optimizer, dist_init_required=False)[0]


def _step(config: RunConfig, model: Any, part: int, parts: int, engine: Any = None) -> Any:
    engine = engine or model
    inputs, labels = random_tokens(config, part, parts)
    size = config.train.micro_batch
    pieces = list(zip(inputs.split(size), labels.split(size)))

    def step() -> float:
        total = 0.0
        for x, y in pieces:
            loss = cross_entropy(model(x), y)
            engine.backward(loss)
            engine.step()
            total += loss.item() / len(pieces)
        return total

    return step
