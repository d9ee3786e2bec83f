"""Where the fragments that ZeRO gives a rank lie in the logical tensors, and how to read and write them.

ZeRO flattens a rank's parameters and gives each data-parallel rank a range of the result: per parameter at
most one flat range. Stages 1 and 2 cut the concatenation of a group's parameters, stage 3 every parameter.
Nothing here gathers: a fragment's elements go straight to and from boxes of the logical tensor.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hpctrain.layout.boxes import meet, within
from hpctrain.layout.placement import Index, Placement, flat_boxes
from hpctrain.sharding.state import KINDS, MOMENTS, WEIGHT, Piece, StateReader

Slices = tuple[slice, ...]


@dataclass(frozen=True)
class Section:
    """Part of a fragment that is one box of the logical tensor.

    Attributes:
        first: where the flat block that holds it begins in the fragment.
        block: shape of that block; it is whole in the fragment.
        inside: the section within the block.
        start: where it begins in the logical tensor.
        shape: its shape.
    """

    first: int
    block: Index
    inside: Slices
    start: Index
    shape: Index

    def view(self, values: Tensor) -> Tensor:
        """The section of a fragment's flat values."""
        return values[self.first : self.first + math.prod(self.block)].view(self.block)[self.inside]


def sections(placement: Placement, start: int, numel: int) -> tuple[Section, ...]:
    """The sections of the flat range `[start, start + numel)` of a rank's local tensor."""
    out, first = [], 0
    for block in flat_boxes(placement.local_shape, start, numel):
        for box in placement.boxes:
            common = meet((block.start, block.shape), (box.local, box.shape))
            if common is not None:
                low, shape = common
                at = tuple(g + a - s for g, a, s in zip(box.start, low, box.local))
                out.append(Section(first, block.shape, within(common, block.start), at, shape))
        first += block.numel
    return tuple(out)


@dataclass(frozen=True)
class Fragment:
    """The flat range of one parameter whose master weight and moments this rank holds.

    Attributes:
        name: of the parameter.
        parameter: DeepSpeed's, that the model computes with.
        start, numel: the range, in elements of the rank's local tensor.
    """

    name: str
    parameter: nn.Parameter
    start: int
    numel: int


class Store(ABC):
    """Master weights and moments of one rank under one family of ZeRO stages.

    Args:
        zero: DeepSpeed's ZeRO optimizer.
        parameters: by name.
    """

    def __init__(self, zero: Any, parameters: Mapping[str, nn.Parameter]) -> None:
        self.zero = zero
        self.parameters = {name: p for name, p in parameters.items() if p.requires_grad}
        self.frozen = {name: p for name, p in parameters.items() if not p.requires_grad}

    @abstractmethod
    def fragments(self) -> Iterator[Fragment]:
        """What this rank holds."""

    @abstractmethod
    def read(self, fragment: Fragment, kind: str) -> Tensor:
        """The fragment's values, flat, float32; they may share memory with DeepSpeed's."""

    @abstractmethod
    def write(self, fragment: Fragment, kind: str, values: Tensor) -> None:
        """Set the fragment's values."""

    def compute(self, parameter: nn.Parameter) -> Tensor:
        """All values of a parameter that the model computes with. Collective where they are sharded."""
        return parameter.detach()

    def kept(self, parameter: nn.Parameter) -> tuple[int, Tensor]:
        """Of a parameter that is not trained: where the range that this rank keeps begins, and the range, flat. There
        is no other copy of it."""
        return 0, parameter.data.view(-1)

    @abstractmethod
    def publish(self) -> None:
        """Bring the weights the model computes with in line with the master weights. Collective."""

    @abstractmethod
    def _flats(self) -> list[Tensor]:
        """The flat tensors that the inner optimizer updates."""

    def start_at(self, step: int) -> None:
        """Make the inner optimizer's state as it is after `step` updates, with moments that are zero."""
        optimizer = self.zero.optimizer
        torch_adam = isinstance(optimizer, torch.optim.AdamW)
        for flat in self._flats():
            moments = {kind: torch.zeros_like(flat, requires_grad=False) for kind in MOMENTS}
            optimizer.state[flat] = {"step": torch.tensor(float(step)) if torch_adam else step, **moments}

    def step(self) -> int:
        """Updates made."""
        return int(self.zero.optimizer.state[self._flats()[0]]["step"])

    def begin_step(self, micro_batches: int) -> None:
        """A step of so many backward passes begins."""

    def stepped(self) -> None:
        """An update was made, and was not skipped."""

    def close(self) -> None:
        """Give back what outlives the object."""


