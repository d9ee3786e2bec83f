"""Runs, and the lives of a run: killed, resumed, under another layout or engine."""

from __future__ import annotations

import shutil
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hpctrain.config.schema import RunConfig
from hpctrain.launch.life.identity import Identity
from hpctrain.launch.life.stop import StopRequest
from hpctrain.launch.local.zygote import RankFailure
from hpctrain.sharding.deepspeed.engine import DeepSpeedEngine
from hpctrain.telemetry.metrics import read_records
from hpctrain.telemetry.sinks import METRICS_FILE, Sinks
from hpctrain.train.loop import train
from hpctrain.train.progress import differences, in_words, resume
from hpctrain.train.run import on_these_ranks
from hpctrain.train.session import open_session
from tests.train.driving import STEPS, drive, engine_settings, evaluations, losses

LAYOUTS = {
    "one": (dict(tp=1), 1),
    "tp2": (dict(tp=2), 2),
    "dp2": (dict(tp=1), 2),
    "tp2dp2": (dict(tp=2), 4),
    "pp2": (dict(pp=2), 2),
    "cp2dp2": (dict(cp=2), 4),
    "cp2pp2-ulysses": (dict(cp=2, pp=2, cp_method="ulysses"), 4),
    "pp2dp2-zb": (dict(pp=2, schedule="zb-h1"), 4),
}


def test_every_layout_has_the_same_losses(ranks, make, tmp_path):
    curves = {}
    for name, (parallel, world) in LAYOUTS.items():
        config = make(parallel=parallel, data=dict(seq=28)).model_copy(update={"folder": tmp_path / name})
        ranks(world, drive, config, world)
        curves[name] = [*losses(config).values(), *evaluations(config)]
    assert len(curves["one"]) == STEPS + 1
    assert curves["one"][-2] < curves["one"][0], "it learns"
    for name, curve in curves.items():
        assert np.allclose(curve, curves["one"], rtol=1e-9, atol=0), name


def test_a_killed_run_continues_bitwise_under_the_same_layout(ranks, make, tmp_path):
    config = make(parallel=dict(tp=2))
    undisturbed = config.model_copy(update={"folder": tmp_path / "undisturbed"})
    ranks(4, drive, undisturbed, 4)
    ranks(4, drive, config, 4, 5)
    assert list(losses(config)) == [1, 2, 3, 4, 5]
    ranks(4, drive, config, 4)
    assert losses(config) == losses(undisturbed)
    assert evaluations(config) == evaluations(undisturbed)
    again = ranks(4, drive, config, 4)
    assert again == [evaluations(undisturbed)[-1]] * 4, "a finished run only evaluates"
    assert losses(config) == losses(undisturbed)


def test_experts_go_on_bitwise_and_report_their_load(ranks, make, tmp_path):
    """Under dp 2, and from there under pp 2; biases, losses and counts are those of an undisturbed run."""
    moe = dict(experts=6, top_k=2, ffn=10, aux_loss=0.1, z_loss=0.01, bias_rate=0.01, capacity=1.0)
    config = make(model=dict(moe=moe))
    undisturbed = config.model_copy(update={"folder": tmp_path / "undisturbed"})
    ranks(2, drive, undisturbed, 2)
    ranks(2, drive, config, 2, 5)
    other = make(model=dict(moe=moe), parallel=dict(pp=2)).model_copy(update={"folder": tmp_path / "other"})
    shutil.copytree(config.run_folder, other.run_folder)
    ranks(2, drive, config, 2)
    assert losses(config) == losses(undisturbed) and evaluations(config) == evaluations(undisturbed)
    ranks(2, drive, other, 2)
    records, others, wanted = (
        [r for r in read_records(c.run_folder / METRICS_FILE) if r["kind"] == "train"]
        for c in (config, other, undisturbed)
    )
    keys = {key for key in wanted[0] if key.startswith(("moe/", "loss", "grad_norm"))}
    assert {"moe/aux_loss", "moe/z_loss", "moe/dropped_tokens", "moe/load_imbalance_layer_1"} < keys
    for key in keys:
        assert [r[key] for r in records] == [r[key] for r in wanted]
        assert [r[key] for r in others] == pytest.approx([r[key] for r in wanted], rel=1e-9), key
    assert wanted[-1]["moe/dropped_tokens"] > 0
    with pytest.raises(RankFailure, match=r"is of another model: model\.moe\.scale was 1\.0 and is 2\.0"):
        ranks(2, drive, make(model=dict(moe=dict(moe, scale=2.0))), 2)
    freed = make(model=dict(moe=dict(moe, aux_loss=0.0, bias_rate=0.0, capacity=None)), train=dict(steps=STEPS + 1))
    ranks(2, drive, freed, 2)
    assert len(losses(freed)) == STEPS + 1


