"""The collectives of one training step of a recipe: sizes and groups as `layout/traffic.py` has them, measured.

Every axis sends so many collectives of one kind a step; measured is one of the mean size, in all groups of the axis at
once. Then the path (tp, cp, ep, etp, pp, one collective after the other) is held beside the reduction of gradients
(dp), which a training has at the same time.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from hpctrain.comms.backend import Party, in_turn, nothing
from hpctrain.comms.beside import balanced, left_wrong, overlap
from hpctrain.comms.formulas import OPERATIONS
from hpctrain.comms.groups import Groups, Where
from hpctrain.comms.measure import measure
from hpctrain.comms.result import Result, Row
from hpctrain.comms.spec import Spec
from hpctrain.comms.trial import Test, Trial, trial
from hpctrain.config.schema import RunConfig
from hpctrain.layout.layout import Layout
from hpctrain.layout.placement import DENSE, EXPERT
from hpctrain.layout.traffic import Payload, context_traffic, data_bytes, expert_traffic, pipeline_sends, tensor_traffic

BESIDE = ("dp+cp", "edp")
"""Reductions of gradients."""

DTYPE = {"bf16": "bfloat16", "fp16": "float16", "float32": "float32", "float64": "float64"}


@dataclass(frozen=True)
class Part:
    """Collectives of one kind over one axis in a step.

    Attributes:
        axis: name of the groups.
        operation: a key of `OPERATIONS`; what is sent rank to rank goes around the axis.
        calls: in a step.
        size: S of one, bytes: the mean.
    """

    axis: str
    operation: str
    calls: int
    size: int


def parts(config: RunConfig, layout: Layout) -> tuple[Part, ...]:
    """What a step sends, of the rank of each axis that sends most."""
    found: dict[tuple[str, str], Part] = {}
    for rank in _representatives(layout):
        for axis, traffic in _traffic(config, layout, rank).items():
            ranks = _size(layout, axis)
            for operation, payload in traffic.items():
                if ranks > 1 and payload.bytes and payload.calls:
                    part = _part(axis, operation, payload, ranks)
                    other = found.get((axis, part.operation))
                    if other is None or part.size * part.calls > other.size * other.calls:
                        found[axis, part.operation] = part
    return tuple(found.values())


def _representatives(layout: Layout) -> list[int]:
    """A rank of each stage: others of a stage send as much, but for uneven cuts."""
    return [layout.rank(pp=stage) for stage in range(layout.pp)]


def _size(layout: Layout, axis: str) -> int:
    size = 1
    for name in axis.split("+"):
        size *= getattr(layout, name)
    return size


def _traffic(config: RunConfig, layout: Layout, rank: int) -> dict[str, dict[str, Payload]]:
    """By axis and operation."""
    buckets = max(1, int(config.sharding.bucket_mib * 2**20))

    def bucketed(sizes: dict[str, int]) -> dict[str, Payload]:
        return {op: Payload(-(-size // buckets), size) for op, size in sizes.items()}

    found = {"tp": tensor_traffic(config, layout, rank), "cp": context_traffic(config, layout, rank)}
    found |= expert_traffic(config, layout, rank)
    found["dp+cp"] = bucketed(data_bytes(config, layout, rank, DENSE))
    if layout.ep > 1:
        found["edp"] = bucketed(data_bytes(config, layout, rank, EXPERT))
    if layout.pp > 1:
        sent = sum(pipeline_sends(config, layout, rank).values())
        rounds = config.train.global_batch // (layout.dp * config.train.micro_batch)
        found["pp"] = {"send": Payload(rounds * layout.chunks, sent)}
    return found


def _part(axis: str, operation: str, payload: Payload, ranks: int) -> Part:
    """A payload is what a rank puts in; S of an all-gather is what comes out."""
    size = max(1, payload.bytes // payload.calls) * (ranks if operation == "all_gather" else 1)
    return Part(axis, {"send": "sendrecv"}.get(operation, operation), payload.calls, size)


def mix(spec: Spec, party: Party, where: list[Where], result: Result) -> Result:
    """Every part alone, then path and reductions at the same time."""
    config = RunConfig.model_validate(spec.recipe)
    layout = Layout.of(config.parallel, party.world)
    dtype = DTYPE[config.train.precision]
    if spec.backend == "mpi" and dtype in ("bfloat16", "float16"):
        dtype = "float32"  # of the same bytes; MPI adds up no halves
    rows: list[Row] = []
    lines, several = [], []
    for part in parts(config, layout):
        kind = Groups(part.axis, layout.groups(*part.axis.split("+")))
        test = Test(part.operation, part.size, dtype, "sum", "", party.placements(part.operation)[-1])
        made = measure(party, spec, kind, test)
        group = party.groups(kind.ranks, apart=part.axis in BESIDE)  # both go on at once
        several.append((part, test, trial(spec, party, group, test) if group else None))
        rows += made
        worst = max(made, key=lambda row: row.spread.p50)
        bus = [row.busbw for row in made if row.busbw is not None]
        lines.append(
            asdict(part)
            | {"ranks": len(worst.ranks), "seconds": worst.spread.p50, "busbw": min(bus) if bus else None}
            | {"step_seconds": worst.spread.p50 * part.calls, "meaning": OPERATIONS[part.operation].meaning}
        )
    extra: dict[str, Any] = {"layout": layout.describe(), "dtype": dtype, "parts": lines}
    both = _beside(spec, party, several)
    return replace(result, rows=tuple(rows), extra=extra | ({"beside": both} if both else {}))


def _beside(spec: Spec, party: Party, several: list[tuple[Part, Test, Trial | None]]) -> dict[str, Any] | None:
    """The path beside reductions of gradients that last about as long; None where either is missing."""
    path = [mine.act if mine else nothing for part, _, mine in several if part.axis not in BESIDE]
    sums = [mine.act if mine else nothing for part, _, mine in several if part.axis in BESIDE]
    if not path or not sums:
        return None
    threads = party.threads(several=True)
    for _, _, mine in several:
        if mine:
            mine.fill()
    first, second = in_turn(*sums), in_turn(*path)
    found = overlap(party, "mix", first, second, balanced(party, "mix", first, second, spec.iterations, spec.timeout_s))
    every = party.gather(found)
    worst = type(found)(*(max(getattr(o, name) for o in every) for name in asdict(found)))
    lost = sum(left_wrong(party, test, mine) for _, test, mine in several)
    return asdict(worst) | {"slowdowns": worst.slowdowns, "fraction": worst.fraction, "wrong": lost, "threads": threads}
