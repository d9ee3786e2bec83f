"""Every operation, group, dtype and size that was named; and a night, which also looks for who is slow."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hpctrain.comms.backend import Fault, Party
from hpctrain.comms.formulas import OPERATIONS
from hpctrain.comms.groups import Where, groups, layout_of
from hpctrain.comms.measure import measure
from hpctrain.comms.pairs import slow
from hpctrain.comms.result import Result, Row
from hpctrain.comms.spec import Spec
from hpctrain.comms.trial import Test
from hpctrain.errors import ConfigError

MOST_OF_A_PAIR = 4 << 20
"""Bytes of a message by which a night looks for who is slow, at most."""


def collectives(spec: Spec, party: Party, where: list[Where], result: Result) -> Result:
    """Rows in the order in which their settings were named."""
    from hpctrain.cluster.readfabric import read_fabric

    layout = layout_of(spec.layout, party.world)
    fabric = read_fabric(spec.fabric) if spec.fabric else None
    kinds = groups(spec.groups, where, layout, fabric)
    if spec.alone:
        kinds = [type(kind)(kind.name, (ranks,)) for kind in kinds for ranks in kind.ranks]
    fewest = min((len(ranks) for kind in kinds for ranks in kind.ranks), default=1)
    if spec.root >= fewest and any(OPERATIONS[name].rooted for name in spec.operations):
        raise ConfigError(
            "--root", spec.root, f"a group of {fewest} ranks has the indices 0 to {fewest - 1}", "use one"
        )
    fault = Fault(**spec.fault) if spec.fault else None
    rows: list[Row] = []
    for test in tests(spec, party):
        for kind in kinds:
            rows += measure(party, spec, kind, test, fault)
    return replace(result, rows=tuple(rows))


def night(spec: Spec, party: Party, where: list[Where], result: Result) -> Result:
    """The same, and who is slow, by the same ranks."""
    measured = collectives(spec, party, where, result)
    if party.world < 2:
        return replace(measured, extra={"culprits": [], "bad": False, "said": ["undecided: one rank has no pair."]})
    return slow(replace(spec, sizes=(min(MOST_OF_A_PAIR, spec.sizes[-1]),)), party, where, measured)


def tests(spec: Spec, party: Party) -> Iterator[Test]:
    """What is measured in every group."""
    for operation in spec.operations:
        reductions = spec.reductions if OPERATIONS[operation].reduces else ("sum",)
        sizes = spec.sizes if operation != "barrier" else (0,)
        for algorithm in spec.algorithms:
            for dtype in spec.dtypes:
                for reduction in reductions:
                    for size in sizes:
                        for placement in ("in_place",) if algorithm else party.placements(operation):
                            yield Test(operation, size, dtype, reduction, algorithm, placement)
