"""The count against what torch counts while the model runs."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from hpctrain.config.schema import ModelConfig
from hpctrain.model.batch import Batch
from hpctrain.model.transformer import Transformer
from hpctrain.telemetry.flops import flops_per_token


@pytest.mark.parametrize(
    "model",
    [
        ModelConfig(layers=2, hidden=32, heads=4, kv_heads=2, head_dim=12, ffn=40, vocab=33),
        ModelConfig(
            layers=3, hidden=32, heads=4, vocab=33, position="learned", activation="gelu", bias=True, tied=True
        ),
    ],
    ids=["gqa", "gpt"],
)
def test_torch_counts_the_same(model: ModelConfig) -> None:
    batch, seq = 3, 17
    transformer = Transformer(model)
    tokens = torch.randint(model.vocab, (batch, seq))
    counter = FlopCounterMode(display=False)
    with sdpa_kernel(SDPBackend.MATH), counter:  # the mathematical form multiplies the full square, as palm counts
        transformer(Batch(tokens, tokens, None, torch.arange(batch))).backward()
    assert counter.get_total_flops() == batch * seq * flops_per_token(model, seq).palm
