"""ZeRO 1, 2 and 3 with tensor parallelism are the same training as plain PyTorch on one process."""

from __future__ import annotations

from typing import Any

import pytest

from hpctrain.sharding.state import WEIGHT
from tests.sharding import deepspeed_case as case

STEPS = range(3)


def _train(tp: int, stage: int, sections: dict[str, Any]) -> Any:
    config = case.run_config(tp, stage, **sections)
    mesh = case.mesh_of(config)
    engine = case.make_engine(config, mesh)
    log = case.train(engine, config, mesh, STEPS)
    reader = case.MemoryReader.of(engine, config, mesh)
    weights = {name: values.numpy() for (name, kind), values in reader.tensors.items() if kind == WEIGHT}
    engine.close()
    return log, weights


def _reference(sections: dict[str, Any]) -> Any:
    log, weights = case.reference(case.run_config(1, 0, **sections), STEPS)
    return log, {name: values.numpy() for name, values in weights.items()}


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("tp", [1, 2])
def test_equals_plain_torch(ranks: Any, stage: int, tp: int) -> None:
    (expected, weights), *_ = ranks(0, _reference, {})
    outcomes = ranks(2 * tp, _train, tp, stage, {})
    for log, found in outcomes:
        print(log.losses, expected.losses, log.norms, expected.norms)
        assert log.losses == pytest.approx(expected.losses, rel=1e-5)
        assert log.norms == pytest.approx(expected.norms, rel=1e-5)
        print(max((abs(found[n] - weights[n]).max(), n) for n in weights))
        assert not any(log.skipped)
