"""ZeRO 1 and 2 train adapters as engine `none` does in float32, shard what is trained, and leave the rest to the bit.

Tolerances as in `test_deepspeed_equivalence.py`.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest

from hpctrain.config.schema import OffloadConfig, RunConfig
from hpctrain.layout.parameters import trained_specs
from tests.adapting import Trace, adapted, assemble, compare, reference, run
from tests.training import make_mesh

MODELS: dict[str, dict[str, Any]] = {
    "lora": dict(kind="lora", model=dict(tied=True)),
    "dora": dict(kind="dora", model=dict(bias=True, activation="gelu")),
    "qlora": dict(kind="qlora"),
}
CASES = [
    (1, "lora", dict(tp=2, sp=True, pp=2), 4),
    (2, "lora", dict(), 2),
    (1, "dora", dict(), 2),
    (2, "dora", dict(tp=2), 4),
    (1, "qlora", dict(tp=2), 4),
    (2, "qlora", dict(pp=2), 2),
]


def config_of(name: str, stage: int, parallel: dict[str, Any], **train: Any) -> RunConfig:
    return adapted(
        **MODELS[name],
        data={"seq": 12},
        parallel=parallel,
        train={"precision": "float32", "micro_batch": 2, **train},
        sharding={"stage": stage, "bucket_mib": 0.005},
    )


@functools.cache
def expected(name: str) -> Trace:
    return reference(adapted(**MODELS[name], data={"seq": 12}))


@pytest.mark.parametrize(("stage", "name", "parallel", "world"), CASES, ids=str)
def test_equals_one_process(ranks: Any, stage: int, name: str, parallel: dict[str, Any], world: int) -> None:
    config = config_of(name, stage, parallel)
    got = assemble(config, ranks(world, run, config, world))
    want = Trace(expected(name).losses, expected(name).norms, [], expected(name).weights)
    compare(Trace(got.losses, got.norms, [], got.weights), want, 1e-4)
    assert abs(got.losses[0] / want.losses[0] - 1) < 1e-6 and abs(got.norms[0] / want.norms[0] - 1) < 1e-5


@pytest.mark.parametrize(("stage", "parallel"), [(0, {"tp": 2}), (2, {})])
def test_bf16_is_the_same_twice(ranks: Any, stage: int, parallel: dict[str, Any]) -> None:
    """To the bit; and it begins where float64 does."""
    config = config_of("lora", stage, parallel, precision="bf16")
    first, second = (assemble(config, ranks(2, run, config, 2)) for _ in range(2))
    assert first.losses == second.losses and first.norms == second.norms
    assert all((first.weights[name] == second.weights[name]).all() for name in first.weights)
    assert abs(first.losses[0] / expected("lora").losses[0] - 1) < 0.02


def elements_with_state(config: RunConfig, world: int) -> int:
    """By which memory is found to be short, and pieces are sized."""
    from hpctrain.parallel.parallelize import build_chunks
    from hpctrain.sharding.build import build_engine, takes_values
    from hpctrain.sharding.offload import home

    mesh, seen = make_mesh(config, world), []
    home.is_short = lambda host, held: bool(seen.append(sum(held)))  # type: ignore[func-returns-value]
    chunks, records = build_chunks(config, mesh, materialize=takes_values(config))
    build_engine(chunks, records, mesh, config).close()
    return seen[0]


def test_only_what_is_trained_has_state_to_offload(ranks: Any) -> None:
    """Not the weights beside it, which are many times as many."""
    config = config_of("lora", 1, {})
    sharding = config.sharding.model_copy(update={"offload": OffloadConfig(optimizer="cpu")})
    config = config.model_copy(update={"sharding": sharding})
    trained = sum(-(-spec.numel // 2) for spec in trained_specs(config.model))
    assert ranks(2, elements_with_state, config, 2) == [trained] * 2
