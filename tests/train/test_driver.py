"""The driver on a small corpus: resuming, changing layout between lives, evaluation, steps that are not finite."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hpctrain.checkpoint.catalog import committed
from hpctrain.checkpoint.manifest import FOLDER
from hpctrain.config.schema import RunConfig
from hpctrain.config.validate import validate
from hpctrain.data.build import build
from hpctrain.data.sources import list_sources
from hpctrain.errors import LaunchError
from hpctrain.launch.identity import Identity
from hpctrain.launch.stop import SIGNALS, StopRequest, hold_back
from hpctrain.launch.zygote import RankFailure
from hpctrain.sharding import scaler
from hpctrain.sharding.deepspeed.engine import DeepSpeedEngine
from hpctrain.telemetry.metrics import read_records
from hpctrain.telemetry.sinks import METRICS_FILE, Sinks, open_sinks
from hpctrain.train.finished import finished
from hpctrain.train.loop import train
from hpctrain.train.progress import Progress, differences, in_words, resume
from hpctrain.train.run import on_these_ranks
from hpctrain.train.session import open_session

STEPS = 6


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Documents of random lengths and few letters, so that there is something to learn."""
    folder = tmp_path_factory.mktemp("corpus")
    rng = np.random.default_rng(0)
    for i in range(60):
        (folder / f"{i}.txt").write_bytes(bytes(rng.choice(list(b"abcd \n"), rng.integers(20, 400))))
    build(folder / "corpus.h5", list_sources([folder]), [folder])
    return folder / "corpus.h5"


@pytest.fixture
def make(corpus, tmp_path):
    def config(**sections) -> RunConfig:
        base = dict(
            model=dict(layers=2, hidden=24, heads=4, kv_heads=2, head_dim=6, ffn=40, max_seq=32, dropout=0.1),
            data=dict(corpus=str(corpus), seq=31, validation=0.1),
            optimizer=dict(lr=3e-3, warmup_steps=2),
            train=dict(steps=STEPS, global_batch=8, micro_batch=2, log_every=1, eval_batches=2, precision="float64"),
            checkpoint=dict(every=3),
        )
        merged = {k: {**base.get(k, {}), **sections.get(k, {})} for k in {*base, *sections}}
        return RunConfig.model_validate({**merged, "name": "run", "folder": str(tmp_path)})

    return config


class Cut(Sinks):
    """Sinks that end the run when a step is recorded, as a kill would; on every rank."""

    def __init__(self, inner: Sinks, step: int | None) -> None:
        self.inner, self.step = inner, step

    def write(self, record):
        self.inner.write(record)
        if record["kind"] == "train" and record["step"] == self.step:
            raise KeyboardInterrupt

    def close(self):
        self.inner.close()


def drive(config: RunConfig, world: int, until: int | None = None, poison: tuple[int, int] | None = None):
    """One life of a run on this rank. `until` ends it after that step; `poison` is (rank, first step)."""
    rank = dist.get_rank()
    validate(config, world)
    session = open_session(config, torch.device("cpu"), world)
    progress, _ = resume(session)
    config.run_folder.mkdir(parents=True, exist_ok=True)
    sinks = Cut(open_sinks(config.run_folder, progress.step, print) if rank == 0 else Sinks([], print), until)
    if poison is not None and rank == poison[0]:
        session.engine.chunks[0].norm.register_forward_hook(
            lambda module, inputs, out: out * (float("nan") if progress.step >= poison[1] else 1.0)
        )
    try:
        return train(session, progress, sinks, StopRequest()).loss
    except KeyboardInterrupt:
        return None
    finally:
        sinks.close()
        session.engine.close()


def losses(config: RunConfig) -> dict[int, float]:
    return {r["step"]: r["loss"] for r in read_records(config.run_folder / METRICS_FILE) if r["kind"] == "train"}


def evaluations(config: RunConfig) -> list[float]:
    return [r["loss"] for r in read_records(config.run_folder / METRICS_FILE) if r["kind"] == "eval"]


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


def as_a_link_of_a_chain(config):
    """What a rank that finds the run done makes of it, and whether it built anything."""
    from hpctrain.train import session
    from hpctrain.train.run import rank_main

    def refuse(*_):
        raise AssertionError("it builds a model")

    session.open_session = refuse
    return rank_main(config.model_dump(mode="json"), False)