def test_the_layout_may_change_between_lives(ranks, make, tmp_path):
    undisturbed = make().model_copy(update={"folder": tmp_path / "undisturbed"})
    ranks(1, drive, undisturbed, 1)
    for tp, world, until in ((2, 2, 4), (4, 4, 4), (1, 2, 5), (2, 4, None)):
        config = make(parallel=dict(tp=tp), checkpoint=dict(every=1))
        ranks(world, drive, config, world, until)
    got, want = losses(config), losses(undisturbed)
    assert got.keys() == want.keys()
    assert np.allclose(list(got.values()), list(want.values()), rtol=1e-9, atol=0)


def test_a_damaged_checkpoint_does_not_push_out_the_last_good_one(ranks, make, tmp_path):
    """Steps 2 and 4 are there, 4 is damaged, 3 is saved: with keep=2 the good ones are 3 and 2."""

    def flip(step):
        values = tmp_path / "run" / "checkpoints" / f"step-{step:08d}" / "rank-00000.safetensors"
        values.write_bytes(values.read_bytes()[:-1] + b"?")

    def left():
        return sorted(p.name[12:] for p in (tmp_path / "run" / "checkpoints").glob("step-*"))

    ranks(1, drive, make(checkpoint=dict(every=2)), 1, 5)
    assert left() == ["2", "4"]
    flip(4)
    ranks(1, drive, make(checkpoint=dict(every=1)), 1, 4)
    assert left() == ["2", "3", "4.refused"]
    flip(3)
    assert ranks(1, where_it_goes_on, make())[0] == 2


def where_it_goes_on(config):
    session = open_session(config, torch.device("cpu"), 1)
    progress, _ = resume(session)
    return progress.step


def test_a_checkpoint_that_must_be_there(ranks, make, tmp_path):
    with pytest.raises(RankFailure, match="holds no checkpoint to start from"):
        ranks(1, drive, make(checkpoint=dict(resume="must")), 1)
    with pytest.raises(RankFailure, match="does not exist"):
        ranks(1, drive, make(checkpoint=dict(continue_from=str(tmp_path / "nowhere"))), 1)


def test_engine_stage_and_layout_may_change_between_lives(ranks, make, tmp_path):
    """tp=2 under ZeRO 3, then dp=4 under ZeRO 1, then no engine, and back: the curve of an undisturbed run."""
    undisturbed = make(**engine_settings(0)).model_copy(update={"folder": tmp_path / "undisturbed"})
    ranks(1, drive, undisturbed, 1)
    lives = ((3, 2, 4, 2), (1, 1, 4, 3), (0, 1, 2, 4), (2, 2, 2, 5), (3, 2, 4, None))
    for stage, tp, world, until in lives:
        config = make(**engine_settings(stage), parallel=dict(tp=tp), checkpoint=dict(every=1))
        ranks(world, drive, config, world, until)
    got, want = losses(config), losses(undisturbed)
    assert got.keys() == want.keys()
    # float32 sums in another order; AdamW enlarges the rounding of small gradients in its first steps.
    assert np.allclose(list(got.values()), list(want.values()), rtol=2e-5, atol=0)
    assert np.allclose(evaluations(config)[-1], evaluations(undisturbed)[-1], rtol=2e-5, atol=0)


def drive_beside_a_slow_rank(config: RunConfig, world: int, seconds: float) -> None:
    """Rank 1 comes so much later to every forward."""
    forward = DeepSpeedEngine.forward

    def late(self, chunk, *inputs):
        time.sleep(seconds * dist.get_rank())
        return forward(self, chunk, *inputs)

    DeepSpeedEngine.forward = late
    drive(config, world)


