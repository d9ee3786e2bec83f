"""Combinations of axes, engines and schedules: what the page lists is refused; what is not refused has
placements, memory and traffic."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.config.load import load
from hpctrain.config.schema import RunConfig
from hpctrain.config.validate import validate
from hpctrain.errors import ConfigError
from hpctrain.layout.layout import Layout
from hpctrain.layout.memory import estimate
from hpctrain.layout.parameters import parameter_specs
from hpctrain.layout.placement import DENSE, EXPERT, placements
from hpctrain.layout.recompute import INSIDE
from hpctrain.layout.traffic import (
    context_traffic,
    data_bytes,
    expert_traffic,
    pipeline_bytes,
    replica_bytes,
    tensor_traffic,
)

PAGE = (Path(__file__).parents[2] / "docs" / "combinations.md").read_text()
ROWS = re.findall(r"^\| ([^|]*) \| `([^`|]*)` \| [^|]* \|$", PAGE, re.MULTILINE)


def test_the_table_is_read() -> None:
    assert len(ROWS) == PAGE.partition("## Refused")[2].count("\n|") - 2 > 15


@pytest.mark.parametrize("example", [example for _, example in ROWS])
def test_what_is_listed_is_refused_with_a_mend(example: str) -> None:
    """One sentence, about a setting of the example."""
    config = load("moe-tiny", example.split())
    with pytest.raises(ConfigError) as caught:
        validate(config, config.cluster.gpus_per_node)
    said = str(caught.value)
    assert "\n" not in said and re.search(r"\buse |\bor give ", said), said
    assert caught.value.path in {setting.partition("=")[0] for setting in example.split()}


SMALL: dict[str, Any] = dict(layers=4, hidden=24, heads=4, kv_heads=2, head_dim=6, ffn=40, vocab=53, max_seq=64)
MOES: tuple[dict[str, Any] | None, ...] = (
    None,
    dict(experts=8, top_k=2, ffn=12, shared_ffn=16, dense_layers=1),
    dict(experts=6, top_k=1, ffn=10, capacity=1.2, overflow="pad"),
)
ADAPTERS: tuple[dict[str, Any] | None, ...] = (
    None,
    dict(kind="lora"),
    dict(kind="dora", targets=["attention"]),
    dict(kind="qlora", block=2, dropout=0.1),
    dict(targets=["experts", "q"]),
)


FSDP = st.fixed_dictionaries(
    dict(
        engine=st.just("fsdp"),
        replicas=st.sampled_from([1, 2]),
        reduce_every=st.sampled_from(["micro_batch", "step"]),
        reshard_after_forward=st.booleans(),
    )
)


@st.composite
def drawn(draw: st.DrawFn) -> tuple[RunConfig, int]:
    """Settings of every axis, most of which fit together."""
    size, few = st.sampled_from([1, 2, 4]), st.sampled_from([1, 2])
    pp, dp, cp, tp = draw(few), draw(few), draw(size), draw(size)
    schedule, chunks = draw(st.sampled_from([("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-v", 2)]))
    parallel = dict(pp=pp, cp=cp, tp=tp, ep=draw(size), etp=draw(st.sampled_from([1, tp])))
    parallel |= dict(schedule=schedule, chunks=chunks) if pp > 1 else {}
    parallel |= dict(sp=draw(st.booleans()) and tp > 1, cp_method=draw(st.sampled_from(["ring", "ulysses"])))
    recompute = draw(st.sampled_from(["none", "selective", "full"]))
    operations = draw(st.lists(st.sampled_from(list(INSIDE)), min_size=1, max_size=4, unique=True))
    train = dict(
        precision=draw(st.sampled_from(["float32", "bf16", "fp16", "float64"])),
        micro_batch=draw(few),
        global_batch=16,
        recompute=recompute,
        recompute_ops=operations if recompute == "selective" else ["core_attn"],
        recompute_every=draw(few) if recompute != "none" else 1,
    )
    model = SMALL | dict(moe=draw(st.sampled_from(MOES)), tied=draw(st.booleans()))
    model |= dict(adapter=draw(st.sampled_from(ADAPTERS)))
    sharding = draw(st.one_of(st.integers(0, 3).map(lambda stage: dict(stage=stage)), FSDP))
    config = dict(model=model, parallel=parallel, train=train, sharding=sharding)
    return RunConfig.model_validate(config | dict(data=dict(seq=draw(st.sampled_from([32, 48]))))), pp * dp * cp * tp


@given(drawn())
@settings(max_examples=60)
def test_whatever_is_not_refused_has_placements_memory_and_traffic(drawn: tuple[RunConfig, int]) -> None:
    """Every element is held once by each copy of the model, and every copy's gradients meet in one reduction."""
    config, world = drawn
    try:
        validate(config, world)
    except ConfigError as refused:
        assert "\n" not in str(refused)
        return
    layout = Layout.of(config.parallel, world)
    assert estimate(config, layout).total > 0
    records = [placements(config.model, layout, rank) for rank in range(world)]
    held = dict.fromkeys((spec.name for spec in parameter_specs(config.model)), 0)
    for rank in range(world):
        groups = {over: layout.group_of(rank, *over) for over in (DENSE, EXPERT)}
        for name, record in records[rank].items():
            held[name] += sum(box.numel for box in record.boxes) * (record.owner == rank)
            assert all(records[other][name].boxes == record.boxes for other in groups[record.reduced_over])
    for rank in (0, world - 1):
        for over in (DENSE, EXPERT):
            data_bytes(config, layout, rank, over)
            replica_bytes(config, layout, rank, over)
        for traffic in (tensor_traffic, context_traffic, expert_traffic, pipeline_bytes):
            traffic(config, layout, rank)
    for spec in parameter_specs(config.model):
        copies = layout.edp if "experts" in spec.cuts else layout.dp * layout.cp
        assert held[spec.name] == spec.numel * copies, spec.name
