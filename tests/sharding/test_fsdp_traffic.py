"""What FSDP2 sends is counted: by formula, against torch's own view of it, and in which order beside computing."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from torch import Tensor, nn

from hpctrain.config.schema import RunConfig
from hpctrain.layout.placement import DENSE, EXPERT
from hpctrain.layout.traffic import data_bytes, replica_bytes
from hpctrain.parallel.mesh import Mesh
from hpctrain.parallel.pipeline import Pipeline
from hpctrain.sharding.engine import Engine
from tests.sharding.deepspeed_case import zero_config
from tests.sharding.fsdp_case import fsdp_config, started
from tests.sharding.test_deepspeed_traffic import Overheard
from tests.training import global_batch, train_step


def one_step(engine: Engine, mesh: Mesh, pipeline: Pipeline, config: RunConfig, step: int) -> None:
    """Without what the test adds up itself."""
    from hpctrain.parallel.context import own_part

    batch = global_batch(config, step)
    share = config.train.global_batch // mesh.dp.size
    mine = own_part(batch.split(share)[mesh.dp.index], config, mesh).split(config.train.micro_batch)
    mesh.meter.reset()
    engine.begin_step(batch.valid_tokens, len(mine))
    pipeline.train(mine)
    engine.step(1e-3)


def counted(config: RunConfig, world: int) -> Any:
    """Of two steps, with an evaluation before the second: bytes of state over the ranks that share it, and what the
    formulas say; whether all were waited for."""
    engine, mesh, pipeline = started(config, world)
    steps, wanted = [], Counter[tuple[str, str]]()
    for step in range(2):
        if step:
            pipeline.evaluate(global_batch(config, 0).split(config.train.micro_batch)[:2])
        one_step(engine, mesh, pipeline, config, step)
        of_state = {k: t for k, t in mesh.meter.traffic.items() if k[1].split()[0] in ("dp+cp", "edp") and t.calls}
        norms = (
            ("all_reduce", "dp+cp"),
            ("all_reduce", "edp"),
            ("all_reduce", "dp+cp shard"),
            ("all_reduce", "edp shard"),
        )
        steps.append({k: t.bytes for k, t in of_state.items() if k not in norms})
        assert all(t.seconds > 0 for k, t in of_state.items() if "replicas" not in k[1])
    for over, axis in ((DENSE, "dp+cp"), (EXPERT, "edp")):
        replicas = replica_bytes(config, mesh.layout, mesh.rank, over)
        for operation, size in data_bytes(config, mesh.layout, mesh.rank, over).items():
            wanted[operation, axis + (" shard" if replicas else "")] += size
        if replicas:
            wanted["all_reduce", f"{axis} replicas"] += replicas
    return steps, dict(wanted)


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize(
    ("world", "model", "settings"),
    [
        (2, "gqa", {}),
        (4, "tied", dict(recompute="full")),
        (2, "gpt", dict(reshard_after_forward=False)),
        (2, "tied", dict(reduce_every="step", prefetch=0)),
        (4, "gqa", dict(replicas=2)),
        (4, "gqa", dict(tp=2, prefetch=3)),
        (4, "deep", dict(pp=2)),
        (4, "deep", dict(pp=2, schedule="gpipe", reshard_after_forward=False)),
        (4, "deep", dict(pp=2, schedule="interleaved", chunks=2)),
        (4, "moe", dict(ep=2, recompute="full", prefetch=2)),
        (8, "moe", dict(ep=2, replicas=2)),
    ],
    ids=str,
)
def test_bytes_are_those_of_the_formula(
    ranks: Any, world: int, model: str, settings: dict[str, Any], precision: str
) -> None:
    config = fsdp_config(world, model, precision=precision, **settings)
    for steps, wanted in ranks(world, counted, config, world):
        assert wanted and steps == [wanted] * 2


def test_a_reduction_in_bf16_is_half_as_large(ranks: Any) -> None:
    config = fsdp_config(2, precision="bf16", reduce_dtype="bf16")
    wide = data_bytes(fsdp_config(2, precision="bf16"), started_layout(2))["reduce_scatter"]
    for steps, wanted in ranks(2, counted, config, 2):
        assert steps == [wanted] * 2 and wanted["reduce_scatter", "dp+cp"] == wide / 2


def started_layout(dp: int) -> Any:
    from hpctrain.layout.layout import Layout

    return Layout(dp=dp)


def overheard(config: RunConfig, world: int) -> Any:
    """Calls of a step, counted and as they reach torch; what two ranks swap is one of ours."""
    engine, mesh, pipeline = started(config, world)
    one_step(engine, mesh, pipeline, config, 0)
    with Overheard() as heard:
        one_step(engine, mesh, pipeline, config, 1)
    ours: Counter[str] = Counter()
    for (operation, axis), traffic in mesh.meter.traffic.items():
        ours[operation if "replicas" in axis else "trades"] += traffic.calls
    return heard.calls, ours


def test_nothing_goes_past_the_count(ranks: Any) -> None:
    """Over gloo a gather or reduction of two is a send and a receive; sums over replicas are torch's."""
    for config, world, trades in ((fsdp_config(2), 2, 2), (fsdp_config(4, replicas=2), 4, 2)):
        for heard, ours in ranks(world, overheard, config, world):
            assert heard.pop("all_reduce", 0) == ours["all_reduce"]
            assert heard == {"send": ours["trades"] * trades / 2, "recv_": ours["trades"] * trades / 2}