def test_a_rank_that_finds_the_run_done_builds_nothing(ranks, make):
    config = make()
    ranks(1, drive, config, 1, 5)
    assert finished(config) is None
    with pytest.raises(RankFailure, match="it builds a model"):
        ranks(0, as_a_link_of_a_chain, config)
    ranks(1, drive, config, 1)
    before = (config.run_folder / METRICS_FILE).read_bytes()
    (summary,) = ranks(0, as_a_link_of_a_chain, config)
    assert (summary.steps, summary.steps_now, summary.stopped) == (STEPS, 0, False)
    assert summary.loss == evaluations(config)[-1] and summary.unigram_entropy > 0
    assert (config.run_folder / METRICS_FILE).read_bytes() == before


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


@pytest.mark.parametrize(
    "sections", [dict(train=dict(steps=7)), dict(model=dict(dropout=0.2)), dict(checkpoint=dict(resume="never"))]
)
def test_a_run_under_other_settings_is_not_done(ranks, make, sections):
    ranks(1, drive, make(), 1)
    assert finished(make()) is not None
    assert finished(make(cluster=dict(nodes=3))) is not None
    assert finished(make(**sections)) is None


def test_a_run_is_not_done_before_it_is_saved_whole_and_evaluated(ranks, make):
    config = make()
    assert finished(config) is None
    ranks(1, drive, config, 1)
    metrics = config.run_folder / METRICS_FILE
    text = metrics.read_text()
    metrics.write_text("".join(line for line in text.splitlines(True) if '"eval"' not in line))
    assert finished(config) is None
    metrics.write_text(text)
    part = next((config.run_folder / FOLDER).glob(f"step-*{STEPS}/*.safetensors"))
    os.truncate(part, 10)
    assert finished(config) is None
    part.unlink()
    assert finished(config) is None


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


def test_non_finite_steps_are_skipped_counted_and_end_the_job_naming_the_rank(ranks, make):
    config = make(train=dict(max_skipped=3, precision="float32"))
    with pytest.raises(RankFailure) as caught:
        ranks(2, drive, config, 2, None, (1, 2))
    assert "TrainError: 3 steps in a row up to step 5 were not finite (loss not finite on rank 1)" in str(caught.value)
    assert sorted(caught.value.ranks) == [0, 1], "all ranks stop"
    records = list(read_records(config.run_folder / METRICS_FILE))
    assert [r["step"] for r in records if r.get("event") == "skip"] == [3, 4, 5]
    assert [r["skipped_steps"] for r in records if r["kind"] == "train"] == [0, 0, 1, 2]


def test_another_model_or_tokenizer_is_refused_in_words(ranks, make):
    ranks(1, drive, make(train=dict(steps=3)), 1)
    with pytest.raises(RankFailure, match=r"CheckpointError: .* is of another model: model\.ffn was 40 and is 48"):
        ranks(1, drive, make(model=dict(ffn=48)), 1)
    with pytest.raises(RankFailure, match=r"model\.activation was 'swiglu' and is 'gelu'"):
        ranks(1, drive, make(model=dict(activation="gelu")), 1)
    manifest = next(make().run_folder.glob("checkpoints/step-*/manifest.json"))
    assert json.loads(manifest.read_text())


def test_starting_anew_over_an_older_run_is_refused(ranks, make):
    ranks(1, drive, make(train=dict(steps=3)), 1)
    with pytest.raises(RankFailure, match=r"checkpoint\.resume='never': .* already holds checkpoints"):
        ranks(1, drive, make(checkpoint=dict(resume="never")), 1)


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


def engine_settings(stage: int) -> dict:
    return dict(sharding=dict(stage=stage), train=dict(precision="float32"))


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


def test_a_missing_corpus_on_one_rank_stops_all_at_once(ranks, make):
    begun = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        ranks(2, open_without_corpus_on, make(), 1)
    assert time.monotonic() - begun < 30
    assert str(caught.value).count("DataError: ") >= 2 and "nowhere" in str(caught.value)


def open_without_corpus_on(config, rank):
    if dist.get_rank() == rank:
        config = config.model_copy(update={"data": config.data.model_copy(update={"corpus": Path("/nowhere.h5")})})
    open_session(config, torch.device("cpu"), 2)


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


@pytest.mark.parametrize("world,local,nodes", [(8, 4, 2), (6, 4, 2), (1, 1, 1)])
def test_the_launcher_knows_how_many_ranks_there_are(make, world, local, nodes):
    identity = Identity(0, world, 0, local, "torchrun", "key")
    cluster = on_these_ranks(make(cluster=dict(nodes=7, gpus_per_node=3)), identity).cluster
    assert (cluster.nodes, cluster.gpus_per_node) == (nodes, local)


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
