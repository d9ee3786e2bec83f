"""Matrix products of linears: forward, and both parts of backward."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.plan.gemm import Array, Device, gemm


@dataclass(frozen=True)
class Products:
    """Matrix products of a part of a layer: forward, for the input's gradient, for the weight's."""

    forward: Array = 0.0
    inputs: Array = 0.0
    weights: Array = 0.0

    def __add__(self, other: Products) -> Products:
        return Products(self.forward + other.forward, self.inputs + other.inputs, self.weights + other.weights)

    def __mul__(self, times: Array) -> Products:
        return Products(self.forward * times, self.inputs * times, self.weights * times)


def linear(
    device: Device, rows: Array, out: Array, inner: Array, batch: Array = 1.0, width: float = 2.0, added: float = 8.0
) -> Products:
    """A linear `[out, inner]` on `rows`; the weight's gradient is added to a sum, `added` bytes an element."""
    return Products(
        gemm(device, rows, out, inner, batch, width, width),
        gemm(device, rows, inner, out, batch, width, width),
        gemm(device, out, inner, rows, batch, width, added),
    )
