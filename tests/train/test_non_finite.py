"""Losses, gradients and states that are not finite, and the loss scale of fp16."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from hpctrain.launch.life.stop import StopRequest
from hpctrain.launch.local.zygote import RankFailure
from hpctrain.sharding import scaler
from hpctrain.telemetry.metrics import read_records
from hpctrain.telemetry.sinks import METRICS_FILE, Sinks
from hpctrain.train.loop import train
from hpctrain.train.progress import Progress
from hpctrain.train.session import open_session
from tests.train.driving import drive, losses


def test_non_finite_steps_are_skipped_counted_and_end_the_job_naming_the_rank(ranks, make):
    config = make(train=dict(max_skipped=3, precision="float32"))
    with pytest.raises(RankFailure) as caught:
        ranks(2, drive, config, 2, None, (1, 2))
    assert "TrainError: 3 steps in a row up to step 5 were not finite (loss not finite on rank 1)" in str(caught.value)
    assert sorted(caught.value.ranks) == [0, 1], "all ranks stop"
    records = list(read_records(config.run_folder / METRICS_FILE))
    assert [r["step"] for r in records if r.get("event") == "skip"] == [3, 4, 5]
    assert [r["skipped_steps"] for r in records if r["kind"] == "train"] == [0, 0, 1, 2]


def test_a_loss_that_is_not_finite_skips_whatever_the_gradient(ranks, make):
    config = make(train=dict(max_skipped=2))
    with pytest.raises(RankFailure, match=r"2 steps in a row up to step 2 were not finite .loss not finite on rank 1"):
        ranks(2, with_infinite_loss, config)


def with_infinite_loss(config):
    session = open_session(config, torch.device("cpu"), 2)
    if dist.get_rank() == 1:
        session.engine.chunks[0].loss.register_forward_hook(lambda module, inputs, out: out + float("inf"))
    before = {name: p.clone() for name, p in session.engine.masters.items()}
    try:
        train(session, Progress(), Sinks([], print), StopRequest())
    finally:
        assert all(torch.equal(before[name], p) for name, p in session.engine.masters.items())


def test_a_loss_scale_that_is_too_large_backs_off_and_is_no_trouble(ranks, make):
    config = make(train=dict(precision="fp16", loss_scale=2.0**40, max_skipped=2, steps=40), checkpoint=dict(every=0))
    ranks(1, drive, config, 1)
    records = list(read_records(config.run_folder / METRICS_FILE))
    skips = [r["message"] for r in records if r.get("event") == "skip"]
    assert len(skips) > 2 and set(skips) == {"the gradient overflowed and the loss scale was lowered"}
    assert losses(config)[40] < losses(config)[1]


def test_fp16_continues_bitwise_and_takes_its_scale_along(ranks, make, tmp_path):
    config = make(train=dict(precision="fp16", loss_scale=2.0**30))
    undisturbed = config.model_copy(update={"folder": tmp_path / "undisturbed"})
    ranks(1, drive_with_quick_growth, undisturbed, None)
    ranks(1, drive_with_quick_growth, config, 5)
    ranks(1, drive_with_quick_growth, config, None)
    assert scales(config) == scales(undisturbed) and losses(config) == losses(undisturbed)


def drive_with_quick_growth(config, until):
    scaler.GROWTH_INTERVAL = 2
    return drive(config, 1, until)


def scales(config):
    return [r["loss_scale"] for r in read_records(config.run_folder / METRICS_FILE) if r["kind"] == "train"]


def test_a_checkpoint_of_another_precision_leaves_the_loss_scale_alone(ranks, make):
    ranks(1, drive, make(train=dict(precision="bf16", steps=3)), 1)
    config = make(train=dict(precision="fp16", loss_scale=512.0))
    ranks(1, drive, config, 1)
    assert scales(config)[-1] == 512.0


def test_a_state_that_is_not_finite_is_never_saved(ranks, make):
    """Otherwise it would push out the last good checkpoint, and the run could not be mended."""
    config = make(train=dict(max_skipped=3, precision="float32"), checkpoint=dict(every=1, keep=1))
    with pytest.raises(RankFailure, match="TrainError"):
        ranks(1, drive, config, 1, None, (0, 3))
    kept = [path.name for path in (config.run_folder / "checkpoints").iterdir() if path.is_dir()]
    assert kept == ["step-00000003"]
    short = make(train=dict(max_skipped=9, precision="float32"), checkpoint=dict(every=1, keep=1))
    with pytest.raises(RankFailure, match="TrainError: training ended at step 6 with a loss or gradient"):
        ranks(1, drive, short, 1, None, (0, 3))
    assert [path.name for path in (config.run_folder / "checkpoints").iterdir() if path.is_dir()] == kept
