"""Attention proper: queries, keys and values to outputs, of one layer and micro-batch."""

from __future__ import annotations

from typing import NamedTuple

from hpctrain.layout.forward_flops import attention
from hpctrain.plan.gemm import Array, gemm, streamed
from hpctrain.plan.links import Machine
from hpctrain.plan.work import Points, Work

KERNELS: dict[str, dict[str, tuple[float, float]]] = {
    "flash1": {"nvlink3": (0.40, 0.30), "nvlink4": (0.23, 0.17), "": (0.40, 0.30)},
    "flash2": {"nvlink3": (0.73, 0.63), "nvlink4": (0.40, 0.35), "nvlink5": (0.40, 0.35), "": (0.50, 0.43)},
    "flash3": {"nvlink4": (0.75, 0.57), "nvlink5": (0.71, 0.55), "": (0.60, 0.50)},
}
"""Share of the dense peak that long causal sequences with heads of 128 reach, forward and backward, by generation.

FlashAttention-2 (arXiv 2307.08691): on A100 its predecessor reaches 30 to 50% forward and 25 to 35% backward, itself up
to 73% and 63%. FlashAttention-3 (arXiv 2407.08608): on H100 FlashAttention-2 reaches 35 to 40%, itself up to 75%
forward and about 57% backward. flash1 on H100 is taken to lose as much from A100 to H100 as flash2 does.
"""

HALF_SPEED = 350.0
"""Sequence length at which a fused kernel runs at half its speed: FlashAttention-2, figures 4 to 6, from 512 to 16k."""


class Core(NamedTuple):
    """Seconds of attention on one rank."""

    forward: Array
    backward: Array


def efficiency(machine: Machine, work: Work, points: Points, backward: bool) -> Array:
    """Share of the half-precision peak that the fused kernel reaches; a ring's kernels see a part of the sequence."""
    table = KERNELS[work.runtime.attention]
    share = table.get(machine.hardware.domain.link, table[""])[int(backward)]
    width, seq = work.model.head_width, work.seq / (points.cp if work.cp_method == "ring" else 1)
    return share * seq / (seq + HALF_SPEED) * min(1.0, width / (width + 20) * 148 / 128)


def core_flops(work: Work, points: Points) -> Array:
    """Forward FLOPs of one layer's attention on a rank, the causal half."""
    return points.micro_batch * work.seq / points.cp * attention(work.model, work.seq) / points.tp


def core(machine: Machine, work: Work, points: Points) -> Core:
    """Seconds of one layer."""
    if work.runtime.attention == "unfused":
        return _unfused(machine, work, points)
    flops = core_flops(work, points)
    dtype = "bf16" if work.dtype in ("fp8", "bf16", "fp16") and "bf16" in machine.hardware.gpu.peak else work.dtype
    if dtype == "fp8":
        dtype = "fp16"
    peak = machine.hardware.peak(dtype)
    gap = machine.device(dtype).gap
    return Core(
        flops / (peak * efficiency(machine, work, points, False)) + gap,
        2.5 * flops / (peak * efficiency(machine, work, points, True)) + 2 * gap,
    )


def core_bytes(work: Work, points: Points) -> tuple[Array, Array]:
    """Bytes that softmax and dropout of stored scores move, forward and backward.

    Softmax reads and writes the scores, dropout reads them, writes them and a mask of a byte; backward reads the
    gradient, and the mask or the result, and writes the gradient.
    """
    model, width = work.model, work.width
    scores = points.micro_batch * work.seq * work.seq * model.heads / points.tp
    dropped = scores * (2 * width + 1) * bool(model.dropout)
    return scores * 2 * width + dropped, scores * 3 * width + dropped


def _unfused(machine: Machine, work: Work, points: Points) -> Core:
    """Two batched products of whole squares, softmax and dropout between them."""
    model, device = work.model, machine.device("fp16" if work.dtype in ("fp8", "fp16") else work.dtype)
    batch, seq, width = points.micro_batch * model.heads / points.tp, float(work.seq), work.width
    head = float(model.head_width)
    scored = gemm(device, seq, seq, head, batch, width, width)
    summed = gemm(device, seq, head, seq, batch, width, width)
    forward, backward = core_bytes(work, points)
    return Core(
        scored + summed + streamed(device, forward, 2.0),
        scored + summed + 2 * gemm(device, seq, head, seq, batch, width, width) + streamed(device, backward, 2.0),
    )
