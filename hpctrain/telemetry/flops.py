"""The FLOP counter: what a token costs, and what a device could do.

Everybody quotes model FLOPs utilisation (MFU) and few mean the same. Both definitions counted here take
forward and backward, and leave out recomputation, norms, biases and the embedding lookup:

    palm    6 N + 12 L d S    attention as a full S x S product (PaLM, torchtitan, nanotron)
    causal  6 N +  6 L d S    attention at half, what a causal mask leaves (Megatron-LM)

N is the number of weights that a token is multiplied with: every matrix of every layer, of the experts those of
top_k, and the output head also where it is the embedding. L is the number of layers, d = heads x head width, S the
sequence length. Packed documents are not discounted: a sample counts as one sequence of S tokens.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from hpctrain.config.schema import ModelConfig, Precision
from hpctrain.layout.forward_flops import attention
from hpctrain.layout.parameters import matmul_weights

HALF: tuple[Precision, ...] = ("bf16", "fp16")
FP16: tuple[Precision, ...] = ("fp16",)

PEAKS: tuple[tuple[frozenset[str], tuple[Precision, ...], float], ...] = (
    (frozenset({"V100", "PCIE"}), FP16, 112e12),  # NVIDIA V100 data sheet, PCIe column
    (frozenset({"V100"}), FP16, 125e12),  # NVIDIA V100 data sheet, SXM2 column
    (frozenset({"A100"}), HALF, 312e12),  # NVIDIA A100 data sheet, the same for SXM and PCIe
    (frozenset({"H100", "PCIE"}), HALF, 756e12),  # NVIDIA H100 PCIe product brief
    (frozenset({"H100", "NVL"}), HALF, 835e12),  # NVIDIA H100 data sheet, NVL column: 1,671 with sparsity
    (frozenset({"H100"}), HALF, 989e12),  # NVIDIA H100 data sheet, SXM column: 1,979 with sparsity
    (frozenset({"GH200"}), HALF, 989e12),  # NVIDIA GH200 data sheet: 1,979 with sparsity
    (frozenset({"H200", "NVL"}), HALF, 835e12),  # NVIDIA H200 data sheet, NVL column: 1,671 with sparsity
    (frozenset({"H200"}), HALF, 989e12),  # NVIDIA H200 data sheet, SXM column: 1,979 with sparsity
    (frozenset({"B200"}), HALF, 2.25e15),  # NVIDIA HGX B200 data sheet: 4.5e15 with sparsity
    (frozenset({"GB200"}), HALF, 2.5e15),  # NVIDIA GB200 NVL72 data sheet: 5e15 with sparsity
    (frozenset({"MI300X"}), HALF, 1300e12),  # AMD MI300X data sheet, 1307 rounded as torchtitan does
)
"""Dense peak of a device, FLOP/s: words its name must hold, precisions, peak. The first match counts."""


@dataclass(frozen=True)
class TokenFlops:
    """Forward and backward FLOPs of one token, in both definitions."""

    palm: int
    causal: int


@dataclass(frozen=True)
class Mfu:
    """Share of the peak that model FLOPs reach, 0 to 1, in both definitions."""

    palm: float
    causal: float


@dataclass(frozen=True)
class Throughput:
    """Turns the time of a step into rates.

    Attributes:
        tokens_per_step: of the global batch, all positions, valid or not.
        devices: ranks that share the work, along every axis.
        flops: of one token.
        peak: of one device, FLOP/s; None where it is not known.
    """

    tokens_per_step: int
    devices: int
    flops: TokenFlops
    peak: float | None = None

    def tps(self, seconds: float) -> float:
        """Tokens a second and device, when a step takes `seconds`."""
        return self.tokens_per_step / (seconds * self.devices)

    def mfu(self, seconds: float) -> Mfu | None:
        """MFU when a step takes `seconds`; None where the peak is not known."""
        if self.peak is None:
            return None
        share = self.tps(seconds) / self.peak
        return Mfu(share * self.flops.palm, share * self.flops.causal)


def flops_per_token(model: ModelConfig, seq: int) -> TokenFlops:
    """Forward and backward FLOPs of one token in a sequence of `seq` tokens.

    A multiply-add is 2 FLOPs and backward costs twice forward, hence 6 a weight. Attention multiplies `seq`
    keys and `seq` values of width d: 2 x 2 x seq x d forward, three times that in all.
    """
    weights = 4 * matmul_weights(model) + 2 * matmul_weights(model, trained=True)
    causal = 3 * model.layers * attention(model, seq)
    return TokenFlops(weights + 2 * causal, weights + causal)


def peak_flops(device_name: str, precision: Precision) -> float | None:
    """Dense peak of a device, FLOP/s, or None where it is not known, so that MFU is not available.

    float32 and float64 have none: which units run them depends on switches of the moment. Slices of a device
    (MIG) have none either.

    Args:
        device_name: as the driver gives it, for example `NVIDIA H100 80GB HBM3`.
        precision: of the matrix products.
    """
    words = set(re.split(r"[^A-Z0-9]+", device_name.upper()))
    if "MIG" in words:
        return None
    return next((peak for need, allowed, peak in PEAKS if need <= words and precision in allowed), None)
