"""Dtypes of the precisions a run can have."""

from __future__ import annotations

import torch

COMPUTE = {"float32": torch.float32, "float64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Of weights and activations in forward and backward, and of what pipeline stages hand on."""


def master(precision: str) -> torch.dtype:
    """Of master weights, optimizer state and accumulated gradients."""
    return torch.promote_types(COMPUTE[precision], torch.float32)