class ShardedStates(Store):
    """Stages 1 and 2: a fragment is what DeepSpeed's mapping of a parameter to its high-precision copy says."""

    def fragments(self) -> Iterator[Fragment]:
        for name, parameter in self.parameters.items():
            mapping = parameter._hp_mapping  # type: ignore[attr-defined]
            if mapping is not None:
                address = mapping.lp_fragment_address
                yield Fragment(name, parameter, address.start, address.numel)

    def read(self, fragment: Fragment, kind: str) -> Tensor:
        mapping = fragment.parameter._hp_mapping  # type: ignore[attr-defined]
        values: Tensor = mapping.get_hp_fragment(None if kind == WEIGHT else kind)
        return values.detach()

    def write(self, fragment: Fragment, kind: str, values: Tensor) -> None:
        self.read(fragment, kind).copy_(values)

    def publish(self) -> None:
        self.zero.update_lp_params()

    def start_at(self, step: int) -> None:
        super().start_at(step)
        self.zero._hp_optimizer_states_linked = False
        self.zero._lazy_init_hp_params_optimizer_state()

    def _flats(self) -> list[Tensor]:
        flats: list[Tensor] = self.zero.single_partition_of_fp32_groups
        return flats


class ShardedParameters(Store):
    """Stage 3: every parameter is cut into equal ranges, the last ones padded."""

    def fragments(self) -> Iterator[Fragment]:
        for name, parameter in self.parameters.items():
            size = parameter.ds_tensor.ds_numel  # type: ignore[attr-defined]
            start = size * self.zero._get_param_partition_rank(parameter)
            numel = min(size, parameter.ds_numel - start)  # type: ignore[attr-defined]
            if numel > 0:
                yield Fragment(name, parameter, start, numel)

    def read(self, fragment: Fragment, kind: str) -> Tensor:
        key = None if kind == WEIGHT else kind
        values: Tensor = self.zero.get_local_fp32_param(fragment.parameter, key)
        return values.detach()[: fragment.numel]

    def write(self, fragment: Fragment, kind: str, values: Tensor) -> None:
        padding = fragment.parameter.ds_tensor.ds_numel - fragment.numel  # type: ignore[attr-defined]
        key = None if kind == WEIGHT else kind
        self.zero.set_local_hp_param(F.pad(values, (0, padding)), fragment.parameter, key)

    def kept(self, parameter: nn.Parameter) -> tuple[int, Tensor]:
        part = parameter.ds_tensor  # type: ignore[attr-defined]
        start = part.ds_numel * self.zero._get_param_partition_rank(parameter)
        return start, part.data[: max(0, min(part.ds_numel, parameter.ds_numel - start))]  # type: ignore[attr-defined]

    def compute(self, parameter: nn.Parameter) -> Tensor:
        from deepspeed.runtime.zero import GatheredParameters

        with GatheredParameters([parameter]):
            return parameter.detach().clone()

    def publish(self) -> None:
        self.zero._partition_all_parameters()
        for group in range(len(self._flats())):
            self.zero._reassign_or_swap_out_partitioned_parameters(group)
        if self.zero.persistent_parameters:
            self.zero.persistent_parameters[0].all_gather(self.zero.persistent_parameters)

    def _flats(self) -> list[Tensor]:
        flats: list[Tensor] = self.zero.fp32_partitioned_groups_flat
        return flats


def pieces(store: Store, placements: Mapping[str, Placement], rank: int) -> Iterator[Piece]:
    """What this rank writes: its fragments of the parameters it owns. Replicas elsewhere write nothing."""
    for fragment in store.fragments():
        placement = placements[fragment.name]
        if placement.owner == rank:
            for kind in KINDS:
                for section in sections(placement, fragment.start, fragment.numel):
                    yield _piece(store, fragment, placement, kind, section)


def _piece(store: Store, fragment: Fragment, placement: Placement, kind: str, section: Section) -> Piece:
    def fetch() -> Tensor:
        return torch.empty(section.shape).copy_(section.view(store.read(fragment, kind)))

    shape, start = placement.global_shape, section.start
    return Piece(fragment.name, kind, shape, start, section.shape, torch.float32, fetch)


def load(
    store: Store,
    placements: Mapping[str, Placement],
    reader: StateReader,
    step: int,
    kinds: Sequence[str] = KINDS,
) -> None:
    """Take master weights and moments as they are after `step` updates, and what is not trained; moments that are left
    out are zero.

    Collective.
    """
    store.start_at(step)
    for fragment in store.fragments():
        placement = placements[fragment.name]
        for kind in kinds:
            values = torch.empty(fragment.numel)
            for section in sections(placement, fragment.start, fragment.numel):
                section.view(values).copy_(reader.read(fragment.name, kind, section.start, section.shape))
            store.write(fragment, kind, values.to(fragment.parameter.device))
    for name, parameter in store.frozen.items():
        start, part = store.kept(parameter)
        values = torch.empty(len(part))
        for section in sections(placements[name], start, len(part)):
            section.view(values).copy_(reader.read(name, WEIGHT, section.start, section.shape))
        part.copy_(values)
    store.publish()
