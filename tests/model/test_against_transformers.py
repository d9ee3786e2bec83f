"""Logits equal Hugging Face's Llama, Mixtral, Qwen3-MoE and GPT-2 on the same random weights, at every position."""

from __future__ import annotations

import pytest
import torch

from hpctrain.config.schema import ModelConfig, MoeConfig, RopeScaling
from hpctrain.layout.parameters import parameter_specs
from hpctrain.layout.placement import Box
from hpctrain.model.random import initial_values
from hpctrain.model.transformer import Transformer

transformers = pytest.importorskip("transformers")


def make(model: ModelConfig) -> Transformer:
    """Weights large enough that attention is far from uniform, norms and biases not at 1 and 0."""
    ours = Transformer(model)
    specs = {s.name: s for s in parameter_specs(model)}
    generator = torch.Generator().manual_seed(1)
    for name, p in ours.named_parameters():
        p.data = initial_values(specs[name], 0, Box((0,) * p.ndim, (0,) * p.ndim, tuple(p.shape)))
        p.data += 0.15 * torch.randn(p.shape, generator=generator)
    return ours.eval()


LLAMA = {
    "model.embed_tokens": "embedding",
    "self_attn.q_proj": "attention.qkv.q",
    "self_attn.k_proj": "attention.qkv.k",
    "self_attn.v_proj": "attention.qkv.v",
    "self_attn.o_proj": "attention.output",
    "mlp.gate_proj": "mlp.inputs.gate",
    "mlp.up_proj": "mlp.inputs.up",
    "mlp.down_proj": "mlp.down",
    "post_attention_layernorm": "mlp_norm",
    "input_layernorm": "attention_norm",
    "model.layers": "layers",
    "model.norm": "norm",
    "lm_head": "head",
}


@pytest.mark.parametrize("scaling", [None, RopeScaling(original_max_seq=32)])
@pytest.mark.parametrize("tied", [False, True])
def test_llama(scaling, tied):
    model = ModelConfig(layers=2, hidden=48, heads=6, kv_heads=2, head_dim=10, ffn=72, vocab=101, tied=tied,
                        max_seq=128, rope_scaling=scaling)  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": model.rope_theta}
    if scaling:
        rope |= {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_seq,
        }
    config = transformers.LlamaConfig(
        vocab_size=101, hidden_size=48, intermediate_size=72, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, head_dim=10, rms_norm_eps=model.norm_eps, max_position_embeddings=128,
        tie_word_embeddings=tied, rope_parameters=rope, attn_implementation="eager",
    )  # fmt: skip
    ours, theirs = make(model), transformers.LlamaForCausalLM(config).eval()
    state = {}
    for name in theirs.state_dict():
        mine = name
        for old, new in LLAMA.items():
            mine = mine.replace(old, new)
        state[name] = ours.get_parameter("embedding.weight" if tied and mine == "head.weight" else mine).data
    theirs.load_state_dict(state)
    tokens = torch.randint(0, 101, (2, 100), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        mine, reference = ours.logits(tokens), theirs(tokens).logits
    assert reference[:, 60:].std() > 0.1
    torch.testing.assert_close(mine, reference, rtol=1e-4, atol=1e-4)


def test_mixtral_and_qwen3_moe():
    """The experts' matrices are stored as ours, but gate and up in one."""
    shape = dict(vocab_size=101, hidden_size=48, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2,
                 head_dim=10, max_position_embeddings=128, tie_word_embeddings=False, attn_implementation="eager",
                 num_experts_per_tok=2, rope_parameters={"rope_type": "default", "rope_theta": 10000.0})  # fmt: skip
    mixtral = transformers.MixtralConfig(**shape, intermediate_size=24, num_local_experts=5, rms_norm_eps=1e-5)
    qwen3 = transformers.Qwen3MoeConfig(**shape, moe_intermediate_size=24, num_experts=5, norm_topk_prob=True,
                                        rms_norm_eps=1e-5)  # fmt: skip
    tokens = torch.randint(0, 101, (2, 100), generator=torch.Generator().manual_seed(0))
    for config, made in ((mixtral, "MixtralForCausalLM"), (qwen3, "Qwen3MoeForCausalLM")):
        model = ModelConfig(layers=2, hidden=48, heads=6, kv_heads=2, head_dim=10, vocab=101, max_seq=128,
                            qk_norm=config is qwen3, moe=MoeConfig(experts=5, top_k=2, ffn=24))  # fmt: skip
        ours, theirs = make(model), getattr(transformers, made)(config).eval()
        state = {}
        for name in theirs.state_dict():
            mine = name.replace("mlp.experts", "moe.experts").replace("mlp.gate.", "moe.router.")
            for old, new in LLAMA.items():
                mine = mine.replace(old, new)
            for part in ("q_norm", "k_norm"):
                mine = mine.replace(f"self_attn.{part}", f"attention.{part}")
            if mine.endswith("gate_up_proj"):
                parts = [ours.get_parameter(mine.replace("gate_up_proj", part)).data for part in ("gate", "up")]
                state[name] = torch.cat(parts, 1)
            else:
                state[name] = ours.get_parameter(mine.replace("down_proj", "down")).data
        theirs.load_state_dict(state)
        with torch.no_grad():
            torch.testing.assert_close(ours.logits(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-4)


def test_gpt2():
    model = ModelConfig(layers=2, hidden=48, heads=6, ffn=192, vocab=101, tied=True, max_seq=64, norm="layernorm",
                        position="learned", activation="gelu_tanh", bias=True)  # fmt: skip
    config = transformers.GPT2Config(
        vocab_size=101, n_positions=64, n_embd=48, n_layer=2, n_head=6, layer_norm_epsilon=model.norm_eps
    )
    ours, theirs = make(model), transformers.GPT2LMHeadModel(config).eval()
    p = {name: value.data for name, value in ours.named_parameters()}
    state = {
        "transformer.wte.weight": p["embedding.weight"],
        "lm_head.weight": p["embedding.weight"],
        "transformer.wpe.weight": p["positions.weight"],
    }
    for part in ("weight", "bias"):
        state[f"transformer.ln_f.{part}"] = p[f"norm.{part}"]
        for i in range(2):
            at, mine = f"transformer.h.{i}", f"layers.{i}"
            fused = torch.cat([p[f"{mine}.attention.qkv.{n}.{part}"] for n in "qkv"])
            linears = {
                "attn.c_attn": fused,
                "attn.c_proj": p[f"{mine}.attention.output.{part}"],
                "mlp.c_fc": p[f"{mine}.mlp.inputs.up.{part}"],
                "mlp.c_proj": p[f"{mine}.mlp.down.{part}"],
            }
            state |= {f"{at}.{n}.{part}": value.T if value.ndim == 2 else value for n, value in linears.items()}
            state[f"{at}.ln_1.{part}"] = p[f"{mine}.attention_norm.{part}"]
            state[f"{at}.ln_2.{part}"] = p[f"{mine}.mlp_norm.{part}"]
    theirs.load_state_dict(state, strict=False)
    tokens = torch.randint(0, 101, (2, 60), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(ours.logits(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-4)