@pytest.mark.parametrize("stage", [2, 3])
def test_waiting_inside_deepspeed_is_communication(ranks, make, stage):
    """Rank 0, whose record it is, waits for rank 1 in DeepSpeed's collectives; every second is counted once."""
    micro_batches, seconds = 2, 0.3
    config = make(**engine_settings(stage), checkpoint=dict(every=0, at_end=False))
    ranks(2, drive_beside_a_slow_rank, config, 2, seconds)
    records = [r for r in read_records(config.run_folder / METRICS_FILE) if r["kind"] == "train"]
    assert len(records) == STEPS and {r["engine"] for r in records} == {f"deepspeed-{stage}"}
    for record in records:
        parts = sum(record[f"time/{part}"] for part in ("data", "compute", "communication", "optimizer"))
        assert parts <= record["time/step"]
        assert record["time/communication"] > 0.3 * micro_batches * seconds
    whole = sum(r["time/step"] for r in records)
    assert sum(r["time/step"] - r["time/compute"] - r["time/communication"] for r in records) < 0.5 * whole


@pytest.mark.parametrize("stage", [1, 3])
def test_a_killed_run_continues_bitwise_under_zero(ranks, make, tmp_path, stage):
    config = make(**engine_settings(stage), parallel=dict(tp=2))
    undisturbed = config.model_copy(update={"folder": tmp_path / "undisturbed"})
    ranks(4, drive, undisturbed, 4)
    ranks(4, drive, config, 4, 5)
    ranks(4, drive, config, 4)
    assert losses(config) == losses(undisturbed) and len(losses(config)) == STEPS


def test_going_on_from_another_run(ranks, make, tmp_path):
    """Step, position and state go along; a run that has done all that is asked for is refused."""
    other = make(train=dict(steps=3)).model_copy(update={"folder": tmp_path / "other"})
    ranks(1, drive, other, 1)
    config = make(checkpoint=dict(continue_from=str(other.run_folder)))
    ranks(1, drive, config, 1)
    assert list(losses(config)) == [4, 5, 6]
    beyond = config.model_copy(update={"folder": tmp_path / "beyond", "train": other.train})
    with pytest.raises(RankFailure, match=r"train\.steps=3: .* has done 3 steps already; ask for more"):
        ranks(1, drive, beyond, 1)


def test_what_is_different_after_a_resume_is_said(ranks, make, tmp_path):
    assert ranks(1, said_at_resume, make(train=dict(steps=3)), None) == [None]
    (same,) = ranks(1, said_at_resume, make(train=dict(steps=3)), None)
    assert same == f"from {make().run_folder}/checkpoints/step-00000003"
    changed = make(train=dict(steps=9, seed=1), data=dict(seq=20))
    (text,) = ranks(1, said_at_resume, changed, None)
    for note in ("data.seq was 31 and is 20", "train.seed was 0 and is 1", "train.steps was 3 and is 9"):
        assert note in text
    ranks(1, drive, make(), 1)
    newest = make().run_folder / "checkpoints" / "step-00000006" / "rank-00000.safetensors"
    data = bytearray(newest.read_bytes())
    data[-1] ^= 1
    newest.write_bytes(data)
    (text,) = ranks(1, said_at_resume, make(), None)
    assert "step-00000003" in text.split(";")[0] and "refused step-00000006: rank-00000.safetensors" in text


def said_at_resume(config, _):
    """The sentence of a resume; a first life runs to its end."""
    session = open_session(config, torch.device("cpu"), 1)
    progress, found = resume(session)
    if found is None:
        train(session, progress, Sinks([], print), StopRequest())
        return None
    return in_words(found, differences(session, found))


@pytest.mark.parametrize("world,local,nodes", [(8, 4, 2), (6, 4, 2), (1, 1, 1)])
def test_the_launcher_knows_how_many_ranks_there_are(make, world, local, nodes):
    identity = Identity(0, world, 0, local, "torchrun", "key")
    cluster = on_these_ranks(make(cluster=dict(nodes=7, gpus_per_node=3)), identity).cluster
    assert (cluster.nodes, cluster.gpus_per_node) == (nodes, local)
