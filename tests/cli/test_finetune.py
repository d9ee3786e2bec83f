"""`hpctrain finetune`: the model is that of the checkpoint, the rest is the recipe's."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hpctrain.checkpoint.manifest import FOLDER, MANIFEST, Manifest, dump_manifest, step_name
from hpctrain.cli import main
from hpctrain.cli.finetune import resolved
from hpctrain.config.load import load
from hpctrain.config.schema import RunConfig
from hpctrain.errors import CheckpointError


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A run of llama-tiny with more layers, as its manifest tells."""
    return saved(load("llama-tiny", [f"folder={tmp_path}", "model.layers=6", "model.rope_scaling={}"]))


def saved(config: RunConfig) -> Path:
    path = config.run_folder / FOLDER / step_name(3)
    path.mkdir(parents=True)
    extra = {"config": config.model_dump(mode="json")}
    (path / MANIFEST).write_bytes(dump_manifest(Manifest(3, 1, "", {}, extra, ())))
    return config.run_folder


def test_the_model_is_that_of_the_checkpoint(base: Path) -> None:
    config = resolved("lora", ("model.adapter.rank=4", "model.dropout=0.1", "train.steps=7"), base)
    want = load("llama-tiny", ["model.layers=6", "model.rope_scaling={}", "model.dropout=0.1"]).model
    assert config.model.model_copy(update={"adapter": None}) == want
    assert config.model.adapter is not None and (config.model.adapter.kind, config.model.adapter.rank) == ("lora", 4)
    assert (config.train.steps, config.name, config.checkpoint.base) == (7, "lora", base.absolute())
    assert resolved("llama-tiny", ("model.adapter=null",), base).model.adapter is None


def test_a_recipe_of_another_model_is_told_so(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    resolved("gpt-tiny", ("model.adapter.kind=dora",), base)
    said = capsys.readouterr().err
    assert f"note: model.norm is rmsnorm and not layernorm, as in {base}/checkpoints/step-00000003\n" in said
    assert "model.adapter" not in said and "model.hidden" not in said


def test_what_is_asked_for_on_the_command_line_is_no_note(base: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model\.layers was 6 and is 2; leave it as it was"):
        resolved("lora", ("model.layers=2",), base)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["finetune", *map(str, arguments)])


def test_what_it_refuses(base: Path, tmp_path: Path) -> None:
    for place, words in ((tmp_path / "nowhere", "nowhere does not exist"), (tmp_path, "holds no checkpoint")):
        told = run("lora", "--from", place)
        assert told.exit_code == 1 and words in told.stderr and told.stderr.count("\n") == 1
    adapters = saved(load("llama-tiny", [f"folder={tmp_path}", "name=tuned", "model.adapter={}"]))
    assert "make one of both with hpctrain ckpt merge" in run("lora", "--from", adapters).stderr
    (base / FOLDER / step_name(3) / MANIFEST).write_text("{}")
    assert "is not a usable checkpoint" in run("lora", "--from", base).stderr
    assert "Missing option '--from'" in run("lora").stderr


def test_it_writes_a_recipe_to_submit(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpctrain.train.preflight.open_dataset", lambda config: None)
    out = tmp_path / "queued.yaml"
    told = run("lora", "--from", base, "name=queued", "--write", out)
    assert told.exit_code == 0 and told.stdout == f"hpctrain submit {out}\n"
    assert load(out) == resolved("lora", ("name=queued",), base)
    assert "its folder must be there" in run("lora", "--from", base, "--write", tmp_path / "no" / "x.yaml").stderr
