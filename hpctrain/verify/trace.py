"""What a run leaves behind to be compared, whole again from the pieces of its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hpctrain.config.schema import RunConfig
from hpctrain.errors import TrainError
from hpctrain.layout.parameters import saved_shapes, trained_specs
from hpctrain.layout.placement import Index

Part = tuple[str, Index, Tensor]
"""Name of a parameter, where a box of it begins, the values."""


@dataclass
class Trace:
    """Of a whole run.

    Attributes:
        losses: of each step, nats a token.
        norms: of the gradient of each step, before clipping.
        gradients: of the first step, after clipping: AdamW's first moment after it, over 1 - beta1. Read from there
            they are the same thing under every engine.
        weights: after the last step, in master precision; and the biases of routers.
        skipped: steps that were not taken because something was not finite, counted from 1.
        initial: weights before the first step; only of the reference.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    skipped: list[int] = field(default_factory=list)
    initial: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class Share:
    """One rank's part of a trace."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[Part] = field(default_factory=list)
    weights: list[Part] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)


def assemble(config: RunConfig, shares: Sequence[Share]) -> Trace:
    """One trace from the shares of all ranks.

    Raises:
        TrainError: ranks disagree on a loss, a norm or a skipped step, or a value is missing or held by two.
    """
    first = shares[0]
    for rank, share in enumerate(shares):
        if not _same(share.losses, first.losses) or not _same(share.norms, first.norms):
            raise TrainError(f"rank {rank} and rank 0 report different losses or norms.")
        if share.skipped != first.skipped:
            raise TrainError(f"rank {rank} skipped steps {share.skipped}, and rank 0 {first.skipped}.")
    trained = {spec.name: spec.shape for spec in trained_specs(config.model)}
    return Trace(
        first.losses,
        first.norms,
        _whole("gradient", trained, [part for share in shares for part in share.gradients]),
        _whole("weight", saved_shapes(config.model), [part for share in shares for part in share.weights]),
        first.skipped,
    )


def _same(a: Sequence[float], b: Sequence[float]) -> bool:
    return bool(torch.equal(torch.tensor(a).nan_to_num(1e300), torch.tensor(b).nan_to_num(1e300)))


def _whole(kind: str, shapes: dict[str, Index], parts: Sequence[Part]) -> dict[str, Tensor]:
    out: dict[str, Tensor] = {}
    held: dict[str, Tensor] = {}
    for name, start, values in parts:
        whole = out.setdefault(name, torch.zeros(shapes[name], dtype=torch.float64))
        window = tuple(slice(s, s + n) for s, n in zip(start, values.shape))
        whole[window] = values.double()
        held.setdefault(name, torch.zeros(shapes[name], dtype=torch.int32))[window] += 1
    for name in shapes:
        if name not in held or not bool((held[name] == 1).all()):
            raise TrainError(f"the ranks do not hold every value of {kind} {name} exactly once.")
    return out
