"""What the planner says of a study: each size as it is run, or each with the best layout that is found."""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.config.schema import RunConfig
from hpctrain.errors import ConfigError
from hpctrain.layout.layout import Layout
from hpctrain.layout.traffic import (
    Traffic,
    context_traffic,
    data_bytes,
    expert_traffic,
    pipeline_sends,
    tensor_traffic,
    wire,
)
from hpctrain.plan.links import STEPS, Machine
from hpctrain.plan.scaling import Mean, Point
from hpctrain.plan.search import Plan, available, priced, search
from hpctrain.plan.work import Work
from hpctrain.scale.study import Study

EXPOSED = ("tp", "cp", "ep", "pp bubble", "pp sends", "dp", "shard")
"""Parts of a price in which a rank waits for others."""


def point(machine: Machine, study: Study, nodes: int, best: bool = False) -> tuple[Point, Plan]:
    """A size.

    Args:
        best: with the best layout there is, in the place of that of the recipe.

    Raises:
        ConfigError: it cannot run, or no layout of those that are searched fits. That of the recipe may not: the
            point says so.
    """
    size = study.size(nodes)
    devices = size.cluster.nodes * size.cluster.gpus_per_node
    work = Work.of(size)
    plan = search(size, machine, devices, work, 1)[0] if best else priced(size, machine, devices, work)
    parts = plan.price.at(0)
    waits = sum(parts[name] for name in EXPOSED)
    named = {"compute": parts["compute"], "waiting for others": waits, "optimizer": parts["optimizer"]}
    named["rest"] = plan.seconds - sum(named.values())
    tokens = size.train.global_batch * size.data.seq
    made = Point(
        *(nodes, devices, tokens, Mean(plan.seconds), Mean(waits), named, plan.mfu(machine)),
        needs=plan.memory.total,
        room=available(machine, plan.work).device,
    )
    return made, plan


def points(machine: Machine, study: Study, best: bool = False) -> dict[int, Point | str]:
    """All sizes; where one cannot be priced, why."""
    out: dict[int, Point | str] = {}
    for nodes in study.nodes:
        try:
            out[nodes] = point(machine, study, nodes, best)[0]
        except ConfigError as error:
            out[nodes] = str(error)
    return out


def sent(config: RunConfig, layout: Layout) -> tuple[float, float]:
    """Messages and bytes that leave the first rank in a step, as the formulas of traffic have it.

    A ring of n ranks sends n - 1 messages a round, and an all-reduce has two rounds. Gradients go in buckets.
    """
    axes = layout.sizes
    messages = bytes_ = 0.0
    of_axis: list[tuple[int, Traffic]] = [
        (axes(("tp",))[0], tensor_traffic(config, layout)),
        (axes(("cp",))[0], context_traffic(config, layout)),
        *((axes((axis,))[0], traffic) for axis, traffic in expert_traffic(config, layout).items()),
    ]
    for ranks, traffic in of_axis:
        for operation, payload in traffic.items():
            rounds = 1 if operation == "send" else STEPS[operation] * (ranks - 1)
            messages += payload.calls * rounds
            bytes_ += wire(operation, payload.bytes, ranks)
    ranks, bucket = layout.dp * layout.cp, config.sharding.bucket_mib * 2**20
    for operation, size in data_bytes(config, layout).items():
        messages += max(1.0, size / bucket) * STEPS[operation] * (ranks - 1)
        bytes_ += wire(operation, size, ranks)
    micro_batches = config.train.global_batch // (layout.dp * config.train.micro_batch)
    sends = pipeline_sends(config, layout, 0)
    return messages + len(sends) * micro_batches * layout.chunks, bytes_ + sum(sends.values())


def sent_of(study: Study, nodes: Sequence[int]) -> list[tuple[float, float]]:
    """Messages and bytes of sizes."""
    out = []
    for number in nodes:
        size = study.size(number)
        out.append(sent(size, Layout.of(size.parallel, size.cluster.nodes * size.cluster.gpus_per_node)))
    return out
