"""Bytes that are there for a moment of a step, besides state and activations. Plain arithmetic, no torch.

Weights that ZeRO 3 and FSDP2 have gathered, gradients on their way, and what AdamW makes while it updates.
`layout/phases.py` adds them up over a schedule, and the planner's screen over many layouts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from hpctrain.config.schema import RunConfig
from hpctrain.layout.activations import COMPUTE_BYTES

N = TypeVar("N", int, Any)
"""A number, or an array of numbers."""


@dataclass(frozen=True)
class Units:
    """Elements that a rank computes with together, before any are sharded, by what FSDP2 gathers as one.

    Attributes:
        layer: of its largest layer, experts too.
        first: of what makes hidden states of tokens.
        last: of what makes logits of hidden states.
        root: of the embedding where it is the head of the same chunk; then it is in neither of these.
    """

    layer: int = 0
    first: int = 0
    last: int = 0
    root: int = 0


NO_UNITS = Units()


class Moment(NamedTuple):
    """A moment of a forward or a backward: what is there then of what may come and go.

    Attributes:
        gone: layers whose activations are not there: of a forward, those to come; of a backward, those that were.
        bytes: gathered weights, gradients on their way, and gradients that have become more.
    """

    gone: int
    bytes: int


class Moving(ABC):
    """What an engine moves, and what it holds of gradients as backwards go on."""

    in_step: int = 0
    """Bytes while weights are updated."""

    @abstractmethod
    def kept(self, backwards: int) -> int:
        """Bytes of gradients after so many backwards of a step."""

    def waiting(self, backwards: int) -> int:
        """Bytes besides of gradients that are on their way in a forward after so many backwards."""
        return 0

    @abstractmethod
    def at_loss(self) -> int:
        """Bytes besides while the loss is computed, forward or backward."""

    @abstractmethod
    def forward(self, layers: int, last: bool) -> Iterator[Moment]:
        """Of a stage of so many layers; `last`: it has the head."""

    @abstractmethod
    def backward(self, layers: int, last: bool, backwards: int) -> Iterator[Moment]:
        """The same, after so many backwards before."""


def of_zero(stage: int, compute: int, bucket: N, unit: N, part: N, gradients: N, temporaries: int = 2) -> tuple[N, N]:
    """Bytes that DeepSpeed has besides state in forward and backward, and in its update.

    Args:
        stage: 1 to 3.
        compute: bytes of a weight in the computation.
        bucket: bytes of one.
        unit: elements of the largest unit.
        part: bytes of the master weights of the rank.
        gradients: bytes of gradients that are kept.
        temporaries: that AdamW makes of each part, as large as it.
    """
    gathered = bucket * (stage != 2) + 2 * unit * compute * (stage == 3)  # its limit of what is gathered at once
    copies = (1 if stage < 3 and compute < 4 else 2) + temporaries  # of gradients; AdamW works on one flat tensor
    more = copies * part - gradients
    return gathered, (more + abs(more)) // 2 + bucket * (stage == 3)


class Plain(Moving):
    """Of the engines that hold a whole gradient of each weight, or that DeepSpeed shards."""

    def __init__(self, gradients: int, there: int, on_its_way: int, in_step: int) -> None:
        self._gradients, self._there, self._way, self.in_step = gradients, there, on_its_way, in_step

    def kept(self, backwards: int) -> int:
        return self._gradients

    def at_loss(self) -> int:
        return self._there

    def forward(self, layers: int, last: bool) -> Iterator[Moment]:
        yield Moment(0, self._there)

    def backward(self, layers: int, last: bool, backwards: int) -> Iterator[Moment]:
        yield Moment(0, self._there + self._way)


class OfFsdp(Moving):
    """Of FSDP2: units gathered for computing, in a buffer before that, and ahead of it; whole gradients of a unit until
    they are copied to what is sent, that until it is; and the parts that come back.

    A backward's sums are added to those before when the next one begins, so between two there are both.

    Args:
        units: of the rank.
        shard: bytes of the gradients that it keeps.
        updating: bytes that AdamW makes while it updates.
        ranks: that share the state.
        micro_batches: of a step.
        streams: collectives are hidden by streams: what was gathered is kept until the next unit has come, and what is
            received is no buffer of ours.
    """

    def __init__(
        self, config: RunConfig, units: Units, shard: int, updating: int, ranks: int, streams: bool, micro_batches: int
    ) -> None:
        sharding, self._width = config.sharding, COMPUTE_BYTES[config.train.precision]
        self._units, self._shard, self._streams, self._ahead = units, shard, streams, sharding.prefetch
        self._master, self._ranks = max(self._width, 4), ranks
        self._once, self._held = sharding.reduce_every == "step", not sharding.reshard_after_forward
        sent = 2 if self._width < 4 and sharding.reduce_dtype == "bf16" else self._master
        goes_on = sharding.replicas == 1 and sharding.reduce_dtype == "float32" and config.train.overlap
        self._goes_on = goes_on and not streams
        self._sent = sent * (2 - 1 / ranks if self._goes_on else 1)  # of an element of a unit; with what others send
        self._twice = sharding.replicas == 1 and not self._once  # replicas are summed over once a step
        self._way = round((units.first + units.root or units.layer) * self._sent)  # what a backward reduces last
        self.in_step = max(self._way + shard * (self._twice and micro_batches > 1), updating)

    def kept(self, backwards: int) -> int:
        if self._once:
            return self._shard * self._ranks * (backwards > 0)
        return self._shard * min(backwards, 1 + self._twice)

    def waiting(self, backwards: int) -> int:
        return self._way * (self._goes_on and not self._once and backwards > 0)

    def at_loss(self) -> int:
        copies = 1 + self._streams
        return 0 if self._held else self._width * (copies * self._units.last + self._units.root)

    def forward(self, layers: int, last: bool) -> Iterator[Moment]:
        for gone in {0, min(self._ahead, max(layers - 1, 0))}:
            yield Moment(gone, self._gathered(gone, last and gone < self._ahead))

    def backward(self, layers: int, last: bool, backwards: int) -> Iterator[Moment]:
        """While the first and the second layer's runs, the first with nothing more to gather ahead, and the last; then
        at the end of the embedding's."""
        units, head = self._units, self._units.last if last else 0
        for gone in sorted({g for g in (0, 1, layers - 1 - self._ahead, layers - 1) if 0 <= g < layers}):
            sent = units.layer if gone else head
            of_layer = round(sent * self._sent) + units.layer * self._width
            yield Moment(gone, self._gathered(layers - 1 - gone, False) + of_layer + self._grown(gone, layers, head))
        ends = units.first + units.root
        yield Moment(layers, round(ends * (self._width + self._sent)) + self._grown(layers, layers, head))

    def _gathered(self, more: int, head: bool) -> int:
        """Of a layer, and of what is ahead of it: so many layers at the most, or the head."""
        if self._held:
            return 0
        layers = 1 + self._streams + min(self._ahead, more)
        return self._width * (layers * self._units.layer + head * self._units.last + self._units.root)

    def _grown(self, gone: int, layers: int, head: int) -> int:
        """Of gradients, since the backward began."""
        if self._once:
            return 0
        return self._master * (head + gone * self._units.layer) // self._ranks
