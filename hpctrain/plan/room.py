"""Bytes that a rank of very many layouts needs, fast.

The formulas are those of `layout/memory.py`, `layout/activations.py` and `layout/phases.py`, each worked out once for
all layouts that share it. What the search keeps is asked of these themselves.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from hpctrain.config.schema import ParallelConfig, RunConfig
from hpctrain.layout.activations import COMPUTE_BYTES, Keeps, activations
from hpctrain.layout.buffers import of_zero
from hpctrain.layout.layout import Layout
from hpctrain.layout.memory import state
from hpctrain.layout.parameters import largest_unit, parameter_specs
from hpctrain.layout.phases import entering, flowing
from hpctrain.layout.schedule import ZERO_BUBBLE, make_schedule
from hpctrain.layout.schedule_claims import claimed_peak
from hpctrain.layout.stages import Stage
from hpctrain.layout.units import MIB
from hpctrain.plan.gemm import Array
from hpctrain.plan.links import Machine
from hpctrain.plan.screen import KEYS, counts, unique
from hpctrain.plan.step import Kind, numels
from hpctrain.plan.work import NAMES, OWN, RECOMPUTE, Points, Runtime, Work


def changed(config: RunConfig, points: Points, index: int) -> RunConfig:
    """A configuration with the micro-batch, recomputation and cp method of a point; no rules are checked."""
    train = config.train.model_copy(
        update={
            "micro_batch": int(points.micro_batch[index]),
            "recompute": RECOMPUTE[int(points.recompute[index])],
        }
    )
    return config.model_copy(update={"train": train, "parallel": ParallelConfig(cp_method=config.parallel.cp_method)})


def _of_parts(config: RunConfig, points: Points, keeps: Keeps) -> dict[str, Array]:
    """Bytes kept, and besides in backward, of a layer, dense or routed, and of the ends."""
    index, inverse = unique(points, KEYS)
    rows = []
    model = config.model
    plain = next((i for i in range(model.layers) if not model.routed(i)), 0)
    routed = next((i for i in range(model.layers) if model.routed(i)), 0)
    for i in index:
        at, layout = changed(config, points, i), _flat(points, int(i))
        none = activations(at, layout, Stage(1, 0, 0, range(0), False, False), keeps)
        one = activations(at, layout, Stage(1, 0, 0, range(plain, plain + 1), False, False), keeps)
        expert = activations(at, layout, Stage(1, 0, 0, range(routed, routed + 1), False, False), keeps)
        last = activations(at, layout, Stage(1, 0, 0, range(0), False, True), keeps)
        more = [max(one.passing, expert.passing), last.passing, max(one.left, expert.left), none.handed]
        kinds = {model.routed(plain), model.routed(routed)}
        flows = (max(flowing(at, layout, ends, kind) for kind in kinds) for ends in (False, True))
        ends = [last.logits, last.chunk, entering(at, layout), *flows]
        rows.append([one.kept - none.kept, expert.kept - none.kept, none.kept, last.kept, *more, *ends])
    names = ("dense", "routed", "none", "last", "passing", "passing_last", "left", "handed")
    of_ends = ("logits", "chunk", "entering", "flowing", "flowing_last")
    return dict(zip((*names, *of_ends), np.array(rows, dtype=float).T[:, inverse]))


def _flat(points: Points, index: int) -> Layout:
    """The layout of one stage of a point."""
    axes: dict[str, Any] = {a: int(getattr(points, a)[index]) for a in ("dp", "cp", "tp", "ep", "etp")}
    return Layout(**axes, sp=bool(points.sp[index]))


@cache
def _alive(schedule: str, pp: int, chunks: int, micro_batches: int, rank: int) -> int:
    return claimed_peak(schedule, pp, chunks, micro_batches, rank)


MANY = 5
"""Micro-batches for each rank of a pipeline from which on more of them change nothing of what is under way."""


@cache
def graph_sets(schedule: str, pp: int, chunks: int, micro_batches: int, rank: int) -> int:
    """Sets of activations that CUDA graphs of a rank have, of one micro-batch of one chunk each: of every chunk as many
    as it has micro-batches under way at most (Megatron-Core, transformer/cuda_graphs.py: a pool of memory for each)."""
    number = micro_batches if micro_batches <= MANY * pp else MANY * pp + micro_batches % pp
    under_way: dict[int, int] = {}
    most: dict[int, int] = {}
    for action in make_schedule(schedule, pp, chunks, number).ranks[rank]:
        if action.kind in ("forward", "backward"):
            now = under_way.get(action.stage, 0) + (1 if action.kind == "forward" else -1)
            under_way[action.stage] = now
            most[action.stage] = max(now, most.get(action.stage, 0))
    return sum(most.values())


USER_BUFFERS, OF_SUMS = 10, 4
"""Buffers that TransformerEngine has for tp's communication, each of the hidden states of all ranks of tp, and those of
them that stay in half precision with fp8 (pytorch/module/base.py, initialize_ub)."""


def _communicated(config: RunConfig, points: Points, runtime: Runtime) -> Array:
    """Bytes of user buffers."""
    hidden = points.micro_batch * config.data.seq / points.cp * config.model.hidden
    narrow = runtime.keeps.operands or 2
    size = hidden * (OF_SUMS * 2 + (USER_BUFFERS - OF_SUMS) * narrow)
    return np.where((points.tp > 1) & runtime.user_buffers, size, 0.0)


def weights_besides(machine: Machine, work: Work) -> float:
    """Bytes of a weight that products in fp8 need beside it in half precision: it is there in fp8 as it is and, where
    the device's products want that, transposed (TransformerEngine keeps both between micro-batches). Where weights are
    kept in fp8 alone, less what half precision would take. Embedding and head stay as they are."""
    if work.dtype != "fp8":
        return 0.0
    return machine.hardware.gpu.fp8_copies.value - (2.0 if work.runtime.fp8_parameters else 0.0)


def _waiting(config: RunConfig, points: Points) -> Array:
    """Bytes that a micro-batch leaves for a gradient of the head's weight that waits: the head's input, and the
    gradient of the logits."""
    model = config.model
    tokens = points.micro_batch * config.data.seq / points.cp
    hidden = model.hidden / np.where(points.sp == 1, points.tp, 1)
    return tokens * (hidden + model.vocab / points.tp) * COMPUTE_BYTES[config.train.precision]


FROZEN: tuple[Kind, ...] = ("frozen", "packed")


def _frozen(config: RunConfig, dense: int, routed: int, ends: float, points: Points) -> Array:
    """Bytes of what is not trained: its values, in 4 bits with a byte for each block where they are packed.

    Args:
        ends: share of embedding and head that the rank has.
    """
    adapter = config.model.adapter
    if adapter is None:
        return np.zeros(len(points))
    out, compute = np.zeros(len(points)), COMPUTE_BYTES[config.train.precision]
    for kind, width in zip(FROZEN, (float(compute), 0.5 + 1 / adapter.block)):
        count = numels(config.model, kind)
        own = dense * count["dense"] + routed * count["routed"] + ends * count["ends"]
        out = out + width * (own / points.tp + routed * count["experts"] / (points.ep * points.etp))
    return out


def _fullest(config: RunConfig, points: Points, part: dict[str, Array], last: bool, below: float) -> Array:
    """Bytes besides what waits, while the loss is backward or a layer is: a gradient of its on the way, too.

    Args:
        below: elements of the largest matrix of a layer, before tp cuts it.
    """
    way = COMPUTE_BYTES[config.train.precision] * below / points.tp
    layer = part["passing"] + part["flowing_last" if last else "flowing"] + part["entering"] + way
    if not last:
        return layer
    return np.maximum(part["passing_last"] + part["chunk"], layer - part["logits"])


def _buffers(
    config: RunConfig, points: Points, stage: int, numel: Array, optimizer: Array, gradients: Array
) -> tuple[Array | float, Array | float]:
    """Bytes that an engine has in forward and backward besides, and in its update, on a GPU.

    Args:
        numel: elements of parameters before they are sharded.
        optimizer, gradients: bytes that are on the device.
    """
    width = COMPUTE_BYTES[config.train.precision]
    if not stage:
        return 0.0, max(width, 4) * numel
    bucket = np.minimum(config.sharding.bucket_mib * MIB, max(width, 4) * numel)
    unit = largest_unit(config.model, 1) / points.tp
    return of_zero(stage, width, bucket, unit, optimizer / 3, gradients, 1 if config.sharding.torch_adam else 0)


def room(config: RunConfig, points: Points, runtime: Runtime = OWN, besides: float = 0.0) -> tuple[Array, Array]:
    """Bytes of the fullest rank on its device, and of its state where that is offloaded.

    Args:
        runtime: whose program it is.
        besides: bytes of a weight that are not of half precision (`weights_besides`).
    """
    model, parts = config.model, _of_parts(config, points, runtime.keeps)
    compute = COMPUTE_BYTES[config.train.precision]
    number = config.train.global_batch // (points.dp * points.micro_batch)
    count = numels(model)
    device = np.zeros(len(points))
    away = np.zeros(len(points))
    vocab = model.vocab * model.hidden
    below = max(spec.numel for spec in parameter_specs(model) if spec.layer is not None and "experts" not in spec.cuts)
    index, inverse = unique(points, ("schedule", "pp", "chunks"))
    for place, which in enumerate(index):
        some = np.flatnonzero(inverse == place)
        name, pp, chunks = NAMES[int(points.schedule[which])], int(points.pp[which]), int(points.chunks[which])
        stages = counts(model, name, pp, chunks, runtime.even_stages)
        at, part = points.take(some), {key: value[some] for key, value in parts.items()}
        for rank in sorted({stages[0][0], stages[-1][0]}):
            mine = [stage for stage in stages if stage[0] == rank]
            layers, routed = sum(stage[1] for stage in mine), sum(stage[2] for stage in mine)
            held_ends = any(stage[3] for stage in mine)
            ends = count["ends"] if held_ends else 0
            apart = pp > 1 and stages[0][0] != stages[-1][0]
            if apart and model.adapter is None:
                ends = vocab + count["ends"] % vocab  # embedding or head, and no more than the norm and positions
            dense = ((layers - routed) * count["dense"] + routed * count["routed"] + ends) / at.tp
            expert = routed * count["experts"] / (at.ep * at.etp)
            numel = dense + expert
            half = 0.5 if apart and not model.tied else 1.0
            frozen = _frozen(config, layers - routed, routed, held_ends * half, at)
            edp = at.dp * at.cp * at.tp // (at.ep * at.etp)
            shard = dense / (at.dp * at.cp) + expert / edp
            least = part["left"] if name in ZERO_BUBBLE else 0.0  # what weights' gradients wait for
            one, expert_layer = np.maximum(part["dense"], least), np.maximum(part["routed"], least)
            kept = [(n - r) * one + r * expert_layer + part["none"] for _, n, r, _ in mine]
            last = any(stage[3] & 2 for stage in mine)
            if last:
                kept[-1] = kept[-1] - part["none"] + part["last"]
            under_way = graph_sets if runtime.graphs else _alive
            alive = np.array([under_way(name, pp, chunks, int(m), rank) for m in number[some]], dtype=float)
            mean = sum(kept) / len(kept)
            if runtime.buffers:
                live = alive * mean + _fullest(config, at, part, last, below)
            else:
                live = alive * mean + np.maximum(part["passing"], part["passing_last"] * last)
            if last and runtime.defers and pp > 1:
                live = live + np.minimum(number[some], runtime.defers) * _waiting(config, at)
            live = live + 2.0 * part["handed"] * (pp > 1) + _communicated(config, at, runtime)
            if runtime.graphs:  # each is captured after a run outside of its pool, where the loss has its memory later
                warm = np.maximum(part["dense"], part["routed"]) - (part["last"] - part["none"]) * last
                live = live + np.maximum(0.0, warm)
            for stage in np.unique(at.stage):
                rows = at.stage == stage
                separate = compute < 4 or stage > 0
                for reshard in (True, False):
                    chosen = rows & ((at.reshard == 1) == reshard)
                    cut = (int(stage), compute, separate, reshard, runtime.keeps.gradient)
                    weights, gradients, optimizer = state(numel, shard, *cut)
                    goes = optimizer + gradients * (stage == 3)  # below that gradients stay
                    moved = np.where(at.offload > 0, goes, 0.0)
                    moment = live
                    if runtime.buffers:
                        stays = optimizer * (at.offload == 0), gradients * ((at.offload == 0) | (stage < 3))
                        there, in_step = _buffers(config, at, int(stage), numel, *stays)
                        moment = np.maximum(live + there, in_step)
                    held = weights + gradients + optimizer - moved + besides * (numel - ends / at.tp) + frozen + moment
                    device[some[chosen]] = np.maximum(device[some[chosen]], held[chosen])
                    away[some[chosen]] = np.maximum(away[some[chosen]], moved[chosen])
    return device, away
