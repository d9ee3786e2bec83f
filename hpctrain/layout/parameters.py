"""Every parameter of a model: its name, global shape, initial values, and what its dims are made of.

This table is the only place that says so. The model is built to it, placements are cut from it, and the
planner counts it, all without asking a rank what it holds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from hpctrain.config.schema import ModelConfig

Cut = Literal["vocab", "heads", "kv_heads", "ffn", "experts", "expert_ffn", "shared_ffn"]
"""What a dim is made of, if it can be cut: vocabulary entries, query heads, key/value heads, MLP columns; of a layer
with experts these, columns of each, columns of the shared MLP."""


@dataclass(frozen=True)
class Init:
    """Initial values: normal with mean 0 and this deviation, or one constant."""

    std: float = 0.0
    constant: float = 0.0


@dataclass(frozen=True)
class ParameterSpec:
    """One logical parameter.

    Attributes:
        name: fully qualified, the same under every layout.
        shape: global shape.
        cuts: for each dim what it is made of, or None if it is never cut.
        init: initial values.
        layer: index of the transformer layer it belongs to; None for embedding, final norm and head.
        output: of those, whether it comes after the layers (norm and head).
        by_head: not cut, and yet each rank uses it for its own heads alone.
        decay: whether weight decay applies (matrices).
    """

    name: str
    shape: tuple[int, ...]
    cuts: tuple[Cut | None, ...]
    init: Init
    layer: int | None = None
    output: bool = False
    by_head: bool = False

    @property
    def decay(self) -> bool:
        return len(self.shape) > 1

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def units(model: ModelConfig, cut: Cut) -> int:
    """How many indivisible units a dim of this kind has: its size over the size of one unit."""
    moe = model.moe
    return {
        "vocab": model.vocab,
        "heads": model.heads,
        "kv_heads": model.kv,
        "ffn": model.ffn_width,
        "experts": moe.experts if moe else 0,
        "expert_ffn": model.expert_width,
        "shared_ffn": moe.shared_ffn if moe else 0,
    }[cut]


def parameter_specs(model: ModelConfig) -> tuple[ParameterSpec, ...]:
    """All parameters of a model, in the order the model holds them.

    Matrices are `[out, in]`, those of experts `[experts, out, in]`. Deviations follow GPT-2: `init_std`, and
    `init_std / sqrt(2 x layers)` for the matrices of a layer that write to the residual stream.
    """
    h, normal = model.hidden, Init(std=model.init_std)
    residual = Init(std=model.init_std / math.sqrt(2 * model.layers))
    inputs = ("gate", "up") if model.gated else ("up",)
    out: list[ParameterSpec] = []

    def linear(name: str, size: tuple[int, int], cuts: tuple[Cut | None, Cut | None], init: Init, layer: int) -> None:
        out.append(ParameterSpec(f"{name}.weight", size, cuts, init, layer))
        if model.bias:
            out.append(ParameterSpec(f"{name}.bias", size[:1], cuts[:1], Init(), layer))

    def norm(name: str, layer: int | None) -> None:
        output = layer is None
        out.append(ParameterSpec(f"{name}.weight", (h,), (None,), Init(constant=1.0), layer, output))
        if model.norm == "layernorm":
            out.append(ParameterSpec(f"{name}.bias", (h,), (None,), Init(), layer, output))

    def mlp(name: str, width: int, cut: Cut, layer: int) -> None:
        for part in inputs:
            linear(f"{name}.inputs.{part}", (width, h), (cut, None), normal, layer)
        linear(f"{name}.down", (h, width), (None, cut), residual, layer)

    out.append(ParameterSpec("embedding.weight", (model.vocab, h), ("vocab", None), normal))
    if model.position == "learned":
        out.append(ParameterSpec("positions.weight", (model.max_seq, h), (None, None), normal))
    for i in range(model.layers):
        at = f"layers.{i}"
        norm(f"{at}.attention_norm", i)
        linear(f"{at}.attention.qkv.q", (model.heads * model.head_width, h), ("heads", None), normal, i)
        linear(f"{at}.attention.qkv.k", (model.kv * model.head_width, h), ("kv_heads", None), normal, i)
        linear(f"{at}.attention.qkv.v", (model.kv * model.head_width, h), ("kv_heads", None), normal, i)
        for part in ("q", "k") if model.qk_norm else ():
            one = Init(constant=1.0)
            name = f"{at}.attention.{part}_norm.weight"
            out.append(ParameterSpec(name, (model.head_width,), (None,), one, i, by_head=True))
        linear(f"{at}.attention.output", (h, model.heads * model.head_width), (None, "heads"), residual, i)
        norm(f"{at}.mlp_norm", i)
        if not model.routed(i):
            mlp(f"{at}.mlp", model.ffn_width, "ffn", i)
            continue
        assert model.moe is not None
        experts, width, shared = model.moe.experts, model.expert_width, model.moe.shared_ffn
        out.append(ParameterSpec(f"{at}.moe.router.weight", (experts, h), (None, None), normal, i))
        for name in inputs:
            cuts: tuple[Cut | None, ...] = ("experts", "expert_ffn", None)
            out.append(ParameterSpec(f"{at}.moe.experts.{name}", (experts, width, h), cuts, normal, i))
        down: tuple[Cut | None, ...] = ("experts", None, "expert_ffn")
        out.append(ParameterSpec(f"{at}.moe.experts.down", (experts, h, width), down, residual, i))
        if shared:
            mlp(f"{at}.moe.shared", shared, "shared_ffn", i)
    norm("norm", None)
    if not model.tied:
        out.append(ParameterSpec("head.weight", (model.vocab, h), ("vocab", None), normal, output=True))
    return tuple(out)


def active(spec: ParameterSpec, model: ModelConfig) -> int:
    """How many of a parameter's elements a token is multiplied with: of experts those of top_k."""
    if model.moe is None or "experts" not in spec.cuts:
        return spec.numel
    return spec.numel // model.moe.experts * model.moe.top_k


def bias_specs(model: ModelConfig) -> tuple[ParameterSpec, ...]:
    """The biases of routers that balance the load: no parameters, for no gradient moves them, but state of a run."""
    if model.moe is None or model.moe.bias_rate is None:
        return ()
    layers = (i for i in range(model.layers) if model.routed(i))
    return tuple(ParameterSpec(f"layers.{i}.moe.router.bias", (model.moe.experts,), (None,), Init(), i) for i in layers)


def saved_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Global shape by name of every tensor in a checkpoint."""
    return {spec.name: spec.shape for spec in (*parameter_specs(model), *bias_specs(model))}


def matmul_weights(model: ModelConfig) -> int:
    """Weights that every token is multiplied with: the layers' matrices, of experts those of top_k, and the output
    head, tied or not."""
    layers = sum(active(s, model) for s in parameter_specs(model) if s.layer is not None and s.decay)
    return layers + model.vocab * model.hidden
