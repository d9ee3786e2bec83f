"""The count against what torch counts while the model runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from hpctrain.config.schema import ModelConfig, MoeConfig
from hpctrain.model.batch import Batch
from hpctrain.model.transformer import Transformer
from hpctrain.telemetry.flops import flops_per_token

MOE: dict[str, Any] = dict(experts=5, top_k=2, ffn=12, shared_ffn=10, dense_layers=1)


@pytest.mark.parametrize(
    "model",
    [
        ModelConfig(layers=2, hidden=32, heads=4, kv_heads=2, head_dim=12, ffn=40, vocab=33),
        ModelConfig(
            layers=3, hidden=32, heads=4, vocab=33, position="learned", activation="gelu", bias=True, tied=True
        ),
        ModelConfig(layers=3, hidden=32, heads=4, ffn=24, vocab=33, moe=MoeConfig(**MOE)),
    ],
    ids=["gqa", "gpt", "moe"],
)
def test_torch_counts_the_same(model: ModelConfig) -> None:
    batch, seq = 3, 17
    transformer = Transformer(model)
    tokens = torch.randint(model.vocab, (batch, seq))
    counter = FlopCounterMode(display=False)
    with sdpa_kernel(SDPBackend.MATH), counter:  # the mathematical form multiplies the full square, as palm counts
        transformer(Batch(tokens, tokens, None, torch.arange(batch)))[0].backward()
    routed = sum(model.routed(i) for i in range(model.layers))
    weighting = routed * 6 * MOE["top_k"] * model.hidden  # the weighted sum of experts, to torch a product of matrices
    assert counter.get_total_flops() == batch * seq * (flops_per_token(model, seq).palm + weighting)
