"""Reads any region of any tensor of a checkpoint, whatever layout wrote it."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.checkpoint.boxes import by_tensor, first_overlap, missing, text
from hpctrain.checkpoint.manifest import Entry, Manifest, load_index, load_manifest
from hpctrain.checkpoint.tensorfile import TensorFile
from hpctrain.errors import CheckpointError
from hpctrain.layout.boxes import meet, within
from hpctrain.layout.placement import Index

if TYPE_CHECKING:
    from torch import Tensor

OPEN_FILES = 64
"""Files mapped at a time; a checkpoint may have more than a process may open."""


class CheckpointReader:
    """A `StateReader` over one checkpoint. Trusts its files: `verify` is who checks them.

    Args:
        path: the checkpoint's folder.

    Raises:
        CheckpointError: its manifest or an index cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.manifest: Manifest = load_manifest(path)
        except CheckpointError as error:
            raise CheckpointError(f"{path} is not a usable checkpoint: {error}.") from error
        self._file_of: dict[Entry, str] = {}
        for record in self.manifest.files:
            if record.name.endswith(".json"):
                for entry in load_index(path / record.name):
                    self._file_of[entry] = record.name.removesuffix(".json") + ".safetensors"
        self._pieces = by_tensor(self._file_of)
        self._open: OrderedDict[str, TensorFile] = OrderedDict()

    @property
    def step(self) -> int:
        """Optimizer steps made."""
        return self.manifest.step

    @property
    def extra(self) -> dict[str, Any]:
        """What the driver saved beside the engine's state."""
        return self.manifest.extra

    def scalars(self) -> dict[str, float]:
        """Numbers that were saved beside the tensors."""
        return dict(self.manifest.scalars)

    def tensors(self) -> dict[tuple[str, str], tuple[Entry, ...]]:
        """The pieces of each (name, kind)."""
        return {tensor: tuple(pieces) for tensor, pieces in self._pieces.items()}

    def expect(self, shapes: Mapping[str, Index]) -> None:
        """Refuse a checkpoint of another model.

        `read` alone would take the first rows of a larger tensor for a smaller one.

        Args:
            shapes: global shape by parameter name, of all parameters.

        Raises:
            CheckpointError: a parameter is missing on either side, or has another shape.
        """
        mine = {name: pieces[0].global_shape for (name, _), pieces in self._pieces.items()}
        for name in sorted(shapes.keys() | mine.keys()):
            here, there = mine.get(name), shapes.get(name)
            if here != there:
                raise CheckpointError(
                    f"{self.path} is of another model: {name} is {_shape(here)} in the checkpoint and "
                    f"{_shape(there)} in the model; start from a checkpoint of the same model.* settings."
                )

    def read(self, name: str, kind: str, start: Index, shape: Index) -> Tensor:
        """The values of a box, a contiguous CPU tensor in the dtype stored.

        Raises:
            CheckpointError: the checkpoint has no such tensor, or it is smaller, or it has holes there.
        """
        import torch

        return torch.from_numpy(self.array(name, kind, start, shape))

    def array(self, name: str, kind: str, start: Index, shape: Index) -> NDArray[Any]:
        """As `read`, as a numpy array."""
        pieces = self._pieces.get((name, kind))
        if pieces is None:
            raise CheckpointError(f"{self.path} has no {kind} of {name}.")
        whole, region = pieces[0].global_shape, (tuple(start), tuple(shape))
        outside = any(a < 0 or a + n > size for a, n, size in zip(start, shape, whole))
        if outside or not len(start) == len(shape) == len(whole):
            raise CheckpointError(
                f"{kind} of {name} has shape {list(whole)} in {self.path}, and {text(start, shape)} of it was asked "
                f"for; the checkpoint is of another model."
            )
        out = np.empty(shape, np.dtype(pieces[0].dtype))
        met = []
        for piece in pieces:
            common = meet(region, (piece.start, piece.shape))
            if common is not None:
                out[within(common, region[0])] = self._values(piece)[within(common, piece.start)]
                met.append(common)
        if sum(math.prod(c[1]) for c in met) != out.size or first_overlap(met) is not None:
            holes = missing(region, met)
            if holes is not None:
                raise CheckpointError(
                    f"{kind} of {name} has holes in {self.path}: {holes[0]} elements of {text(start, shape)} are in "
                    f"no file, the first at {list(holes[1])}."
                )
        return out

    def _values(self, piece: Entry) -> NDArray[Any]:
        name = self._file_of[piece]
        if name in self._open:
            self._open.move_to_end(name)
        else:
            self._open[name] = TensorFile(self.path / name)
            if len(self._open) > OPEN_FILES:
                self._open.popitem(last=False)
        values = self._open[name].tensor(piece.key)
        if values.shape != piece.shape or values.dtype != piece.dtype:
            raise CheckpointError(
                f"{self.path / name}: {piece.key} is {values.dtype} {list(values.shape)} there and {piece.dtype} "
                f"{list(piece.shape)} in the index."
            )
        return values


def _shape(shape: Index | None) -> str:
    return "absent" if shape is None else str(list(shape))
