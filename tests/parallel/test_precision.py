"""Precisions have one width, whoever asks."""

from __future__ import annotations

from hpctrain.layout.activations import COMPUTE_BYTES
from hpctrain.parallel.precision import COMPUTE


def test_bytes_without_torch_are_those_of_the_dtypes() -> None:
    assert {name: dtype.itemsize for name, dtype in COMPUTE.items()} == COMPUTE_BYTES
