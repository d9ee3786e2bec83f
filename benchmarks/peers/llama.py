"""A Llama as anybody would write it, for all peers that take a module; a pipeline stage is it with parts left out."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hpctrain.config.schema import ModelConfig, OptimizerConfig, RunConfig


class Attention(nn.Module):
    """Causal attention with rotary positions and grouped key/value heads."""

    def __init__(self, m: ModelConfig, seq: int) -> None:
        super().__init__()
        self.width, self.group = m.head_width, m.heads // m.kv
        self.q = nn.Linear(m.hidden, m.heads * self.width, bias=False)
        self.k = nn.Linear(m.hidden, m.kv * self.width, bias=False)
        self.v = nn.Linear(m.hidden, m.kv * self.width, bias=False)
        self.out = nn.Linear(m.heads * self.width, m.hidden, bias=False)
        frequencies = m.rope_theta ** (-torch.arange(0, self.width, 2).float() / self.width)
        angles = torch.outer(torch.arange(seq).float(), frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, self.width)).transpose(1, 2) for p in (self.q, self.k, self.v))
        q, k = self.rotate(q), self.rotate(k)
        k, v = k.repeat_interleave(self.group, dim=1), v.repeat_interleave(self.group, dim=1)
        out: Tensor = self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return out

    def rotate(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * self.cos + torch.cat((-second, first), dim=-1) * self.sin


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, m: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(m.hidden, m.ffn_width, bias=False)
        self.up = nn.Linear(m.hidden, m.ffn_width, bias=False)
        self.down = nn.Linear(m.ffn_width, m.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    """Attention and SwiGLU, each after a norm and added to the residual."""

    def __init__(self, m: ModelConfig, seq: int) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(m.hidden, eps=m.norm_eps), Attention(m, seq)
        self.ffn_norm, self.ffn = nn.RMSNorm(m.hidden, eps=m.norm_eps), FeedForward(m)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.ffn(self.ffn_norm(x))
        return out


class Output(nn.Module):
    """The last norm, and logits."""

    def __init__(self, m: ModelConfig) -> None:
        super().__init__()
        self.norm, self.head = nn.RMSNorm(m.hidden, eps=m.norm_eps), nn.Linear(m.hidden, m.vocab, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(x))
        return out


class Llama(nn.Module):
    """Tokens [batch, seq], or hidden states where the embedding is missing, to logits, or hidden states where the
    output is.

    Args:
        config: of the run.
        layers: how many of them; default all.
        first, last: whether this is the beginning and the end of the model.
    """

    def __init__(self, config: RunConfig, layers: int | None = None, first: bool = True, last: bool = True) -> None:
        super().__init__()
        m = config.model
        count = m.layers if layers is None else layers
        self.embedding = nn.Embedding(m.vocab, m.hidden) if first else None
        self.blocks = nn.ModuleList(Block(m, config.data.seq) for _ in range(count))
        self.output = Output(m) if last else None
        draw(self, m)

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return x if self.output is None else self.output(x)


def draw(module: nn.Module, m: ModelConfig) -> None:
    """Initial values of its matrices."""
    generator = torch.Generator().manual_seed(0)
    for p in module.parameters():
        if p.ndim > 1:
            nn.init.normal_(p, std=m.init_std, generator=generator)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean over the tokens."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def adamw(parameters: Iterable[nn.Parameter], options: OptimizerConfig) -> torch.optim.AdamW:
    """torch's, as engine `none` makes it: decay on matrices only."""
    held = list(parameters)
    groups = [
        {"params": [p for p in held if p.ndim > 1], "weight_decay": options.weight_decay},
        {"params": [p for p in held if p.ndim == 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=options.lr, betas=(options.beta1, options.beta2), eps=options.eps)
