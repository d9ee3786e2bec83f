"""ZeRO 3 where weights are gathered module by module, as DeepSpeed does: which are there, which are on their way, and
which are gathered once more because they were let go too early. A few layers are played, with one clock for computation
and one for communication.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from hpctrain.config.schema import ModelConfig
from hpctrain.plan.gemm import Array
from hpctrain.plan.work import ByModule, Phase

Seconds = Callable[[float], Array]
"""Of a collective over the weights of a module, by their number of elements."""


class Use(NamedTuple):
    """A module computes.

    Attributes:
        module: those of a layer have numbers of their own.
        numel: elements that are sharded.
    """

    module: int
    numel: float
    seconds: Array
    backward: bool = False


class Way:
    """Weights, gradients and time on the way through a trace of modules."""

    def __init__(self, trace: Sequence[Use], rules: ByModule, gather: Seconds, reduce: Seconds) -> None:
        self.trace, self.rules, self.gather, self.reduce = trace, rules, gather, reduce
        self.here: dict[int, float] = {}
        self.coming: dict[int, float] = {}
        self.waiting: list[float] = []  # gradients that are not reduced yet
        self.computed: Array = 0.0
        self.sent: Array = 0.0

    def end(self) -> Array:
        """When all is computed and sent."""
        for place, use in enumerate(self.trace):
            if use.numel and use.module not in self.here | self.coming:
                self._send([use])
            if use.module in self.coming:
                self.computed = np.maximum(self.computed, self.sent)
                self.here |= self.coming
                self.coming = {}
            self._ahead(place)
            self.computed = self.computed + use.seconds
            if use.numel and use.backward:
                self._gradient(use.numel)
            if use.numel and self._distance(place) >= self.rules.reuse:
                del self.here[use.module]
        self._reduce()
        return np.maximum(self.computed, self.sent)

    def _send(self, uses: Sequence[Use]) -> None:
        """Gather weights, one module after the other. The device is waited for before (torch.cuda.synchronize)."""
        self.computed = self.sent = np.maximum(self.computed, self.sent)
        for use in uses:
            self.sent = self.sent + self.gather(use.numel)
            self.coming[use.module] = use.numel

    def _ahead(self, place: int) -> None:
        """What is used next, if nothing is on its way and there is room: whole modules, until they are enough."""
        if self.coming or sum(self.here.values()) >= self.rules.live:
            return
        chosen: dict[int, Use] = {}
        for use in self.trace[place + 1 :]:
            if use.numel and use.module not in self.here:
                chosen[use.module] = use
            if sum(one.numel for one in chosen.values()) >= self.rules.prefetch:
                break
        if chosen:
            self._send(list(chosen.values()))

    def _distance(self, place: int) -> float:
        """Elements that are used until this module is again."""
        between = 0.0
        for use in self.trace[place + 1 :]:
            if use.module == self.trace[place].module:
                return between
            between += use.numel
        return float("inf")

    def _gradient(self, numel: float) -> None:
        if sum(self.waiting) + numel > self.rules.bucket:
            self._reduce()
        self.waiting.append(numel)

    def _reduce(self) -> None:
        if self.waiting:
            self.sent = np.maximum(self.computed, self.sent)
        for numel in self.waiting:
            self.sent = self.sent + self.reduce(numel)
        self.waiting = []


def of_layer(model: ModelConfig, tp: int, time: Phase) -> list[tuple[float, Array]]:
    """Modules of a dense layer in their order: sharded elements of each, and seconds. What is too small to be sharded
    is left out; passes over memory are two modules, before attention and before the MLP."""
    heads, kv, head = model.heads, model.kv, model.head_width
    into, out = (heads + 2 * kv) * head * model.hidden, heads * head * model.hidden
    down = model.ffn_width * model.hidden
    up = down * (2 if model.gated else 1)
    share = time.matmul / (into + out + up + down)
    between = time.pointwise / 2
    every = [(0, between), (into, share * into), (0, time.attention), (out, share * out)]
    every += [(0, between), (up, share * up), (down, share * down)]
    return [(numel / tp, seconds) for numel, seconds in every]


def seconds(
    forward: Sequence[tuple[float, Array]],
    backward: Sequence[tuple[float, Array]],
    rules: ByModule,
    gather: Seconds,
    reduce: Seconds,
    again: bool,
) -> tuple[Array, Array]:
    """Of a layer among many alike, forward and backward.

    Args:
        forward, backward: sharded elements and seconds of its modules, both in the order of forward.
        again: it is computed again before its backward.
    """

    def there(layer: int) -> list[Use]:
        return [Use(len(forward) * layer + i, *one) for i, one in enumerate(forward)]

    def back(layer: int) -> list[Use]:
        uses = [Use(len(backward) * layer + i, *one, True) for i, one in enumerate(backward)]
        return (there(layer) if again else []) + uses[::-1]

    def of(layer: Callable[[int], list[Use]]) -> Array:
        few, more = (
            Way([use for i in range(number) for use in layer(i)], rules, gather, reduce).end() for number in (3, 5)
        )
        return (more - few) / 2

    return of(there), of(back)
