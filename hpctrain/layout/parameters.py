"""Every parameter of a model: its name, global shape, initial values, and what its dims are made of.

This table is the only place that says so. The model is built to it, placements are cut from it, and the
planner counts it, all without asking a rank what it holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from hpctrain.config.schema import AdapterConfig, ModelConfig

Cut = Literal["vocab", "heads", "kv_heads", "ffn", "experts", "expert_ffn", "shared_ffn"]
"""What a dim is made of, if it can be cut: vocabulary entries, query heads, key/value heads, MLP columns; of a layer
with experts these, columns of each, columns of the shared MLP."""


Linear = Literal["q", "k", "v", "output", "gate", "up", "down", "experts"]
"""Which linear of a layer a matrix is the weight of; all matrices of experts are one kind."""


@dataclass(frozen=True)
class Init:
    """Initial values: normal with mean 0 and this deviation; or one constant; or the norms of a matrix' rows."""

    std: float = 0.0
    constant: float = 0.0
    norms_of: ParameterSpec | None = None


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
        in_parts: not cut, and yet each rank uses it for its own heads, or its own part of what is cut beside it, alone.
        linear: which linear of a layer it is the weight of, if it is one's.
        trained: by an optimizer; what adapters are beside of is not.
        block: it is held in 4 bits, with a scale of its own for so many consecutive elements of a row.
        decay: whether weight decay applies (matrices).
    """

    name: str
    shape: tuple[int, ...]
    cuts: tuple[Cut | None, ...]
    init: Init
    layer: int | None = None
    output: bool = False
    in_parts: bool = False
    linear: Linear | None = None
    trained: bool = True
    block: int | None = None

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


@lru_cache(maxsize=4)
def parameter_specs(model: ModelConfig) -> tuple[ParameterSpec, ...]:
    """All parameters of a model, in the order the model holds them.

    Matrices are `[out, in]`, those of experts `[experts, out, in]`. Deviations follow GPT-2: `init_std`, and
    `init_std / sqrt(2 x layers)` for the matrices of a layer that write to the residual stream. What adapters train
    follows the weight that it is beside of.
    """
    specs = _plain_specs(model)
    return tuple(specs if model.adapter is None else _with_adapters(specs, model.adapter))


def _plain_specs(model: ModelConfig) -> list[ParameterSpec]:
    """The same without adapters."""
    h, normal = model.hidden, Init(std=model.init_std)
    residual = Init(std=model.init_std / math.sqrt(2 * model.layers))
    inputs: tuple[Literal["gate", "up"], ...] = ("gate", "up") if model.gated else ("up",)
    out: list[ParameterSpec] = []

    def linear(
        name: str, kind: Linear, size: tuple[int, int], cuts: tuple[Cut | None, Cut | None], init: Init, layer: int
    ) -> None:
        out.append(ParameterSpec(f"{name}.weight", size, cuts, init, layer, linear=kind))
        if model.bias:
            out.append(ParameterSpec(f"{name}.bias", size[:1], cuts[:1], Init(), layer))

    def norm(name: str, layer: int | None) -> None:
        output = layer is None
        out.append(ParameterSpec(f"{name}.weight", (h,), (None,), Init(constant=1.0), layer, output))
        if model.norm == "layernorm":
            out.append(ParameterSpec(f"{name}.bias", (h,), (None,), Init(), layer, output))

    def mlp(name: str, width: int, cut: Cut, layer: int) -> None:
        for part in inputs:
            linear(f"{name}.inputs.{part}", part, (width, h), (cut, None), normal, layer)
        linear(f"{name}.down", "down", (h, width), (None, cut), residual, layer)

    out.append(ParameterSpec("embedding.weight", (model.vocab, h), ("vocab", None), normal))
    if model.position == "learned":
        out.append(ParameterSpec("positions.weight", (model.max_seq, h), (None, None), normal))
    for i in range(model.layers):
        at = f"layers.{i}"
        norm(f"{at}.attention_norm", i)
        linear(f"{at}.attention.qkv.q", "q", (model.heads * model.head_width, h), ("heads", None), normal, i)
        linear(f"{at}.attention.qkv.k", "k", (model.kv * model.head_width, h), ("kv_heads", None), normal, i)
        linear(f"{at}.attention.qkv.v", "v", (model.kv * model.head_width, h), ("kv_heads", None), normal, i)
        for part in ("q", "k") if model.qk_norm else ():
            one = Init(constant=1.0)
            name = f"{at}.attention.{part}_norm.weight"
            out.append(ParameterSpec(name, (model.head_width,), (None,), one, i, in_parts=True))
        linear(f"{at}.attention.output", "output", (h, model.heads * model.head_width), (None, "heads"), residual, i)
        norm(f"{at}.mlp_norm", i)
        if not model.routed(i):
            mlp(f"{at}.mlp", model.ffn_width, "ffn", i)
            continue
        assert model.moe is not None
        experts, width, shared = model.moe.experts, model.expert_width, model.moe.shared_ffn
        out.append(ParameterSpec(f"{at}.moe.router.weight", (experts, h), (None, None), normal, i))
        for name in inputs:
            cuts: tuple[Cut | None, ...] = ("experts", "expert_ffn", None)
            size = (experts, width, h)
            out.append(ParameterSpec(f"{at}.moe.experts.{name}", size, cuts, normal, i, linear="experts"))
        down: tuple[Cut | None, ...] = ("experts", None, "expert_ffn")
        size = (experts, h, width)
        out.append(ParameterSpec(f"{at}.moe.experts.down", size, down, residual, i, linear="experts"))
        if shared:
            mlp(f"{at}.moe.shared", shared, "shared_ffn", i)
    norm("norm", None)
    if not model.tied:
        out.append(ParameterSpec("head.weight", (model.vocab, h), ("vocab", None), normal, output=True))
    return out


def _with_adapters(specs: Iterable[ParameterSpec], adapter: AdapterConfig) -> Iterator[ParameterSpec]:
    """A model's parameters, which are not trained now, and behind each weight that is adapted what is; QLoRA holds the
    weights of linears in 4 bits."""
    for spec in specs:
        packed = adapter.kind == "qlora" and spec.linear is not None
        yield replace(spec, trained=False, block=adapter.block if packed else None)
        if spec.linear is not None and adapter.adapts(spec.linear):
            yield from _factors(spec, adapter)


def _factors(weight: ParameterSpec, adapter: AdapterConfig) -> Iterator[ParameterSpec]:
    """What is trained beside a weight [..., out, in], cut as it is: LoRA's factors A [..., rank, in], normal, and B
    [..., out, rank], zero (Hu et al., arXiv 2106.09685), and DoRA's magnitudes [out], which begin as the norms of the
    weight's rows (Liu et al., arXiv 2402.09353). A's deviation is that of Kaiming's uniform draw.

    Where outputs are cut every rank has all of A and uses it for its own outputs; where inputs are, all of B for its
    own inputs.
    """
    (*lead, out, width), (*lead_cuts, out_cut, in_cut) = weight.shape, weight.cuts
    plain = replace(weight, linear=None)

    def named(end: str) -> str:
        """Beside `weight` in the module of a linear, beside the matrix' own name in that of experts."""
        return weight.name.removesuffix("weight") + end if weight.name.endswith(".weight") else f"{weight.name}_{end}"

    yield replace(
        plain,
        name=named("lora_a"),
        shape=(*lead, adapter.rank, width),
        cuts=(*lead_cuts, None, in_cut),
        init=Init(std=1.0 / math.sqrt(3 * width)),
        in_parts=out_cut is not None,
    )
    yield replace(
        plain,
        name=named("lora_b"),
        shape=(*lead, out, adapter.rank),
        cuts=(*lead_cuts, out_cut, None),
        init=Init(),
        in_parts=in_cut is not None,
    )
    if adapter.kind == "dora":
        norms = Init(norms_of=weight)
        yield replace(plain, name=named("magnitude"), shape=(*lead, out), cuts=(*lead_cuts, out_cut), init=norms)


