"""Whether a difference between two traces is normal. Pure arithmetic on tensors.

A difference is a share of what there is to get right: of a loss or norm, of a gradient's largest value, of the way
that training moved a weight (root of the sum of squares over the tensor). So a gradient of zeros and a weight that was
never updated are 1 away. How large a difference may be follows from where it can come from:

- In float64 only the order of sums differs, by some 1e-15 each; 1e-9 leaves room for what AdamW makes of it.
- In other precisions rounding alone moves the result, some tensors much further than others. How far is measured: the
  same recipe runs in that precision in one process, and its distance from the float64 reference, times `ROOM`, is what
  a layout may be away, for each loss, norm and tensor by itself; but at most `CEILING`, because what is half wrong
  must not pass. Where that leaves no room for rounding, the precision cannot be judged, and that is said.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hpctrain.parallel.precision import COMPUTE
from hpctrain.verify.cases import CannotJudge
from hpctrain.verify.trace import Trace

EXACT = 1e-9
ROOM = 10.0
"""Sums in another order may round differently by some times what one order does."""

CEILING = 0.45
"""Less than the half that a sum over two ranks lacks when it was not made."""

NOTHING = 1e-12
"""A gradient that is smaller, as a share of the largest of all, is float64's rounding and no gradient."""

KINDS = ("loss", "norm", "gradient", "weight")

Distances = Mapping[str, Mapping[str, float]]
"""Kind -> step or parameter -> difference as a share."""


def distances(got: Trace, want: Trace, lr: float) -> Distances:
    """How far two traces of the same recipe are from each other.

    Args:
        got: of a layout.
        want: of the reference.
        lr: largest learning rate. A tensor that moved less is held against it: a parameter without a gradient, such
            as the key bias, to which softmax is blind, moves by what AdamW makes of pure rounding. Its gradient is
            held against the largest of all.
    """
    largest = _largest(want)
    idle = without_gradient(want)
    floors = {name: largest * (1.0 if name in idle else 1e-6) for name in want.gradients}
    return {
        "loss": _scalars(got.losses, want.losses),
        "norm": _scalars(got.norms, want.norms),
        "gradient": _each(got.gradients, want.gradients, lambda name, g, w: _of_largest(g, w, floors[name])),
        "weight": _each(got.weights, want.weights, lambda name, g, w: _of_way(g, w, want.initial.get(name), lr)),
    }


def without_gradient(want: Trace) -> frozenset[str]:
    """Parameters to which the loss of the reference is blind."""
    largest = _largest(want)
    return frozenset(name for name, t in want.gradients.items() if t.abs().max().item() <= NOTHING * largest)


def _largest(want: Trace) -> float:
    return max((t.abs().max().item() for t in want.gradients.values()), default=0.0)


@dataclass(frozen=True)
class Tolerance:
    """How large differences may be, by kind and place, and why."""

    limit: Callable[[str, str], float]
    why: str


def tolerance(precision: str, measured: Distances | None, idle: Collection[str] = ()) -> Tolerance:
    """What a layout may differ from the float64 reference.

    Args:
        precision: it computes in.
        measured: how far one process in that precision is from the reference; not needed for float64.
        idle: parameters without a gradient. AdamW makes whole steps of their rounding, so outside float64 only their
            gradients are judged.

    Raises:
        CannotJudge: rounding leaves too little to judge by.
    """
    if precision == "float64":
        return Tolerance(lambda kind, where: EXACT, f"float64: only the order of sums may differ, so {EXACT:g}")
    assert measured is not None

    def judged(kind: str, where: str) -> bool:
        return kind != "weight" or where not in idle

    eps, usual = torch.finfo(COMPUTE[precision]).eps, {}
    for kind in KINDS:
        those = [distance for where, distance in measured[kind].items() if judged(kind, where)]
        usual[kind] = max(statistics.median(those or [0.0]), eps)
        for where, distance in measured[kind].items():
            if not math.isfinite(distance) or (judged(kind, where) and 2 * distance > CEILING):
                raise CannotJudge(
                    f"{precision} cannot be judged: in {kind} one process in it is {distance:.1e} away from float64 "
                    f"at {where}, so a layout that is half wrong might pass; use a wider --dtype, or more --steps."
                )

    def limit(kind: str, where: str) -> float:
        room = ROOM * max(measured[kind][where], usual[kind])
        return min(room, CEILING) if judged(kind, where) else room

    why = f"{precision}: {ROOM:g} times as far as one process in {precision} is from float64, and at most {CEILING:g}"
    blind = sorted(set(idle) & measured["weight"].keys())
    if blind:
        why += f"; of {blind[0]}{f' and {len(blind) - 1} more' if blind[1:] else ''}, without gradient, no weights"
    return Tolerance(limit, why)


@dataclass(frozen=True)
class Finding:
    """The difference of one kind that comes closest to its limit, or goes furthest beyond.

    Attributes:
        kind: one of `KINDS`.
        worst: difference as a share; infinite where something is not finite.
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


def _each(
    got: Mapping[str, Tensor], want: Mapping[str, Tensor], distance: Callable[[str, Tensor, Tensor], float]
) -> dict[str, float]:
    assert got.keys() == want.keys(), sorted(got.keys() ^ want.keys())
    out = {}
    for name in want:
        finite = bool(got[name].isfinite().all()) and bool(want[name].isfinite().all())
        out[name] = distance(name, got[name].double(), want[name].double()) if finite else math.inf
    return out


def _of_largest(got: Tensor, want: Tensor, floor: float) -> float:
    return float((got - want).abs().max().item() / max(want.abs().max().item(), floor, 1e-300))


def _of_way(got: Tensor, want: Tensor, initial: Tensor | None, lr: float) -> float:
    """What is not trained by AdamW begins at zero."""
    way = want if initial is None else want - initial
    return float((got - want).norm().item() / max(way.norm().item(), lr))
