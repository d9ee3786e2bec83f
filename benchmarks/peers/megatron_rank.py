"""One rank of megatron-core on the CPU. Run by an interpreter that need not have anything of ours.

megatron-core is written for CUDA. What it needs of it is replaced: the current device, streams and events, `cuda` as
a device of new tensors, splits of an all-to-all, and its tracker of random states. Layers are its local ones, without
fused kernels.

Reads a line from stdin for every step; writes a line of JSON: first its share of the parameters, then losses.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist


def no_cuda() -> None:
    """Let code that asks for CUDA have the CPU."""
    device = torch.device("cpu")

    class Nothing:
        def __init__(self, *args: Any, **options: Any) -> None: ...

        def __getattr__(self, name: str) -> Any:
            return lambda *args, **options: self  # an event that a stream records can be waited for

        def __enter__(self) -> Nothing:
            return self

        def __exit__(self, *error: Any) -> None: ...

    def instead(value: Any) -> Any:
        return lambda *args, **options: value  # each its own: torch's compiler, when imported, lists them by identity

    cuda: Any = torch.cuda
    for name in ("synchronize", "set_device", "manual_seed", "set_rng_state"):
        setattr(cuda, name, instead(None))
    for name in ("current_stream", "default_stream"):
        setattr(cuda, name, instead(Nothing()))
    cuda.nvtx.range_push, cuda.nvtx.range_pop = instead(None), instead(None)
    cuda.current_device, cuda.get_rng_state = instead(device), instead(torch.get_rng_state())
    cuda.Stream, cuda.Event, cuda.stream = Nothing, type("Event", (Nothing,), {}), instead(contextlib.nullcontext())
    for name in ("empty", "zeros", "ones", "tensor", "full", "arange", "rand", "randn", "empty_like", "zeros_like"):
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    torch.Tensor.cuda = lambda self, *args, **options: self  # type: ignore[method-assign, assignment]


def splits_as_lists() -> None:
    """Of an all-to-all: megatron-core makes lists of them as it takes them from the GPU."""
    original = dist.all_to_all_single

    def call(out: Any, into: Any, *splits: Any, **options: Any) -> Any:
        named = {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
        return original(out, into, *(s.tolist() if isinstance(s, torch.Tensor) else s for s in splits), **named)

    dist.all_to_all_single = call


def _on_cpu(make: Any) -> Any:
    def made(*args: Any, **options: Any) -> torch.Tensor:
        if "cuda" in str(options.get("device")):
            options["device"] = "cpu"
        options.pop("pin_memory", None)
        out: torch.Tensor = make(*args, **options)
        return out

    return made


def build(s: dict[str, Any]) -> tuple[Any, Any, list[Any]]:
    """This rank's part of the model, its configuration, and the first call's batches."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import TransformerConfig

    sizes = {"tp": (2, 1), "pp": (1, 2), "ep": (1, 1)}[s["axis"]]
    experts, ep = s["experts"], 2 if s["axis"] == "ep" else 1
    parallel_state.initialize_model_parallel(*sizes, expert_model_parallel_size=ep)
    tracker = random.CudaRNGStatesTracker()
    tracker.fork = lambda *args, **options: contextlib.nullcontext()  # type: ignore[method-assign]
    random._CUDA_RNG_STATE_TRACKER = tracker
    random.get_cuda_rng_tracker = tensor_parallel.get_cuda_rng_tracker = lambda *args, **options: tracker
    random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True
    torch.manual_seed(0)
    of_experts = dict(
        num_moe_experts=experts["number"], moe_router_topk=experts["top_k"], moe_ffn_hidden_size=experts["ffn"],
        moe_token_dispatcher_type="alltoall", moe_router_load_balancing_type="none", moe_router_dtype="fp32",
    ) if experts else {}  # fmt: skip
    draw = lambda t: torch.nn.init.normal_(t, std=s["std"])  # noqa: E731
    config = TransformerConfig(
        num_layers=s["layers"], hidden_size=s["hidden"], num_attention_heads=s["heads"], num_query_groups=s["kv"],
        ffn_hidden_size=s["ffn"], normalization="RMSNorm", layernorm_epsilon=s["eps"], gated_linear_unit=True,
        activation_func=torch.nn.functional.silu, add_bias_linear=False, attention_dropout=0.0, hidden_dropout=0.0,
        use_cpu_initialization=True, init_method=draw, output_layer_init_method=draw, pipeline_dtype=torch.float32,
        tensor_model_parallel_size=sizes[0], pipeline_model_parallel_size=sizes[1],
        bias_activation_fusion=False, bias_dropout_fusion=False, masked_softmax_fusion=False, apply_rope_fusion=False,
        gradient_accumulation_fusion=False, persist_layer_norm=False, batch_p2p_comm=True,
        expert_model_parallel_size=ep, **of_experts,
    )  # fmt: skip
    model = GPTModel(
        config, get_gpt_layer_local_spec(experts and experts["number"], normalization="RMSNorm"), s["vocab"], s["seq"],
        pre_process=parallel_state.is_pipeline_first_stage(), post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=True, share_embeddings_and_output_weights=False, position_embedding_type="rope",
        rotary_base=s["theta"],
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    shape = (s["micro_batch"] * s["micro_batches"], s["seq"] + 1)
    tokens = torch.randint(0, s["vocab"], shape, generator=generator)
    batches = list(tokens.split(s["micro_batch"]))
    return model, config, batches[dist.get_rank() :: 2] if ep == 2 else batches


def steps(s: dict[str, Any]) -> Any:
    """First this rank's share of the parameters, then a loss a step, or None where it is not known."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    model, _, batches = build(s)
    held = list(model.parameters())
    ep, apart = s["axis"] == "ep", [not getattr(p, "allreduce", True) for p in held]  # experts
    cut = apart if ep else [getattr(p, "tensor_model_parallel", False) or s["axis"] == "pp" for p in held]
    yield sum(p.numel() / (1 if c else 2) for p, c in zip(held, cut))
    matrices, vectors = [p for p in held if p.ndim > 1], [p for p in held if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": s["decay"]}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=s["lr"], betas=tuple(s["betas"]), eps=s["adam_eps"])
    seq = s["seq"]
    places = torch.arange(seq).expand(s["micro_batch"], seq)
    mask = torch.ones(1, 1, seq, seq, dtype=torch.bool).triu(1)

    def forward(batches: Any, model: Any) -> Any:
        tokens = next(batches)
        out = model(tokens[:, :-1].contiguous(), places, mask, labels=tokens[:, 1:].contiguous())
        return out, lambda losses: (losses.mean(), {"loss": losses.detach().mean()})

    run = get_forward_backward_func()
    while True:
        optimizer.zero_grad()
        reduced = run(
            forward_step_func=forward, data_iterator=iter(batches), model=[model],
            num_microbatches=len(batches), seq_length=seq, micro_batch_size=s["micro_batch"], forward_only=False,
        )  # fmt: skip
        if ep:
            average(held, apart)
        squares = sum(p.grad.square().sum() for p, c in zip(held, cut) if c or dist.get_rank() == 0)
        dist.all_reduce(squares)
        torch.nn.utils.clip_grads_with_norm_(held, s["clip"], squares.sqrt())
        optimizer.step()
        yield sum(float(r["loss"]) for r in reduced) / len(reduced) if reduced else None


def average(held: list[Any], apart: list[bool]) -> None:
    """Gradients of the mean over both ranks' tokens; an expert's has seen all of them."""
    dense = [p.grad for p, a in zip(held, apart) if not a]
    flat = torch.cat([grad.reshape(-1) for grad in dense])
    dist.all_reduce(flat)
    for grad, part in zip(dense, flat.split([grad.numel() for grad in dense])):
        grad.copy_(part.view_as(grad))
    for p in held:
        p.grad.mul_(0.5)


def main() -> None:
    """Serve."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    no_cuda()
    splits_as_lists()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=dist.FileStore(settings["store"], world), rank=rank, world_size=world)
    made = steps(settings)
    parameters = next(made)
    dist.barrier()
    answers.write(json.dumps({"parameters": parameters}) + "\n")
    for _ in sys.stdin:
        answers.write(json.dumps({"loss": next(made)}) + "\n")


if __name__ == "__main__":
    main()