def trained_specs(model: ModelConfig) -> tuple[ParameterSpec, ...]:
    """The parameters that an optimizer trains: all, or adapters alone."""
    return tuple(spec for spec in parameter_specs(model) if spec.trained)


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
    """Global shape by name of every tensor in a checkpoint: of what is trained, and the biases of its routers."""
    biases = bias_specs(model) if model.adapter is None else ()
    return {spec.name: spec.shape for spec in (*trained_specs(model), *biases)}


def matmul_weights(model: ModelConfig, trained: bool = False) -> int:
    """Weights that every token is multiplied with: the layers' matrices, of experts those of top_k, and the output
    head, tied or not.

    Args:
        trained: those alone that get a gradient.
    """
    matrices = (s for s in parameter_specs(model) if s.layer is not None and s.decay and (s.trained or not trained))
    head = 0 if trained and model.adapter is not None else model.vocab * model.hidden
    return sum(active(s, model) for s in matrices) + head


@lru_cache
def largest_unit(model: ModelConfig, tp: int) -> int:
    """Elements that a rank computes with at about the same time: those of a layer, or of the vocabulary's matrix."""
    units: dict[object, int] = {}
    for spec in parameter_specs(model):
        key = spec.name if spec.layer is None else spec.layer
        units[key] = units.get(key, 0) + spec.numel
    return -(-max(units.values()) // tp)
