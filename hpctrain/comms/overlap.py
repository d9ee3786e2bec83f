"""A collective beside a stream of matrix products, as a training has it."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from hpctrain.comms.backend import Party, nothing
from hpctrain.comms.beside import Overlap, balanced, left_wrong, overlap
from hpctrain.comms.clock import repeat
from hpctrain.comms.groups import Where, groups, layout_of
from hpctrain.comms.result import Result
from hpctrain.comms.spec import Spec
from hpctrain.comms.trial import Test, trial

SIDE = {"cpu": 256, "cuda": 4096}
"""Rows and columns of the matrices."""

REPEATS = 3
"""Of each, of which the middle one counts."""


def measure_overlap(spec: Spec, party: Party, where: list[Where], result: Result) -> Result:
    """Each operation and size over the first of the groups: seconds alone and beside, the slowest rank's of each; and
    whether the results were right."""
    threads = party.threads(several=False)
    kind = groups(spec.groups[:1], where, layout_of(spec.layout, party.world))[0]
    side = SIDE[party.memory.kind]
    product = party.memory.product(side, spec.dtypes[0])
    group, found = party.groups(kind.ranks), []
    for operation in spec.operations:
        for size in spec.sizes:
            test = Test(operation, size, spec.dtypes[0], spec.reductions[0], "", party.placements(operation)[-1])
            mine = trial(spec, party, group, test) if group else None
            act = mine.act if mine else nothing
            if mine:
                mine.fill()
            calls = balanced(party, operation, act, product, spec.iterations, spec.timeout_s)
            repeat(product, spec.warm_up, party.memory)
            own = [overlap(party, operation, act, product, calls) for _ in range(REPEATS)]
            line = _line(party, operation, size, calls, own, side)
            found.append(line | {"wrong": left_wrong(party, test, mine)})
    return replace(result, extra={"groups": kind.name, "ranks": len(kind.ranks[0]), "lines": found, "threads": threads})


def _line(
    party: Party, operation: str, size: int, calls: tuple[int, int], own: list[Overlap], side: int
) -> dict[str, Any]:
    middle = sorted(own, key=lambda o: o.together)[len(own) // 2]
    every = party.gather(middle)
    worst = Overlap(*(max(getattr(o, name) for o in every) for name in asdict(middle)))
    return {
        "operation": operation,
        "size": size,
        "calls": calls[0],
        "products": calls[1],
        "side": side,
        **asdict(worst),
        "slowdown": worst.slowdowns[0],
        "product_slowdown": worst.slowdowns[1],
        "fraction": worst.fraction,
    }
