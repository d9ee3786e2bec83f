"""A run that is asked to stop, or breaks down, at an inconvenient moment."""

from __future__ import annotations

import os
import signal

import pytest
import torch
import torch.distributed as dist

from hpctrain.checkpoint.catalog import committed
from hpctrain.checkpoint.manifest import FOLDER
from hpctrain.errors import LaunchError
from hpctrain.launch.life.stop import SIGNALS, StopRequest, hold_back
from hpctrain.launch.local.zygote import RankFailure
from hpctrain.telemetry.sinks import Sinks, open_sinks
from hpctrain.train.loop import train
from hpctrain.train.progress import Progress, resume
from hpctrain.train.session import open_session
from tests.train.driving import STEPS, drive, engine_settings, evaluations, losses


def as_a_rank(config, warned):
    from hpctrain.train.run import rank_main

    if warned:
        hold_back(SIGNALS)
        os.kill(os.getpid(), signal.SIGTERM)
    return rank_main(config.model_dump(mode="json"), False).steps


def test_a_rank_that_is_asked_to_stop_takes_no_time_for_a_picture(ranks, make):
    """It may have no more than is needed to leave."""
    config = make(train=dict(precision="float32"), checkpoint=dict(every=0))
    for warned, steps in ((True, 1), (False, STEPS)):
        assert ranks(0, as_a_rank, config, warned) == [steps]
        assert (config.run_folder / "loss.png").exists() is not warned


def drive_until_asked(config, world, rank, step):
    """One life in which a signal comes to one rank during a step."""
    session = open_session(config, torch.device("cpu"), world)
    progress, _ = resume(session)
    sinks = open_sinks(config.run_folder, progress.step, print) if dist.get_rank() == 0 else Sinks([], print)
    with StopRequest().listening() as stop:
        if dist.get_rank() == rank:
            session.engine.chunks[0].norm.register_forward_hook(
                lambda module, inputs, out: os.kill(os.getpid(), signal.SIGUSR2) if progress.step == step else None
            )
        ending = train(session, progress, sinks, stop)
    sinks.close()
    return ending.stopped, progress.step


@pytest.mark.parametrize("stage", [0, 1])
def test_a_signal_to_one_rank_saves_on_all_and_the_run_goes_on_bitwise(ranks, make, tmp_path, stage):
    config = make(**engine_settings(stage), parallel=dict(tp=2), checkpoint=dict(every=0))
    config.run_folder.mkdir(parents=True)
    undisturbed = config.model_copy(update={"folder": tmp_path / "undisturbed"})
    ranks(4, drive, undisturbed, 4)
    assert ranks(4, drive_until_asked, config, 4, 3, 2) == [(True, 3)] * 4
    assert list(losses(config)) == [1, 2, 3]
    ranks(4, drive, config, 4)
    assert losses(config) == losses(undisturbed) and evaluations(config) == evaluations(undisturbed)


def drive_without_the_folder(config, world):
    session = open_session(config, torch.device("cpu"), world)
    progress = Progress()

    def refuse():
        if progress.step > 3:
            raise LaunchError("it belongs to another")

    session.may_save = refuse if dist.get_rank() == 0 else session.may_save
    with pytest.raises(LaunchError, match="it belongs to another"):
        train(session, progress, Sinks([], print), StopRequest())
    return progress.step, [path.name for path in committed(config.run_folder / FOLDER)]


def test_a_run_that_has_lost_its_folder_saves_no_more(ranks, make):
    assert ranks(2, drive_without_the_folder, make(), 2) == [(6, ["step-00000003"])] * 2


def drive_through_evaluation(config, world, rank, step, action):
    """One life in which something happens to one rank in the first batch of the evaluation after a step."""
    session = open_session(config, torch.device("cpu"), world)
    progress, _ = resume(session)
    sinks = open_sinks(config.run_folder, progress.step, print) if dist.get_rank() == 0 else Sinks([], print)
    inner = session.pipeline.evaluate

    def evaluate(micro_batches):
        if dist.get_rank() == rank and progress.step == step:
            action()
        return inner(micro_batches)

    session.pipeline.evaluate = evaluate
    with StopRequest().listening() as stop:
        ending = train(session, progress, sinks, stop)
    sinks.close()
    return ending.stopped, ending.loss


def be_warned():
    os.kill(os.getpid(), signal.SIGUSR2)


def break_down():
    raise ZeroDivisionError


@pytest.mark.parametrize("step", [2, STEPS])
def test_a_signal_in_an_evaluation_ends_it_and_the_next_life_makes_up_for_it(ranks, make, tmp_path, step):
    config = make(train=dict(eval_every=2, eval_batches=3), checkpoint=dict(every=0))
    config.run_folder.mkdir(parents=True)
    undisturbed = config.model_copy(update={"folder": tmp_path / "undisturbed"})
    ranks(2, drive, undisturbed, 2)
    assert ranks(2, drive_through_evaluation, config, 2, 1, step, be_warned) == [(True, None)] * 2
    assert len(evaluations(config)) == step // 2 - 1
    kept = [path.name for path in (config.run_folder / "checkpoints").iterdir() if path.is_dir()]
    assert kept == [f"step-{step:08}"]
    ranks(2, drive, config, 2)
    assert losses(config) == losses(undisturbed) and evaluations(config) == evaluations(undisturbed)


@pytest.mark.parametrize("at_end", [True, False])
def test_a_signal_in_the_last_evaluation_loses_no_step(ranks, make, tmp_path, at_end):
    config = make(train=dict(eval_batches=3), checkpoint=dict(every=0, at_end=at_end))
    config.run_folder.mkdir(parents=True)
    undisturbed = config.model_copy(update={"folder": tmp_path / "undisturbed"})
    ranks(2, drive, undisturbed, 2)
    assert ranks(2, drive_through_evaluation, config, 2, 1, STEPS, be_warned) == [(True, None)] * 2
    assert evaluations(config) == []
    assert ranks(2, drive, config, 2) == evaluations(undisturbed) * 2 == evaluations(config) * 2
    assert losses(config) == losses(undisturbed)


def test_what_goes_wrong_in_the_last_evaluation_loses_no_step(ranks, make):
    config = make(train=dict(eval_batches=3), checkpoint=dict(every=0))
    config.run_folder.mkdir(parents=True)
    with pytest.raises(RankFailure, match="ZeroDivisionError"):
        ranks(1, drive_through_evaluation, config, 1, 0, STEPS, break_down)
    assert (config.run_folder / "checkpoints" / f"step-{STEPS:08}").is_dir()
