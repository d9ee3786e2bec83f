"""Phases of a step by hand. What is measured is held against them in `tests/verify/test_memory.py`."""

from __future__ import annotations

import pytest

from hpctrain.config.load import load
from hpctrain.layout.activations import ON_CPU, OURS
from hpctrain.layout.layout import Layout
from hpctrain.layout.parameters import parameter_specs
from hpctrain.layout.phases import phases


def test_temporaries_of_the_update() -> None:
    """float32, one rank: on a CPU two of the largest parameter, on a GPU one of all, which are updated together."""
    config = load("llama-tiny", ["sharding.engine=none", "sharding.stage=0", "train.precision=float32"])
    numels = [spec.numel for spec in parameter_specs(config.model)]
    assert phases(config, Layout(), 0, ON_CPU).at["step"].buffers == 2 * 4 * max(numels)
    assert phases(config, Layout(), 0, OURS).at["step"].buffers == 4 * sum(numels)


def test_temporaries_of_fsdp() -> None:
    """On a GPU one of the rank's part of all; what a backward reduces last is less."""
    config = load("llama-tiny", ["sharding.engine=fsdp", "train.precision=float32", "model.vocab=64"])
    shard = sum(-(-spec.numel // 2) for spec in parameter_specs(config.model))
    assert phases(config, Layout(dp=2), 0, OURS).at["step"].buffers == 4 * shard


@pytest.mark.parametrize(("kernel", "temporaries"), [("true", 1), ("false", 0)])
def test_temporaries_of_zero(kernel: str, temporaries: int) -> None:
    """bf16, stage 2 on a GPU: a gradient is there as it is."""
    config = load("llama-tiny", ["sharding.stage=2", "train.precision=bf16", f"sharding.torch_adam={kernel}"])
    shard = -(-sum(spec.numel for spec in parameter_specs(config.model)) // 2)
    assert phases(config, Layout(dp=2), 0, OURS).at["step"].buffers == temporaries * 4 * shard
