"""What the tests of engine `fsdp` share."""

from __future__ import annotations

from typing import Any

from hpctrain.config.schema import RunConfig
from hpctrain.config.validate import validate
from hpctrain.parallel.mesh import Mesh
from hpctrain.parallel.pipeline import Pipeline
from hpctrain.sharding.engine import Engine
from tests.training import make_config, make_mesh

MODELS: dict[str, dict[str, Any]] = {
    "gqa": {},
    "tied": dict(tied=True, bias=True, activation="gelu"),
    "gpt": dict(kv_heads=4, norm="layernorm", position="learned", dropout=0.1),
    "deep": dict(layers=4, hidden=21, tied=True, bias=True, activation="gelu"),
    "moe": dict(
        init_std=0.1,
        moe=dict(
            experts=8, top_k=2, ffn=12, shared_ffn=16, router="sigmoid", aux_loss=0.03, z_loss=0.002, bias_rate=0.02
        ),
    ),
    "six": dict(init_std=0.1, moe=dict(experts=6, top_k=2, ffn=12, aux_loss=0.03)),
}
"""Nothing about them is even; "deep" is also for pipelines, and four ranks do not divide six experts."""


def fsdp_config(
    world: int, model: str = "gqa", seq: int = 12, more: dict[str, Any] | None = None, **settings: Any
) -> RunConfig:
    """A model on so many ranks, changed by `more`; settings are of parallel, sharding or train, by their own names."""
    own: dict[str, dict[str, Any]] = {"parallel": {}, "sharding": {"engine": "fsdp"}, "train": {"micro_batch": 1}}
    fields = {name: section for section in own for name in type(getattr(RunConfig(), section)).model_fields}
    for name, value in settings.items():
        own[fields[name]][name] = value
    config = make_config(model={**MODELS[model], **(more or {})}, data={"seq": seq}, **own)
    validate(config, world)
    return config


def as_none(config: RunConfig) -> RunConfig:
    """The same under engine `none`."""
    return config.model_copy(update={"sharding": make_config().sharding})


def started(config: RunConfig, world: int) -> tuple[Engine, Mesh, Pipeline]:
    """A rank of a test's world, with chunks that have no values where the engine wants none."""
    from hpctrain.parallel.parallelize import build_chunks
    from hpctrain.sharding.build import build_engine, takes_values

    mesh = make_mesh(config, world)
    engine = build_engine(*build_chunks(config, mesh, takes_values(config)), mesh, config)
    return engine, mesh, Pipeline(engine, mesh, config)
