"""Whether a difference between two traces is normal. Pure arithmetic on tensors.

A difference is given as a share of the largest value of the thing itself: of a loss or norm, of the tensor that a
gradient or weight belongs to. How large it may be follows from where it can come from:

- In float64 only the order of sums differs, by some 1e-15 each; 1e-9 leaves room for what AdamW makes of it.
- In other precisions rounding alone moves the result, some tensors much further than others. How far is measured: the
  same recipe runs in that precision in one process, and its distance from the float64 reference, times `ROOM`, is what
  a layout may be away, for each loss, norm and tensor by itself.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hpctrain.parallel.precision import COMPUTE
from hpctrain.verify.trace import Trace

EXACT = 1e-9
ROOM = 10.0
"""Sums in another order may round differently by some times what one order does."""

KINDS = ("loss", "norm", "gradient", "weight")

Distances = Mapping[str, Mapping[str, float]]
"""Kind -> step or parameter -> difference as a share of the largest value."""


def distances(got: Trace, want: Trace, lr: float) -> Distances:
    """How far two traces of the same recipe are from each other.

    Args:
        got: of a layout.
        want: of the reference.
        lr: largest learning rate. A weight smaller than it is held against it: a parameter without a gradient, such
            as the key bias, to which softmax is blind, moves by what AdamW makes of pure rounding.
    """
    largest = max((t.abs().max().item() for t in want.gradients.values()), default=0.0)
    floor = max(largest * 1e-6, 1e-300)
    return {
        "loss": _scalars(got.losses, want.losses),
        "norm": _scalars(got.norms, want.norms),
        "gradient": _tensors(got.gradients, want.gradients, floor),
        "weight": _tensors(got.weights, want.weights, lr),
    }


@dataclass(frozen=True)
class Tolerance:
    """How large differences may be, by kind and place, and why."""

    limit: Callable[[str, str], float]
    why: str


def tolerance(precision: str, measured: Distances | None) -> Tolerance:
    """What a layout may differ from the float64 reference.

    Args:
        precision: it computes in.
        measured: how far one process in that precision is from the reference; not needed for float64.
    """
    if precision == "float64":
        return Tolerance(lambda kind, where: EXACT, f"float64: only the order of sums may differ, so {EXACT:g}")
    assert measured is not None
    eps = torch.finfo(COMPUTE[precision]).eps
    usual = {kind: max(statistics.median(measured[kind].values()), eps) for kind in KINDS}

    def limit(kind: str, where: str) -> float:
        return ROOM * max(measured[kind][where], usual[kind])

    return Tolerance(limit, f"{precision}: {ROOM:g} times as far as one process in {precision} is from float64")


@dataclass(frozen=True)
class Finding:
    """The difference of one kind that comes closest to its limit, or goes furthest beyond.

    Attributes:
        kind: one of `KINDS`.
        worst: difference as a share of the largest value; infinite where something is not finite.
        where: the step or the parameter.
        limit: how large it may be.
    """

    kind: str
    worst: float
    where: str
    limit: float

    @property
    def good(self) -> bool:
        return self.worst <= self.limit  # of what is not a number this is false


def findings(found: Distances, allowed: Tolerance) -> dict[str, Finding]:
    """By kind, the worst one."""
    out = {}
    for kind in KINDS:
        each = [Finding(kind, worst, where, allowed.limit(kind, where)) for where, worst in found[kind].items()]
        out[kind] = max(each, key=lambda f: math.inf if math.isnan(f.worst) else f.worst / f.limit)
    return out


def _scalars(got: Sequence[float], want: Sequence[float]) -> dict[str, float]:
    assert len(got) == len(want), (got, want)
    return {f"step {i + 1}": _relative(g, w) for i, (g, w) in enumerate(zip(got, want))}


def _relative(got: float, want: float) -> float:
    if math.isfinite(got) and math.isfinite(want):
        return abs(got - want) / max(abs(want), 1e-300) if got != want else 0.0
    return math.inf


def _tensors(got: Mapping[str, Tensor], want: Mapping[str, Tensor], floor: float) -> dict[str, float]:
    assert got.keys() == want.keys(), sorted(got.keys() ^ want.keys())
    return {name: _distance(got[name], want[name], floor) for name in want}


def _distance(got: Tensor, want: Tensor, floor: float) -> float:
    if not bool(got.isfinite().all()) or not bool(want.isfinite().all()):
        return math.inf
    scale = max(want.abs().max().item(), floor)
    return float((got.double() - want.double()).abs().max().item() / scale)
