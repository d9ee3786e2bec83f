"""bf16 and fp16 in a pipeline: stages hand on what they compute in, and all skip a step together."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from hpctrain.config.schema import RunConfig
from tests.training import LR, global_batch, make_config, make_mesh


def pipeline_config(stage: int, pp: int, precision: str, **model: Any) -> RunConfig:
    return make_config(
        model={"layers": 4, **model},
        parallel={"pp": pp},
        train={"precision": precision, "micro_batch": 1, "loss_scale": 2.0**10},
        optimizer={"clip": 0.0},
        sharding={"stage": stage, "bucket_mib": 0.005},
    )


def _steps(config: RunConfig, world: int, overflowing: int | None) -> Any:
    """Three steps: loss, norm, whether skipped, whether the scale backed off, and the scale; and the first's gradients
    under engine `none`. In the second the gradient of a first layer's output is infinite, in stage `overflowing`."""
    from hpctrain.parallel.comm import all_reduce_
    from hpctrain.parallel.parallelize import build_chunks
    from hpctrain.parallel.pipeline import Pipeline
    from hpctrain.sharding.build import build_engine

    mesh = make_mesh(config, world)
    chunks, records = build_chunks(config, mesh)
    engine = build_engine(chunks, records, mesh, config)
    pipeline, steps, gradients = Pipeline(engine, mesh, config), [], {}

    def spoil(module: Any, inputs: Any, out: Any) -> None:
        if out[0].requires_grad and len(steps) == 1:
            out[0].register_hook(lambda grad: grad * math.inf)

    if mesh.pp.index == overflowing:
        next(iter(engine.chunks[0].layers.values())).register_forward_hook(spoil)
    for step in range(3):
        batch = global_batch(config, step)
        mine = batch.split(config.train.global_batch // mesh.dp.size)[mesh.dp.index].split(1)
        engine.begin_step(batch.valid_tokens, len(mine))
        loss = all_reduce_(pipeline.train(mine), mesh.total).item() / batch.valid_tokens
        result = engine.step(LR[step])
        if step == 0 and config.engine == "none":
            gradients = {name: values.clone() for name, values in engine.gradients.items()}
        steps.append((loss, result.grad_norm, result.skipped, result.backed_off, engine.scalars().get("loss_scale")))
    return steps, gradients


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_stage_hands_on_what_the_next_layer_would_have_had(ranks: Any, precision: str, tied: bool) -> None:
    """To the bit: a pipeline rounds where one process rounds. Of a tied embedding, whose gradients one process adds up
    in this precision for each micro-batch, to the precision."""
    ((one, want),) = ranks(1, _steps, pipeline_config(0, 1, precision, tied=tied), 1, None)
    outcomes = ranks(2, _steps, pipeline_config(0, 2, precision, tied=tied), 2, None)
    for two, gradients in outcomes:
        assert two[0][0] == one[0][0]
        assert two[0][1] == pytest.approx(one[0][1], rel=1e-2 if tied else 1e-6)
        for name, values in gradients.items():
            if tied and name == "embedding.weight":
                assert (values - want[name]).abs().max() <= 2e-2 * want[name].abs().max()
            else:
                assert torch.equal(values, want[name]), name
    assert set().union(*(gradients for _, gradients in outcomes)) == set(want)


@pytest.mark.parametrize("precision,overflowing", [("bf16", None), ("fp16", 0), ("fp16", 1)])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_every_engine_steps_and_skips_as_one_process_does(
    ranks: Any, stage: int, precision: str, overflowing: int | None
) -> None:
    """pp 2, dp 2, tied. The first loss is the same; afterwards weights are rounded one way or the other, which moved
    losses by 1e-4 and norms by 1e-3 to 5e-3, by what a processor does with bf16; the bound on norms is that of the test
    above. What is skipped is skipped by all."""
    config = pipeline_config(0, 1, precision, tied=True)
    ((want, _),) = ranks(1, _steps, config, 1, None if overflowing is None else 0)
    outcomes = [steps for steps, _ in ranks(4, _steps, pipeline_config(stage, 2, precision, tied=True), 4, overflowing)]
    assert all(repr(steps) == repr(outcomes[0]) for steps in outcomes)
    skipped = overflowing is not None
    for step, (mine, theirs) in enumerate(zip(outcomes[0], want)):
        assert mine[2:] == theirs[2:]
        assert mine[2:4] == (skipped and step == 1,) * 2
        assert mine[0] == pytest.approx(theirs[0], rel=5e-4 if step else 1e-12)
        assert mine[1] == pytest.approx(theirs[1], rel=1e-2, nan_ok=True)
