"""FLOPs against hand numbers and published ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.config.load import load
from hpctrain.config.schema import ModelConfig, MoeConfig
from hpctrain.layout import parameters
from hpctrain.layout.parameters import matmul_weights
from hpctrain.telemetry.flops import Throughput, flops_per_token, peak_flops

LLAMA_8B = ModelConfig(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256)
LLAMA_70B = ModelConfig(layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28672, vocab=128256)
LLAMA_405B = ModelConfig(layers=126, hidden=16384, heads=128, kv_heads=8, ffn=53248, vocab=128256)
PEER = ModelConfig(layers=4, hidden=256, heads=8, kv_heads=4, ffn=688, vocab=4096)


def test_llama_3_8b_in_both_definitions() -> None:
    flops = flops_per_token(LLAMA_8B, 8192)
    assert flops.palm / 1e9 == pytest.approx(57.91, abs=0.005)
    assert flops.causal / 1e9 == pytest.approx(51.47, abs=0.005)


def test_weights_counted_by_hand() -> None:
    q_and_output, k_and_v, mlp = 2 * 256 * 256, 2 * 128 * 256, 3 * 256 * 688
    assert matmul_weights(PEER) == 4 * (q_and_output + k_and_v + mlp) + 4096 * 256 == 3948544
    assert flops_per_token(PEER, 256).causal == 6 * 3948544 + 6 * 4 * 256 * 256
    assert flops_per_token(PEER, 256).causal / 1e6 == pytest.approx(25.3, abs=0.05)


@pytest.mark.parametrize("model, low, high", [(LLAMA_8B, 51.4, 51.6), (LLAMA_70B, 439, 453), (LLAMA_405B, 2482, 2556)])
def test_causal_is_what_published_throughputs_imply(model: ModelConfig, low: float, high: float) -> None:
    assert low <= flops_per_token(model, 8192).causal / 1e9 <= high


def test_gpt_palm_is_the_closed_form_of_the_megatron_papers() -> None:
    layers, hidden, vocab, seq = 96, 12288, 51200, 2048
    gpt = ModelConfig(
        layers=layers,
        hidden=hidden,
        heads=96,
        vocab=vocab,
        norm="layernorm",
        position="learned",
        activation="gelu",
        bias=True,
        tied=True,
    )
    assert flops_per_token(gpt, seq).palm == 72 * layers * hidden**2 + 12 * layers * hidden * seq + 6 * vocab * hidden


@pytest.mark.parametrize(
    ("name", "active"),
    [("mixtral-8x7b", 12_879_925_248), ("qwen3-moe-30b-a3b", 3_353_032_704)],
)
def test_a_token_uses_a_part_of_the_experts(name: str, active: int) -> None:
    """12.9B of Mixtral (arXiv 2401.04088) and 3.3B of Qwen3-30B-A3B (2505.09388), embeddings included there."""
    model = load(name).model
    assert sum(parameters.active(spec, model) for spec in parameters.parameter_specs(model)) == active
    norms = sum(spec.numel for spec in parameters.parameter_specs(model) if not spec.decay)
    assert matmul_weights(model) + model.vocab * model.hidden + norms == active


def test_shared_and_dense_weights_count_whole() -> None:
    moe = MoeConfig(experts=8, top_k=3, ffn=5, shared_ffn=7, dense_layers=1)
    model = ModelConfig(layers=2, hidden=10, heads=2, ffn=30, vocab=11, moe=moe)
    attention, dense, routed = 4 * 10 * 10, 3 * 10 * 30, 8 * 10 + 3 * 3 * 10 * 5 + 3 * 10 * 7
    assert matmul_weights(model) == 2 * attention + dense + routed + 11 * 10


def test_head_width_apart_from_hidden() -> None:
    wide = ModelConfig(layers=1, hidden=64, heads=4, kv_heads=1, head_dim=32, ffn=10, vocab=11)
    weights = 2 * 128 * 64 + 2 * 32 * 64 + 3 * 10 * 64 + 11 * 64
    assert matmul_weights(wide) == weights
    assert flops_per_token(wide, 100).palm == 6 * weights + 12 * 128 * 100


@given(
    layers=st.integers(1, 5),
    heads=st.sampled_from([1, 2, 6]),
    width=st.integers(1, 9),
    seq=st.integers(1, 10**6),
    vocab=st.integers(1, 999),
)
def test_definitions_differ_by_half_of_attention_and_ties_change_nothing(
    layers: int, heads: int, width: int, seq: int, vocab: int
) -> None:
    untied = ModelConfig(layers=layers, hidden=7, heads=heads, head_dim=width, vocab=vocab)
    flops = flops_per_token(untied, seq)
    assert flops.palm - flops.causal == 6 * layers * heads * width * seq
    assert flops.causal > 6 * matmul_weights(untied)
    assert flops_per_token(untied.model_copy(update={"tied": True}), seq) == flops


@pytest.mark.parametrize(
    "name, expected",
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A100 80GB PCIe", 312e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA B200", 2.25e15),
        ("NVIDIA GB200", 2.5e15),
        ("AMD Instinct MI300X", 1300e12),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", None),
        ("NVIDIA GeForce RTX 4090", None),
        ("Tesla V100-SXM2-32GB", None),
        ("cpu", None),
        ("", None),
    ],
)
def test_peaks(name: str, expected: float | None) -> None:
    assert peak_flops(name, "bf16") == expected


def test_peaks_depend_on_precision() -> None:
    assert peak_flops("Tesla V100-SXM2-32GB", "fp16") == 125e12
    assert peak_flops("Tesla V100-PCIE-16GB", "fp16") == 112e12
    assert peak_flops("NVIDIA H100 80GB HBM3", "fp16") == 989e12
    assert peak_flops("NVIDIA H100 80GB HBM3", "float32") is None
    assert peak_flops("NVIDIA H100 80GB HBM3", "float64") is None


def test_rates() -> None:
    run = Throughput(tokens_per_step=8 * 8192, devices=8, flops=flops_per_token(LLAMA_8B, 8192), peak=989e12)
    assert run.tps(2.0) == 4096
    mfu = run.mfu(2.0)
    assert mfu is not None
    assert mfu.palm == pytest.approx(4096 * 57.91e9 / 989e12, rel=1e-3)
    assert mfu.causal == pytest.approx(4096 * 51.47e9 / 989e12, rel=1e-3)
    assert Throughput(4096, 2, run.flops).mfu(1.0) is None
