"""What DeepSpeed is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpctrain.config.schema import RunConfig
from hpctrain.config.validate import validate
from hpctrain.errors import ConfigError
from hpctrain.sharding.deepspeed.config import deepspeed_config


def make(stage: int, sharding: dict[str, Any] | None = None, **train: Any) -> RunConfig:
    return RunConfig.model_validate(
        {"sharding": {"stage": stage, "bucket_mib": 1, **(sharding or {})}, "train": {"micro_batch": 3, **train}}
    )


def test_stage_one_in_float32() -> None:
    assert deepspeed_config(make(1)) == {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": 1.0,
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1, "torch_adam": True},
        },
        "zero_optimization": {
            "stage": 1,
            "contiguous_gradients": True,
            "reduce_scatter": True,
            "reduce_bucket_size": 262144,
            "allgather_bucket_size": 262144,
            "overlap_comm": False,
        },
        "steps_per_print": None,
    }


def test_stage_three_in_fp16() -> None:
    found = deepspeed_config(make(3, precision="fp16", loss_scale=1024.0))
    assert found["fp16"] == {"enabled": True, "loss_scale": 0}
    assert "bf16" not in found
    assert found["zero_optimization"] == {
        "stage": 3,
        "contiguous_gradients": True,
        "reduce_scatter": True,
        "reduce_bucket_size": 262144,
        "allgather_bucket_size": 262144,
        "overlap_comm": True,
        "stage3_param_persistence_threshold": 128,
        "stage3_prefetch_bucket_size": 262144,
        "stage3_max_reuse_distance": 0,
        # a layer of the default model: four matrices 128 x 128, three of 128 x 512, two norms
        "stage3_max_live_parameters": 2 * (4 * 128 * 128 + 3 * 128 * 512 + 2 * 128),
        "memory_efficient_linear": False,
    }


def test_bf16_without_overlap() -> None:
    found = deepspeed_config(make(2, precision="bf16", overlap=False))
    assert found["bf16"] == {"enabled": True} and "fp16" not in found
    assert found["zero_optimization"]["overlap_comm"] is False


@pytest.mark.parametrize(
    ("sharding", "train", "path"),
    [
        ({"stage": 1}, {"precision": "float64"}, "train.precision"),
        ({"engine": "deepspeed", "stage": 0}, {}, "sharding.stage"),
        ({"stage": 0, "offload": {"optimizer": "cpu"}}, {}, "sharding.offload.optimizer"),
        ({"stage": 2, "offload": {"params": "nvme"}}, {}, "sharding.offload.params"),
    ],
)
def test_what_it_cannot_do_is_refused_before(sharding: dict[str, Any], train: dict[str, Any], path: str) -> None:
    config = RunConfig.model_validate({"sharding": sharding, "train": train})
    with pytest.raises(ConfigError) as error:
        validate(config, world=1)
    assert error.value.path == path


def test_the_pinned_version_is_the_one_that_is_installed_for_users() -> None:
    from hpctrain.sharding.deepspeed.patches import VERSION

    setup = Path(__file__).parents[2] / "setup.cfg"
    assert f"deepspeed=={VERSION}\n" in setup.read_text()
