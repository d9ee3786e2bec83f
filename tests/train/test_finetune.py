"""Fine-tuning a checkpoint of ours: what it starts from, what it saves, how it goes on, and what comes of it."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import cloudpickle
import numpy as np
import pytest
import torch
from click.testing import CliRunner

from hpctrain.checkpoint.catalog import candidates
from hpctrain.checkpoint.manifest import MANIFEST, dump_manifest, load_manifest
from hpctrain.checkpoint.read import CheckpointReader
from hpctrain.cli import main
from hpctrain.config.schema import RunConfig
from hpctrain.data.build import build
from hpctrain.data.sources import list_sources
from hpctrain.errors import CheckpointError, ConfigError
from hpctrain.launch.local.zygote import RankFailure
from hpctrain.layout.parameters import saved_shapes
from hpctrain.train.preflight import check_start, without_adapters
from tests.train import driving
from tests.train.driving import drive, evaluations, losses

KINDS = {
    "lora": dict(kind="lora", rank=3),
    "dora": dict(kind="dora", rank=2, dropout=0.1),
    "qlora": dict(kind="qlora", rank=4, block=8),
}


def letters(folder: Path, word: bytes) -> Path:
    """A corpus of one word over and over. What reads the model's outputs is no linear of a layer, so adapters can only
    make it say what the base has learned to tell apart: both corpora have the same letters."""
    rng = np.random.default_rng(1)
    for i in range(40):
        (folder / f"{i}.txt").write_bytes(word * int(rng.integers(10, 60)))
    build(folder / "corpus.h5", list_sources([folder]), [folder])
    return folder / "corpus.h5"


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """What the base has not learned: its letters come in another order."""
    return letters(tmp_path_factory.mktemp("elsewhere"), b"dcba")


@pytest.fixture(scope="module")
def trained(zygote, tmp_path_factory) -> RunConfig:
    """A run that has learned something, in float32."""
    config = RunConfig.model_validate(
        dict(
            name="base",
            folder=str(tmp_path_factory.mktemp("runs")),
            model=dict(layers=2, hidden=24, heads=4, kv_heads=2, head_dim=8, ffn=48, max_seq=32),
            data=dict(corpus=str(letters(tmp_path_factory.mktemp("base"), b"abcd")), seq=31, validation=0.1),
            optimizer=dict(lr=1e-2, warmup_steps=2),
            train=dict(steps=30, global_batch=8, micro_batch=4, log_every=1, eval_batches=2),
        )
    )
    cloudpickle.register_pickle_by_value(driving)
    zygote.run(drive, 1, config, 1)
    return config


@pytest.fixture
def tuned(trained, elsewhere, tmp_path):
    """`tuned(kind, **sections)`: a run over the trained one."""

    def config(kind: str | None, **sections) -> RunConfig:
        whole = trained.model_dump(mode="json")
        own = dict(
            model=dict(adapter=KINDS[kind] if kind else None),
            data=dict(corpus=str(elsewhere)),
            optimizer=dict(lr=1e-2, schedule="constant", weight_decay=0.0),
            train=dict(steps=6, eval_every=3),
            checkpoint=dict(every=3, base=str(trained.run_folder)),
        )
        for made in (own, sections):
            for section, values in made.items():
                whole[section] |= values
        return RunConfig.model_validate({**whole, "name": "tuned", "folder": str(tmp_path)})

    return config


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.parametrize("kind", KINDS)
def test_it_learns_and_leaves_the_base_alone(ranks, tuned, trained, kind):
    """Loss on a new corpus falls, the base's files do not change, and what is saved is adapters."""
    before = contents(trained.run_folder)
    config = tuned(kind, train=dict(steps=40, eval_every=5))
    (same,) = ranks(1, watched, config, 1)
    assert same, "a frozen weight has changed"
    found = evaluations(config)
    assert found[-1] < 0.6 * losses(config)[1], (losses(config)[1], found)
    assert contents(trained.run_folder) == before
    newest, base = candidates(config.run_folder)[0], candidates(trained.run_folder)[0]
    held = {name: pieces[0].global_shape for (name, _), pieces in CheckpointReader(newest).tensors().items()}
    assert held == saved_shapes(config.model) and all("lora" in name or "magnitude" in name for name in held)
    assert load_manifest(newest).bytes < load_manifest(base).bytes / 2
    assert load_manifest(newest).extra["base"]["path"] == str(base)


