"""What adapters beside frozen linears cost: `model.adapters`, in products and bytes moved."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hpctrain.layout.parameters import Linear
from hpctrain.plan.gemm import Array, Device
from hpctrain.plan.products import Products, linear
from hpctrain.plan.work import Points, Work


class Beside(NamedTuple):
    """A frozen part of a layer: its products, and bytes that passes over memory move, forward and backward."""

    products: Products
    forward: Array = 0.0
    backward: Array = 0.0


class Shape(NamedTuple):
    """A linear `[out, inner]` of a rank, on `rows`; of experts `batch` of them."""

    name: Linear
    rows: Array
    out: Array
    inner: Array
    batch: Array = 1.0


def shapes(work: Work, points: Points, tokens: Array, ffn: int) -> list[Shape]:
    """Linears of a layer without those of experts; an MLP of width `ffn`, or none."""
    model, tp = work.model, points.tp
    head = model.head_width
    heads, kv = model.heads / tp * head, np.maximum(1.0, model.kv / tp) * head
    out = [Shape("q", tokens, heads, model.hidden), Shape("k", tokens, kv, model.hidden)]
    out += [Shape("v", tokens, kv, model.hidden), Shape("output", tokens, model.hidden, heads)]
    if ffn:
        gate: list[Linear] = ["gate", "up"] if model.gated else ["up"]
        out += [Shape(name, tokens, ffn / tp, model.hidden) for name in gate]
        out.append(Shape("down", tokens, model.hidden, ffn / tp))
    return out


def adapted(work: Work, device: Device, linears: list[Shape], products: Products) -> Beside:
    """Products of linears with what adapters change of them: none for gradients of frozen weights, two thin ones for
    each that is adapted. What they add up is read twice and written, forward and backward; DoRA takes the norms of the
    rows of a weight and scales outputs with them; QLoRA makes values of 4 bits before each product."""
    adapter, width = work.model.adapter, work.width
    if adapter is None:
        return Beside(products)
    out, forward, backward = Products(products.forward, products.inputs), 0.0, 0.0
    for one in linears:
        size = one.batch * one.out * one.inner
        if adapter.kind == "qlora":
            made = size * (0.5 + 1 / adapter.block + width)
            forward, backward = forward + made, backward + made
        if not adapter.adapts(one.name):
            continue
        rows = one.batch * one.rows
        out += linear(device, one.rows, adapter.rank, one.inner, one.batch, width)
        out += linear(device, one.rows, one.out, adapter.rank, one.batch, width)
        forward = forward + 3 * width * rows * one.out
        backward = backward + 3 * width * rows * one.inner
        if adapter.dropout:  # with a mask of a byte
            dropped = (2 * width + 1) * rows * one.inner
            forward, backward = forward + dropped, backward + dropped
        if adapter.kind == "dora":
            norms = linear(device, one.out, adapter.rank, one.inner, one.batch, width)
            out += Products(norms.forward)
            forward, backward = forward + width * (size + 2 * rows * one.out), backward + 3 * width * rows * one.out
    return Beside(out, forward, backward)
