"""What DeepSpeed is told: a pure function of our configuration."""

from __future__ import annotations

from typing import Any

from hpctrain.config.schema import RunConfig
from hpctrain.layout.parameters import largest_unit, parameter_specs


def deepspeed_config(config: RunConfig) -> dict[str, Any]:
    """The dictionary `deepspeed.initialize` takes.

    Gradients are reduced and accumulated in float32 whatever the weights are. A call of `step` is the only
    boundary DeepSpeed knows: the number of micro-batches and the loss divisor are ours.

    Combinations that this engine cannot honour have been refused by `hpctrain.config.validate`.
    """
    assert config.sharding.stage and config.train.precision != "float64", config.sharding
    optimizer, train = config.optimizer, config.train
    out: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": train.micro_batch,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": optimizer.clip,
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": optimizer.lr,
                "betas": [optimizer.beta1, optimizer.beta2],
                "eps": optimizer.eps,
                "weight_decay": optimizer.weight_decay,
                "torch_adam": config.sharding.torch_adam,
            },
        },
        "zero_optimization": zero_section(config),
        "steps_per_print": None,
    }
    if train.precision == "bf16":
        out["bf16"] = {"enabled": True}
    if train.precision == "fp16":
        # A dynamic scale; which, and when it changes, is for `LossScale` to say.
        out["fp16"] = {"enabled": True, "loss_scale": 0}
    return out


def zero_section(config: RunConfig) -> dict[str, Any]:
    """How state is sharded. Bucket sizes are in elements, reduced as float32 and gathered as weights are."""
    stage = config.sharding.stage
    bucket = max(2, int(config.sharding.bucket_mib * 2**20 / 4) // 2 * 2)
    out: dict[str, Any] = {
        "stage": stage,
        "contiguous_gradients": True,
        "reduce_scatter": True,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
        "overlap_comm": config.train.overlap and stage >= 2,
    }
    if stage == 3:
        lean = config.sharding.reshard_after_forward
        # What lasts from forward to backward of a micro-batch is more than all weights, in elements.
        everything = 2 * sum(spec.numel for spec in parameter_specs(config.model))
        out |= {
            # Vectors (norms, biases of the hidden width) stay gathered: they cost a message each and no memory.
            "stage3_param_persistence_threshold": config.model.hidden,
            "stage3_prefetch_bucket_size": bucket,
            # Lean: a gathered parameter is let go as soon as its module has run, and prefetching, which takes another
            # bucket at every module it passes, stops short of the whole model.
            "stage3_max_reuse_distance": 0 if lean else everything,
            "stage3_max_live_parameters": 2 * largest_unit(config.model, config.parallel.tp) if lean else everything,
            # DeepSpeed's own would replace torch.nn.functional.linear for the whole process.
            "memory_efficient_linear": False,
        }
        if config.sharding.offload.state:
            out["sub_group_size"] = everything  # one group of state for each of the optimizer's
        if (place := config.sharding.offload.params) != "none":
            # No file is made there: files, buffers and what stays in memory are ours (`weights.py`).
            out["offload_param"] = {"device": place, "nvme_path": "/", "max_in_cpu": 0, "pin_memory": True}
    return out