def watched(config, world):
    """Drive, and tell whether what is not trained is at the end what it was when it was loaded."""
    from hpctrain.sharding.none.engine import PlainEngine
    from tests.adapting import frozen_state

    seen = []
    load, close = PlainEngine.load, PlainEngine.close
    PlainEngine.load = lambda self, reader: (load(self, reader), seen.append(frozen_state(self)))[0]
    PlainEngine.close = lambda self: (seen.append(frozen_state(self)), close(self))[0]
    drive(config, world)
    first, last = seen
    return len(first) > 10 and first.keys() == last.keys() and all(torch.equal(first[n], last[n]) for n in first)


@pytest.mark.parametrize("kind", ["dora", "qlora"])
def test_a_killed_run_goes_on_bitwise_and_under_other_layouts(ranks, tuned, tmp_path, kind):
    config = tuned(kind, train=dict(precision="float64"))
    undisturbed = config.model_copy(update={"folder": tmp_path / "undisturbed"})
    ranks(1, drive, undisturbed, 1)
    ranks(1, drive, config, 1, 4)
    again = [config.model_copy(update={"folder": tmp_path / name}) for name in ("tp", "pp")]
    for other in again:
        shutil.copytree(config.run_folder, other.run_folder)
    ranks(1, drive, config, 1)
    assert losses(config) == losses(undisturbed) and evaluations(config) == evaluations(undisturbed)
    for other, parallel in zip(again, (dict(tp=2), dict(pp=2))):
        cut = other.model_copy(update={"parallel": type(other.parallel)(**parallel)})
        ranks(2, drive, cut, 2)
        assert losses(cut).keys() == losses(undisturbed).keys()
        assert np.allclose(list(losses(cut).values()), list(losses(undisturbed).values()), rtol=1e-9, atol=0)


