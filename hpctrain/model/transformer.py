"""A decoder-only transformer. It knows nothing of parallelism.

Every part may be missing, so that a pipeline stage is the same module with parts taken out (`take`). Head counts
are read off the width of what the linears return, so that a rank with half the heads runs the same code.
Parameter names and shapes are those of `hpctrain.layout.parameters.parameter_specs`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hpctrain.config.schema import ModelConfig
from hpctrain.model.adapters import InputDropout, adapt
from hpctrain.model.batch import IGNORED, Batch
from hpctrain.model.loss import CrossEntropy
from hpctrain.model.mlp import FanOut, Mlp
from hpctrain.model.moe import MoE
from hpctrain.model.random import Dropout
from hpctrain.model.rope import rotate, rotation


class Embedding(nn.Module):
    """A table of rows. Left empty: values come from `initial_values` (and `nn.Embedding`'s own draw on the meta
    device imports half of sympy)."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width))

    def forward(self, index: Tensor) -> Tensor:
        return F.embedding(index, self.weight)


class Head(nn.Module):
    """Hidden states to logits, with a weight of its own or, where it has none, the embedding's."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        weight = None if model.tied else nn.Parameter(torch.empty(model.vocab, model.hidden))
        self.weight: nn.Parameter | None
        self.register_parameter("weight", weight)

    def forward(self, x: Tensor, tied: Tensor | None) -> Tensor:
        return F.linear(x, present(self.weight, tied))


def present(own: Tensor | None, tied: Tensor | None) -> Tensor:
    """The weight a head uses: the tied one where it has none of its own."""
    weight = own if tied is None else tied
    assert weight is not None, "an untied head has a weight, a tied one is given the embedding's"
    return weight


class DotProductAttention(nn.Module):
    """Causal softmax attention of `[batch, heads, seq, head_width]`; fewer key/value heads than query heads is GQA."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        group = q.shape[1] // k.shape[1]
        if group > 1:
            k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)


