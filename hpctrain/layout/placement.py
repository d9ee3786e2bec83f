"""One record a parameter: which box of the logical tensor a rank holds, who else holds it, and how its
gradient arrives.

The record alone decides which slice of the initial values a rank draws, over which ranks its gradient is
summed, how often it counts in the gradient norm and in the parameter count (once), and where its pieces lie
in a checkpoint.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from hpctrain.config.schema import ModelConfig
from hpctrain.layout.layout import EXPERT_AXES, Layout, Ranks, divisors, split
from hpctrain.layout.parameters import Cut, ParameterSpec, parameter_specs, units
from hpctrain.layout.stages import shares_embedding, stages, stages_of

Index = tuple[int, ...]

DENSE, EXPERT = ("dp", "cp"), ("edp",)
"""Axes over which gradients of dense parameters, and of experts, are summed by an engine."""


@dataclass(frozen=True)
class Box:
    """A block of a logical tensor: where it starts there, where it lies in the local tensor, its shape."""

    start: Index
    local: Index
    shape: Index

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Placement:
    """Where one logical parameter lies on one rank.

    Attributes:
        name: fully qualified parameter name.
        global_shape: shape of the logical tensor.
        boxes: the blocks of it that this rank holds.
        replicas: ranks of this rank's stage and data-parallel index (an expert's: edp index) that hold the same boxes,
            ascending.
        partial_over: axes over whose replicas the gradient arises in parts, because each uses the parameter for
            some of the heads or for a part of the sequence. The layer that holds it makes the gradient whole
            inside autograd, so that it is complete when it is accumulated.
        tied: name of the parameter whose values this one shares and whose owner is on another stage, if any.
        reduced_over: axes over which an engine sums the gradient: the ranks that hold the same boxes and see other
            tokens.
    """

    name: str
    global_shape: Index
    boxes: tuple[Box, ...]
    replicas: Ranks
    partial_over: tuple[str, ...] = ()
    tied: str | None = None
    reduced_over: tuple[str, ...] = DENSE

    @property
    def local_shape(self) -> Index:
        """Shape of the local tensor: the extent of all boxes."""
        rank = range(len(self.global_shape))
        return tuple(max(b.local[d] + b.shape[d] for b in self.boxes) for d in rank)

    @property
    def owner(self) -> int:
        """The one rank of `replicas` that counts this parameter in the norm and in the parameter count."""
        return self.replicas[0]


def cut_of(model: ModelConfig, cut: Cut, tp: int, index: int) -> tuple[int, int, int]:
    """Which units of a dim tensor-parallel index `index` of `tp` holds.

    Key/value heads fewer than tp are replicated: `tp / kv_heads` neighbouring ranks hold the same head.

    Returns:
        start and number of units, and how many neighbouring tp ranks hold the same ones.
    """
    n = units(model, cut)
    copies = tp // n if cut == "kv_heads" and n < tp else 1
    start, size = split(n, tp // copies, index // copies)
    return start, size, copies


def misfit(model: ModelConfig, tp: int) -> Cut | None:
    """The first kind of dim that cannot be cut over `tp` ranks, if there is one.

    Heads and MLP columns divide evenly; key/value heads divide or are replicated evenly; the vocabulary may be
    uneven, but every rank has some of it.
    """
    if model.heads % tp:
        return "heads"
    if model.kv % tp and tp % model.kv:
        return "kv_heads"
    if not model.routed(0) and model.ffn_width % tp:
        return "ffn"
    if model.moe and model.moe.shared_ffn % tp:
        return "shared_ffn"
    return "vocab" if model.vocab < tp else None


def tp_sizes(model: ModelConfig, ranks: int = 0) -> list[int]:
    """Sizes of tp over which every dim can be cut, and that divide `ranks` where it is given."""
    return [tp for tp in divisors(model.heads) if ranks % tp == 0 and misfit(model, tp) is None]


def zero_misfit(model: ModelConfig, layout: Layout, stage: int) -> Literal["stage", "pp"] | None:
    """What keeps ZeRO of a stage from this layout of a model with experts, if anything does.

    Stage 3 shards all parameters over the same ranks, so experts must be reduced over dp x cp as others are. Stages 1
    and 2 take a norm of each kind of parameter over all stages of a pipeline, so all must train experts if any does.
    """
    if model.moe is None or not stage or layout.ep * layout.etp == layout.tp:
        return None
    if stage == 3:
        return "stage"
    if model.adapter is not None and not model.adapter.adapts("experts"):
        return None
    with_experts = {s.home for s in stages(model, layout) if any(map(model.routed, s.layers))}
    return "pp" if len(with_experts) < layout.pp else None


def place(spec: ParameterSpec, model: ModelConfig, layout: Layout, rank: int) -> Placement:
    """The record of one parameter on one rank."""
    if "experts" in spec.cuts:
        return _place_experts(spec, layout, rank)
    tp = layout.coordinates(rank)["tp"]
    start, shape, copies = [0] * len(spec.shape), list(spec.shape), layout.tp
    for dim, cut in enumerate(spec.cuts):
        if cut is None:
            continue
        first, count, copies = cut_of(model, cut, layout.tp, tp)
        unit = spec.shape[dim] // units(model, cut)
        start[dim], shape[dim] = first * unit, count * unit
    peers = layout.group_of(rank, "tp")
    replicas = peers[tp // copies * copies :][:copies]
    partial = ("tp",) if copies > 1 and (layout.sp or spec.in_parts or any(spec.cuts)) else ()
    box = Box(tuple(start), (0,) * len(shape), tuple(shape))
    return Placement(spec.name, spec.shape, (box,), replicas, partial)


def _place_experts(spec: ParameterSpec, layout: Layout, rank: int) -> Placement:
    """Of a parameter that all experts of a layer have: some of them by ep, of each some columns by etp.

    A rank sees the tokens of all ranks of its ep and etp groups, so its gradient is whole but for those of edp.
    """
    at = layout.coordinates(rank, EXPERT_AXES)
    start, shape = [0] * len(spec.shape), list(spec.shape)
    for dim, axis in ((dim, {"experts": "ep", "expert_ffn": "etp"}[cut]) for dim, cut in enumerate(spec.cuts) if cut):
        start[dim], shape[dim] = split(spec.shape[dim], getattr(layout, axis), at[axis])
    box = Box(tuple(start), (0,) * len(shape), tuple(shape))
    return Placement(spec.name, spec.shape, (box,), (rank,), reduced_over=EXPERT)


def placements(model: ModelConfig, layout: Layout, rank: int) -> dict[str, Placement]:
    """The records of every parameter that a rank holds: those of its stages."""
    mine = stages_of(model, layout, rank)
    specs = (spec for spec in parameter_specs(model) if any(stage.holds(spec) for stage in mine))
    return {spec.name: place(spec, model, layout, rank) for spec in specs}


def tied_copy(model: ModelConfig, layout: Layout, rank: int) -> Placement | None:
    """The record of the head's copy of the embedding, on ranks of the last stage; None where it is no copy.

    The copy is no parameter: the first stage owns the values and the gradient, in a box like it (`parallel/tied.py`).
    """
    if not shares_embedding(model, layout):
        return None
    embedding = parameter_specs(model)[0]
    return replace(place(embedding, model, layout, rank), name="head.weight", tied=embedding.name)


def replica_groups(model: ModelConfig, layout: Layout) -> tuple[tuple[Ranks, ...], ...]:
    """Every partition of the world into replica groups that lies strictly between one rank and a tp group.

    A mesh makes one process group of each, so that a gradient can be summed over `Placement.replicas`.
    """
    if layout.tp <= model.kv:
        return ()
    copies = layout.tp // model.kv
    if copies in (1, layout.tp):
        return ()
    tp_groups = layout.groups("tp")
    return (tuple(g[i : i + copies] for g in tp_groups for i in range(0, layout.tp, copies)),)


def flat_boxes(shape: Index, start: int, numel: int) -> tuple[Box, ...]:
    """The boxes of a row-major tensor that the flat range `[start, start + numel)` covers.

    A ZeRO fragment is such a range. At most `2 * len(shape) - 1` boxes; `Box.local` is the position in the
    tensor, and the boxes in order hold the range's elements in order.
    """
    assert start >= 0 and start + numel <= math.prod(shape), (shape, start, numel)
    if numel == 0:
        return ()
    if not shape:
        return (Box((), (), ()),)
    row = math.prod(shape[1:])
    first, last = start // row, (start + numel - 1) // row
    head = start - first * row

    def within(index: int, lo: int, count: int) -> list[Box]:
        inner = flat_boxes(shape[1:], lo, count)
        return [Box(at := (index, *b.start), at, (1, *b.shape)) for b in inner]

    if first == last and not (head == 0 and numel == row):
        return tuple(within(first, head, numel))
    out: list[Box] = []
    if head:
        out += within(first, head, row - head)
        first += 1
    tail = start + numel - last * row
    full = last + (tail == row) - first
    if full > 0:
        at = (first, *(0,) * (len(shape) - 1))
        out.append(Box(at, at, (full, *shape[1:])))
    if tail < row:
        out += within(last, 0, tail)
    return tuple(out)
