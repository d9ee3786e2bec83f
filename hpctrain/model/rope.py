"""Rotary position embedding (Su et al., arXiv 2104.09864), with Llama 3's scaling of its frequencies."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hpctrain.config.schema import ModelConfig, RopeScaling


def frequencies(model: ModelConfig) -> Tensor:
    """Angle per position of each pair of channels, [head_width / 2] float64."""
    exponents = torch.arange(0, model.head_width, 2, dtype=torch.float64) / model.head_width
    plain = model.rope_theta**-exponents
    return plain if model.rope_scaling is None else scale(plain, model.rope_scaling)


def scale(plain: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1's rule: long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    turns = scaling.original_max_seq * plain / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return keep * plain + (1 - keep) * plain / scaling.factor


def rotation(model: ModelConfig, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every angle, each [seq, head_width]; float32 unless the model computes in float64.

    Args:
        positions: [seq] global positions.
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    angles = positions.double()[:, None] * frequencies(model).to(positions.device)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(wide), angles.sin().to(wide)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `[batch, heads, seq, head_width]`; channel i pairs with i + head_width / 2, as in Hugging Face's Llama."""
    left, right = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-right, left), dim=-1) * sin).to(x.dtype)