class Attention(nn.Module):
    """Multi-head attention with rotary or no position embedding, with or without norms of queries and keys."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.width = model.head_width
        queries, keys = model.heads * self.width, model.kv * self.width
        sizes = {"q": queries, "k": keys, "v": keys}
        self.qkv = FanOut({n: nn.Linear(model.hidden, size, bias=model.bias) for n, size in sizes.items()})
        self.q_norm: nn.Module = nn.RMSNorm(self.width, eps=model.norm_eps) if model.qk_norm else nn.Identity()
        self.k_norm: nn.Module = nn.RMSNorm(self.width, eps=model.norm_eps) if model.qk_norm else nn.Identity()
        self.core: nn.Module = DotProductAttention()
        self.output: nn.Module = nn.Linear(queries, model.hidden, bias=model.bias)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor] | None, mask: Tensor | None) -> Tensor:
        q, k, v = (t.unflatten(-1, (-1, self.width)).transpose(1, 2) for t in self.qkv(x))
        q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = rotate(q, *rope), rotate(k, *rope)
        out: Tensor = self.output(self.core(q, k, v, mask).transpose(1, 2).flatten(2))
        return out


def make_norm(model: ModelConfig) -> nn.Module:
    """RMSNorm or LayerNorm over the hidden dim."""
    if model.norm == "rmsnorm":
        return nn.RMSNorm(model.hidden, eps=model.norm_eps)
    return nn.LayerNorm(model.hidden, eps=model.norm_eps)


class Layer(nn.Module):
    """Attention and MLP or experts, each normalised before and added to the residual after (pre-norm).

    Attributes:
        sites: dropouts before adapters, which are told which samples they see.
    """

    def __init__(self, model: ModelConfig, seed: int, index: int) -> None:
        super().__init__()
        self.attention_norm = make_norm(model)
        self.attention = Attention(model)
        self.attention_dropout = Dropout(model.dropout, seed, f"layers.{index}.attention")
        self.mlp_norm = make_norm(model)
        self.mlp = None if model.routed(index) else Mlp(model)
        self.moe = MoE(model) if model.routed(index) else None
        self.mlp_dropout = Dropout(model.dropout, seed, f"layers.{index}.mlp")
        self.sites: Sequence[InputDropout] = ()

    def forward(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor] | None,
        mask: Tensor | None,
        samples: list[int],
        valid: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Hidden states, and the router's loss where there is one. `valid` [batch, seq]: which tokens count."""
        for site in self.sites:
            site.samples = samples
        x = x + self.attention_dropout(self.attended(x, rope, mask), samples)
        y, loss = self.fed_forward(x, samples, valid)
        return x + self.mlp_dropout(y, samples), loss

    def attended(self, x: Tensor, rope: tuple[Tensor, Tensor] | None, mask: Tensor | None) -> Tensor:
        """What attention adds to the residual, before dropout."""
        out: Tensor = self.attention(self.attention_norm(x), rope, mask)
        return out

    def fed_forward(self, x: Tensor, samples: list[int], valid: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """What MLP or experts add to it, before dropout, and the router's loss."""
        return self.through_mlp(self.mlp_norm(x), samples, valid)

    def through_mlp(self, y: Tensor, samples: list[int], valid: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The same of normalised hidden states."""
        if self.moe is not None:
            out: tuple[Tensor, Tensor | None] = self.moe(y, samples, valid)
            return out
        return (y if self.mlp is None else self.mlp(y)), None


class Transformer(nn.Module):
    """The whole model, from tokens to the sum of the losses of a batch.

    Args:
        model: its shape.
        seed: of the run, for dropout.
        loss: what turns logits and labels into a sum of losses.

    Attributes:
        mask: makes of documents what attention's cores are given.
    """

    def __init__(self, model: ModelConfig, seed: int = 0, loss: CrossEntropy | None = None) -> None:
        super().__init__()
        self.model = model
        self.embedding: Embedding | None = Embedding(model.vocab, model.hidden)
        self.positions = Embedding(model.max_seq, model.hidden) if model.position == "learned" else None
        self.dropout = Dropout(model.dropout, seed, "embedding")
        self.layers = nn.ModuleDict({str(i): Layer(model, seed, i) for i in range(model.layers)})
        self.norm: nn.Module | None = make_norm(model)
        self.head: Head | None = Head(model)
        self.loss = loss or CrossEntropy()
        adapt(self, model, seed)
        for _, layer in self.numbered_layers():
            layer.sites = [module for module in layer.modules() if isinstance(module, InputDropout)]
        self.mask: Callable[[Tensor, torch.dtype], Tensor] = document_mask

    def take(self, layers: range, first: bool, last: bool) -> None:
        """Keep these layers alone; what comes before all of them only if `first`, what comes after only if `last`."""
        for name in [name for name in self.layers if int(name) not in layers]:
            del self.layers[name]
        if not first:
            self.embedding = self.positions = None
        if not last:
            self.norm = self.head = None

    def numbered_layers(self) -> list[tuple[int, Layer]]:
        """The layers held, with their place in the whole model."""
        return [(int(i), layer) for i, layer in self.layers.items() if isinstance(layer, Layer)]

    def forward(
        self, batch: Batch, hidden: Tensor | None = None, tied: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Sum of the losses over the batch's valid tokens, a scalar; hidden states [batch, seq, hidden] where the
        head is missing. And the sum of the losses of the routers held, None where there is none.

        Args:
            batch: what the whole model is fed.
            hidden: [batch, seq, hidden] what the layers before return, where the embedding is missing.
            tied: the embedding's weight for a head without its own, where the embedding is missing.
        """
        valid = None if self.model.moe is None else batch.labels != IGNORED
        x, routers = self.states(batch.tokens, batch.documents, batch.samples, hidden, batch.positions, valid)
        return (x if self.head is None else self.loss(self.predict(x, tied), batch.labels)), routers

    def logits(self, tokens: Tensor, documents: Tensor | None = None, samples: Tensor | None = None) -> Tensor:
        """Logits [batch, seq, vocab] of the whole model. Arguments as for `states`."""
        return self.predict(self.states(tokens, documents, samples)[0])

    def predict(self, x: Tensor, tied: Tensor | None = None) -> Tensor:
        """Logits [batch, seq, vocab] of hidden states; `tied` as for `forward`."""
        assert self.norm is not None and self.head is not None
        if self.embedding is not None and self.model.tied:
            tied = self.embedding.weight
        out: Tensor = self.head(self.norm(x), tied)
        return out

    def states(
        self,
        tokens: Tensor,
        documents: Tensor | None = None,
        samples: Tensor | None = None,
        hidden: Tensor | None = None,
        positions: Tensor | None = None,
        valid: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Hidden states [batch, seq, hidden] after the last layer held, and the sum of the routers' losses.

        Args:
            tokens: [batch, seq] int64.
            documents: [batch, seq]; attention stays within equal values. None: it does not stop.
            samples: [batch] global sample counts, needed in training by dropout and routers.
            hidden: in the place of embedded tokens, where the embedding is missing.
            positions: [seq] of the tokens in their samples; None: all, from 0 on.
            valid: [batch, seq] bool, which tokens count in the loss; None: all.
        """
        dropped = self.training and self.model.dropout > 0
        assert samples is not None or not dropped, "dropout needs to know the samples"
        keys = samples.tolist() if samples is not None else []
        places = torch.arange(tokens.shape[1], device=tokens.device) if positions is None else positions
        x = self._embed(tokens, places, keys) if hidden is None else hidden
        rope = rotation(self.model, places, x.dtype) if self.model.position == "rope" else None
        mask = None if documents is None else self.mask(documents, x.dtype)
        routers: Tensor | None = None
        for layer in self.layers.values():
            x, loss = layer(x, rope, mask, keys, valid)
            if loss is not None:
                routers = loss if routers is None else routers + loss
        return x, routers

    def _embed(self, tokens: Tensor, places: Tensor, samples: list[int]) -> Tensor:
        assert self.embedding is not None, "a stage without the embedding is given hidden states"
        x: Tensor = self.embedding(tokens)
        if self.positions is not None:
            x = x + self.positions(places)
        out: Tensor = self.dropout(x, samples)
        return out


def document_mask(documents: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to the score of each query and key: 0 where the key is earlier or equal, and of the same document,
    and else minus infinity. [batch, 1, seq, seq]. Of a mask of bools torch would make this in each layer, and keep it.
    """
    seq = documents.shape[1]
    causal = torch.ones(seq, seq, dtype=torch.bool, device=documents.device).tril()
    seen = (documents[:, :, None] == documents[:, None, :]).logical_and_(causal)
    return torch.zeros_like(seen, dtype=dtype).masked_fill_(seen.logical_not_(), -torch.inf)[:, None]
