"""Weights of a rank's chunks that are not trained: adapters lie beside them. They have no master weights and no state,
and come from a checkpoint as they are, in the precision of the computation or in 4 bits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from hpctrain.layout.placement import Placement
from hpctrain.model.packed import Read, packed_weights
from hpctrain.sharding.state import WEIGHT, StateReader, region


def load_parameters(
    parameters: Mapping[str, nn.Parameter], records: Mapping[str, Placement], reader: StateReader
) -> None:
    """Fill parameters that a rank holds whole, by name."""
    for name, parameter in parameters.items():
        for box in records[name].boxes:
            region(parameter.data, box).copy_(reader.read(name, WEIGHT, box.start, box.shape))


def load_packed(chunks: Iterable[nn.Module], reader: StateReader, device: torch.device) -> None:
    """Fill the weights in 4 bits."""
    for chunk in chunks:
        for name, packed in packed_weights(chunk).items():
            packed.fill(_of(name, reader), device)


def _of(name: str, reader: StateReader) -> Read:
    return lambda start, shape: reader.read(name, WEIGHT, start, shape)
