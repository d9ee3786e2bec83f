"""Phases of a step by hand. What is measured is held against them in `tests/verify/test_memory.py`."""

from __future__ import annotations

import pytest

from hpctrain.config.load import load
from hpctrain.layout.activations import ON_CPU, OURS
from hpctrain.layout.layout import Layout
from hpctrain.layout.parameters import parameter_specs
from hpctrain.layout.phases import Parts, phases

PLAIN = ("parallel.tp=1", "train.precision=float32", "data.document_mask=false")
TOKENS = 16 * 256
"""Of a micro-batch of llama-tiny, whose hidden size is 128 and whose vocabulary is of 257."""


def test_logits_and_their_chunk() -> None:
    """All are one chunk on a GPU; backward adds their gradient."""
    config, one = load("llama-tiny", [*PLAIN, "model.vocab=1024"]), 4 * TOKENS * 1024
    at = phases(config, Layout()).at
    assert [at[name].logits for name in ("start", "forward", "backward", "step")] == [0, 2 * one, 3 * one, 0]


def test_hidden_states_on_their_way() -> None:
    """Two that a stage receives; and a whole sequence with its parts, which sp gathers."""
    config, hidden = load("llama-tiny", [*PLAIN, "parallel.pp=2"]), 4 * TOKENS * 128
    assert phases(config, Layout(pp=2)).at["forward"].buffers == 2 * hidden
    config = load("llama-tiny", [*PLAIN, "parallel.tp=2", "parallel.sp=true"])
    assert phases(config, Layout(tp=2, sp=True)).at["forward"].buffers == 2 * hidden
    assert phases(config, Layout(tp=2)).at["forward"].buffers == 0


def test_experts_work_with_columns_of_their_own() -> None:
    """Not with those of an MLP that no layer has; all columns that a token goes through, and of a shared MLP."""
    moe = (
        "parallel.tp=1",
        "train.recompute=full",
        "sharding.engine=none",
        "sharding.stage=0",
        "data.document_mask=false",
    )

    def at(*more: str) -> dict[str, Parts]:
        return phases(load("moe-tiny", [*moe, *more]), Layout()).at

    assert at("model.ffn=64") == at("model.ffn=4096")
    config = load("moe-tiny", moe)
    assert config.model.moe is not None and config.model.moe.top_k == 2
    tokens = config.train.micro_batch * config.data.seq
    more = at("model.moe.top_k=3")["forward"].activations - at()["forward"].activations
    assert more == 4 * tokens * 4 * config.model.expert_width


@pytest.mark.parametrize(("stage", "buckets", "units", "between"), [(1, 1, 0, 0), (2, 0, 0, 0), (3, 1, 2, 1)])
def test_what_zero_holds_in_a_forward(stage: int, buckets: int, units: int, between: int) -> None:
    """A bucket of 1 MiB, and of stage 3 two of the largest unit, a layer; of it alone gradients stay between steps."""
    config = load("llama-tiny", [*PLAIN, f"sharding.stage={stage}", "sharding.bucket_mib=1"])
    specs = parameter_specs(config.model)
    layer = sum(spec.numel for spec in specs if spec.layer == 0)
    at = phases(config, Layout(dp=2)).at
    assert at["forward"].buffers == buckets * (1 << 20) + units * 4 * layer
    assert at["start"].gradients == between * 4 * -(-sum(spec.numel for spec in specs) // 2)


def test_a_copy_of_the_embedding_is_held_with_its_gradient() -> None:
    """In the last of two stages, of a model whose head it is."""
    tied, apart = (
        phases(load("llama-tiny", [*PLAIN, "parallel.pp=2", f"model.tied={tied}"]), Layout(pp=2), 1).at["start"]
        for tied in ("true", "false")
    )
    assert tied.weights == apart.weights and tied.gradients == apart.gradients
    assert apart.optimizer - tied.optimizer == 8 * 257 * 128


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