def trace(config: RunConfig, world: int) -> Any:
    """Names of what happened in one micro-batch, in order: gathers, reductions, and when layers begin to compute."""
    engine, mesh, pipeline = started(config, world)
    (chunk,) = engine.chunks
    meter = mesh.meter

    def begins(name: str, layer: nn.Module) -> None:
        layer.register_forward_pre_hook(lambda *_: meter.mark(f"forward {name}"))
        layer.register_forward_hook(lambda m, i, out: _on_backward(out[0], name))

    def _on_backward(out: Tensor, name: str) -> None:
        if out.requires_grad:
            out.register_hook(lambda grad: meter.mark(f"backward {name}"))

    for index, layer in chunk.numbered_layers():  # type: ignore[operator]
        begins(f"layers.{index}", layer)
    one_step(engine, mesh, pipeline, config, 0)
    meter.tracing = True
    one_step(engine, mesh, pipeline, config, 1)
    kinds = ("gather ", "gathered ", "reduce ", "reduced ", "forward ", "backward ")
    return [event.name for event in meter.events if event.name.startswith(kinds)]


@pytest.mark.parametrize("depth", [1, 2])
def test_gathers_and_reductions_are_under_way_while_layers_compute(ranks: Any, depth: int) -> None:
    """A layer's weights are asked for before the layer `depth` ahead of it computes, and waited for after that; its
    gradients are sent before the layer below begins its backward, and waited for before those below are sent."""
    config = fsdp_config(2, "deep", micro_batch=4, prefetch=depth)
    for names in ranks(2, trace, config, 2):
        middle = names.index("backward layers.3")
        forward, backward = names[:middle], names[middle:]
        for layer in range(4):
            this, then = f"layers.{layer}", f"layers.{layer + depth}"
            if layer + depth < 4:
                assert in_order(forward, f"gather {then}", f"forward {this}", f"gathered {then}")
                assert in_order(names[middle - 4 :], f"gather {this}", f"backward {then}", f"gathered {this}")
            if layer:
                below = f"backward layers.{layer - 1}"
                sent = f"reduce layers.{layer - 1}"
                assert in_order(backward, f"backward {this}", f"reduce {this}", below, f"reduced {this}", sent)
        assert names.count("gather layers.2") == 2 and names.count("reduce layers.2") == 1
        assert names.count("gather root") == names.count("reduce root") == 1, "the embedding is the head"


def in_order(names: list[str], *wanted: str) -> bool:
    places = [names.index(name) for name in wanted]
    return places == sorted(places)


def test_without_overlap_each_is_waited_for_at_once(ranks: Any) -> None:
    config = fsdp_config(2, "deep", micro_batch=4, overlap=False)
    for names in ranks(2, trace, config, 2):
        begun = [i for i, name in enumerate(names) if name.startswith(("gather ", "reduce "))]
        assert len(begun) > 10
        for i in begun:
            verb, unit = names[i].split()
            assert names[i + 1] == f"{'gathered' if verb == 'gather' else 'reduced'} {unit}"


def beside(config: RunConfig, world: int) -> Any:
    """Seconds that gathers and reductions of state were under way before they were waited for, in a step."""
    engine, mesh, pipeline = started(config, world)
    for step in range(3):
        mesh.meter.reset()
        train_step(engine, mesh, config, step, pipeline)
    out = {operation: t.beside for (operation, axis), t in mesh.meter.traffic.items() if axis == "dp+cp"}
    return out["all_gather"], out["reduce_scatter"]


def test_what_is_hidden_is_counted(ranks: Any) -> None:
    """Of both engines that shard weights."""
    deep = dict(layers=4, hidden=64, ffn=256, kv_heads=4, head_dim=16)
    hidden, waited = fsdp_config(2, more=deep), fsdp_config(2, more=deep, overlap=False)
    for (gathers, reductions), at_once in zip(ranks(2, beside, hidden, 2), ranks(2, beside, waited, 2)):
        assert gathers > 3 * at_once[0] > 0 and reductions > 3 * at_once[1] > 0
    for gathers, _ in ranks(2, beside, zero_config(3, model=deep), 2):
        assert gathers > 0