def test_it_goes_on_under_another_engine(ranks, tuned, tmp_path):
    config = tuned("qlora")
    ranks(1, drive, config, 1, 4)
    others = [
        config.model_copy(update={"folder": tmp_path / f"zero{stage}", "sharding": type(config.sharding)(stage=stage)})
        for stage in (1, 2)
    ]
    for other in others:
        shutil.copytree(config.run_folder, other.run_folder)
    ranks(1, drive, config, 1)
    for other in others:
        ranks(2, drive, other, 2)
        assert losses(other).keys() == losses(config).keys()
        assert np.allclose(list(losses(other).values()), list(losses(config).values()), rtol=1e-5, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_merged_it_is_the_same_model(ranks, tuned, tmp_path, kind):
    """Its logits are those of the adapters, and so is what it writes; the base has others."""
    config = tuned(kind, train=dict(steps=8))
    ranks(1, drive, config, 1)
    (differences,) = ranks(1, merged, config, tmp_path / "merged")
    assert differences[0] < 1e-5 and differences[1] > 0.1
    (texts,) = ranks(0, written, config, tmp_path / "merged")
    assert texts[0] == texts[1] and len(texts[0]) == 24


def merged(config, out):
    """How far the merged model's logits, and the base's, are from those with adapters, as a share of the largest."""
    from hpctrain.checkpoint.collective import find
    from hpctrain.parallel.parallelize import build_model
    from hpctrain.train.base import TrainedAdapters, open_base
    from hpctrain.train.generate import load_weights
    from hpctrain.train.merge import merge
    from tests.training import make_mesh

    merge(config.run_folder, out)
    mesh, plain = make_mesh(config, 1), without_adapters(config)
    own = find(config.run_folder, mesh.world)
    base = open_base(config, mesh.world, own)
    tokens = torch.randint(0, 257, (3, 20), generator=torch.Generator().manual_seed(0))
    logits = []
    for settings, reader in (
        (config, TrainedAdapters(own.reader, base.reader, config)),
        (plain, find(out, mesh.world).reader),
        (plain, base.reader),
    ):
        model, records = build_model(settings, mesh)
        load_weights(model, records, reader)
        with torch.no_grad():
            logits.append(model.eval().logits(tokens))
    return [((other - logits[0]).abs().max() / logits[0].abs().max()).item() for other in logits[1:]]


def written(config, out):
    """What both models write."""
    from hpctrain.train.generate import Sampling, generate_main

    how, both = Sampling(tokens=20, temperature=0), ((config, config.run_folder), (without_adapters(config), out))
    return [generate_main(made.model_dump(mode="json"), run, "abcd", how)[0] for made, run in both]


def test_all_weights_can_be_tuned_too(ranks, tuned, trained):
    """Without adapters: weights of the base, step 0, moments zero; and its own checkpoints are whole."""
    config = tuned(None, train=dict(steps=3))
    ranks(1, drive, config, 1)
    assert list(losses(config)) == [1, 2, 3]
    fresh = config.model_copy(update={"name": "fresh", "checkpoint": type(config.checkpoint)()})
    ranks(1, drive, fresh, 1)
    assert losses(config)[1] != pytest.approx(losses(fresh)[1], abs=0.1), "it does not begin with drawn weights"
    more = config.model_copy(update={"train": config.train.model_copy(update={"steps": 5})})
    gone = more.model_copy(update={"checkpoint": more.checkpoint.model_copy(update={"base": Path("/nowhere")})})
    check_start(gone)
    ranks(1, drive, gone, 1)
    assert list(losses(config)) == [1, 2, 3, 4, 5], "and needs the base no more"


def test_what_cannot_be_stood_on(ranks, tuned, trained, tmp_path):
    def refused(config: RunConfig, *words: str) -> None:
        """Before ranks are started, and by ranks."""
        for attempt in (lambda: check_start(config), lambda: ranks(1, drive, config, 1)):
            with pytest.raises((ConfigError, CheckpointError, RankFailure)) as caught:
                attempt()
            assert all(word in str(caught.value) for word in words), caught.value

    def over(base: object, kind: str | None = "lora", **sections) -> RunConfig:
        return tuned(kind, checkpoint=dict(base=base and str(base)), **sections)

    refused(over(None), "adapts the weights of a checkpoint, and none is named; use hpctrain finetune")
    refused(over(tmp_path / "nowhere"), "nowhere does not exist")
    refused(over(tmp_path), "holds no checkpoint")
    refused(over(trained.run_folder, model=dict(ffn=40)), "model.ffn was 48 and is 40")
    refused(over(trained.run_folder, None, model=dict(ffn=40)), "model.ffn was 48 and is 40")
    config = tuned("lora")
    ranks(1, drive, config, 1, 4)
    other = config.model_copy(update={"name": "other"})
    stacked = other.model_copy(update={"checkpoint": other.checkpoint.model_copy(update={"base": config.run_folder})})
    refused(stacked, "holds adapters and no weights of a model: make one of both with hpctrain ckpt merge")
    wider = tuned("lora", model=dict(adapter=dict(kind="lora", rank=5)))
    with pytest.raises(RankFailure, match=r"model\.adapter\.rank was 3 and is 5"):
        ranks(1, drive, wider, 1)


def test_what_cannot_be_merged(trained, tmp_path):
    before = contents(trained.run_folder)
    for run, out, words in (
        (tmp_path / "nowhere", tmp_path / "out", "nowhere holds no checkpoint"),
        (trained.run_folder, tmp_path / "out", "has no adapters to merge: it holds a whole model"),
        (tmp_path / "nowhere", trained.run_folder, "is there already; name another folder"),
    ):
        told = CliRunner().invoke(main, ["ckpt", "merge", str(run), str(out)])
        assert told.exit_code in (1, 2) and words in told.stderr and told.stderr.count("\n") == 1, told.stderr
    assert not (tmp_path / "out").exists() and contents(trained.run_folder) == before


def test_adapters_know_what_they_were_trained_over(ranks, tuned, trained, tmp_path):
    """The base may be moved, and may go on; another one is refused."""
    base = tmp_path / "base"
    shutil.copytree(trained.run_folder, base)
    config = tuned("lora", checkpoint=dict(base=str(base)))
    ranks(1, drive, config, 1, 4)
    (newest,) = candidates(base)
    shutil.copytree(newest, newest.with_name("step-00000031"))
    manifest = load_manifest(newest)
    later = replace(manifest, step=31, serial=manifest.serial + 1)
    (newest.with_name("step-00000031") / MANIFEST).write_bytes(dump_manifest(later))
    ranks(1, drive, config, 1)
    assert list(losses(config)) == [1, 2, 3, 4, 5, 6]
    shutil.rmtree(newest)
    more = config.model_copy(update={"train": config.train.model_copy(update={"steps": 8})})
    with pytest.raises(RankFailure, match=r"has adapters for .*step-00000030, and .*step-00000031 is another"):
        ranks(1, drive, more, 1)
    moved = more.model_copy(update={"checkpoint": more.checkpoint.model_copy(update={"base": trained.run_folder})})
    ranks(1, drive, moved, 1)
    assert list(losses(config))[-1] == 8
