"""Recipes, overrides, and one sentence for everything that is wrong with them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.config.load import dump, load, recipes
from hpctrain.config.schema import MOST, OptimizerConfig, ParallelConfig, RopeScaling, RunConfig
from hpctrain.errors import ConfigError


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text("parallel:\n  tp: 2\noptimizer:\n  lr: 1e-3\ntrain:\n  # steps: 4\n")
    return path


def refused(recipe: str | Path, *overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load(recipe, overrides)
    assert str(caught.value).count("\n") == 0
    return caught.value


def test_file_and_overrides(recipe: Path) -> None:
    config = load(recipe, ["train.steps=5", "optimizer.lr=3e-4", "train.steps=7", "sharding.offload.params=cpu"])
    assert config.parallel.tp == 2
    assert config.optimizer.lr == 3e-4
    assert config.train.steps == 7
    assert config.sharding.offload.params == "cpu"
    assert config.model == RunConfig().model


def test_text_stays_text(recipe: Path) -> None:
    config = load(recipe, ["name=2024", "data.corpus=1e3", "checkpoint.continue_from=007", "model.rope_theta=5"])
    assert (config.name, config.data.corpus, config.checkpoint.continue_from) == ("2024", Path("1e3"), Path("007"))
    assert isinstance(config.model.rope_theta, float)
    assert load(recipe, ["checkpoint.continue_from=null"]).checkpoint.continue_from is None


def test_a_section_as_an_override_leaves_its_other_keys(recipe: Path) -> None:
    assert load(recipe, ["parallel={sp: true}"]).parallel == ParallelConfig(tp=2, sp=True)
    assert load(recipe, ["model.hidden=64", "model={layers: 3}"]).model.hidden == 64


def test_a_tilde_is_the_home_folder(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    config = load(recipe, ["folder=~/runs", "data.corpus=~/c.h5", "checkpoint.continue_from=~/runs/a"])
    found = (config.folder, config.data.corpus, config.checkpoint.continue_from)
    assert found == tuple(Path("/home/someone") / name for name in ("runs", "c.h5", "runs/a"))


def test_text_that_is_not_utf_8_is_refused(recipe: Path) -> None:
    with pytest.raises(ConfigError, match=r"override=.*udcff.*must be text in UTF-8"):
        load(recipe, ["name=a\udcff"])


def test_optional_section(recipe: Path) -> None:
    assert load(recipe, ["model.rope_scaling.factor=4"]).model.rope_scaling == RopeScaling(factor=4.0)
    assert load(recipe, ["model.rope_scaling={factor: 4}"]).model.rope_scaling == RopeScaling(factor=4.0)
    assert load("llama-8b", ["model.rope_scaling=null"]).model.rope_scaling is None


@pytest.mark.parametrize(
    ("override", "path", "value", "text"),
    [
        ("parallel.tp=2.5", "parallel.tp", 2.5, "an integer, at least 1"),
        ("parallel.tp=two", "parallel.tp", "two", "an integer"),
        ("parallel.tp=0", "parallel.tp", 0, "at least 1"),
        (f"data.seq={10**400}", "data.seq", 10**400, "at most 1e+12"),
        ("model.moe.capacity=1e308", "model.moe.capacity", 1e308, "at most 1e+12"),
        ("parallel.tp=[2]", "parallel.tp", [2], "an integer"),
        ("parallel.tp=[2", "parallel.tp", "[2", "an integer"),
        ("train.steps=true", "train.steps", True, "an integer"),
        ("train.steps=", "train.steps", "", "give a value"),
        ("sharding.stage=4", "sharding.stage", 4, "at least 0 and at most 3"),
        ("optimizer.lr=fast", "optimizer.lr", "fast", "a number, above 0"),
        ("optimizer.lr=.inf", "optimizer.lr", float("inf"), "must be finite"),
        ("model.dropout=1", "model.dropout", 1, "at least 0 and below 1"),
        ("model.bias=yes", "model.bias", "yes", "true or false"),
        ("model.bias=1", "model.bias", 1, "true or false"),
        ("train.precision=half", "train.precision", "half", "one of float32, bf16, fp16, float64"),
        ("name=../up", "name", "../up", "text that matches"),
        ("parallel=3", "parallel", 3, "a section of tp"),
        ("parallel=null", "parallel", None, "for example parallel.tp"),
        ("model.rope_scaling=3", "model.rope_scaling", 3, "or null"),
        ("train.steps", "override", "train.steps", "key=value"),
        ("=3", "override", "=3", "key=value"),
    ],
)
def test_values_refused(recipe: Path, override: str, path: str, value: object, text: str) -> None:
    error = refused(recipe, override)
    assert (error.path, error.value) == (path, value)
    assert type(error.value) is type(value)
    assert text in str(error)
    assert "mine.yaml" not in str(error)


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("paralel.tp", "parallel.tp"),
        ("parallel.tpp", "parallel.tp"),
        ("tp", "parallel.tp"),
        ("stage", "sharding.stage"),
        ("train.lr", "optimizer.lr"),
        ("train.micro_batchs", "train.micro_batch"),
        ("microbatch", "train.micro_batch"),
        ("sharding.ofload.params", "sharding.offload.params"),
        ("parallel.tp.x", "parallel.tp"),
    ],
)
def test_nearest_key(recipe: Path, key: str, near: str) -> None:
    error = refused(recipe, f"{key}=2")
    assert error.path == key
    assert error.fix == f"the nearest is {near}"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("[-1,5]", [-1, 5]),
        ("[1,a]", [1, "a"]),
        ("[1.5,2]", [1.5, 2]),
        ("[1,null]", [1, None]),
        ("[[1],2]", [[1], 2]),
        ("[1,true]", [1, True]),
        ("many", "many"),
        ("true", True),
    ],
)
def test_a_list_with_a_bad_element(recipe: Path, tmp_path: Path, text: str, value: object) -> None:
    error = refused(recipe, f"parallel.stage_layers={text}")
    assert (error.path, error.value) == ("parallel.stage_layers", value)
    said = "must be a list, each an integer, at least 0, or null; write it in brackets and quotes, such as '[3,1]'"
    assert str(error).endswith(said + ".")
    (tmp_path / "other.yaml").write_text(f"parallel:\n  stage_layers: {text}\n")
    assert str(refused(tmp_path / "other.yaml")).endswith(f"{said}, and change it in {tmp_path}/other.yaml.")


@pytest.mark.parametrize(
    ("text", "written"), [("3,1", "[3,1]"), ("(2, 3)", "[2,3]"), ("4", "[4]"), ("2 1 1", "[2,1,1]")]
)
def test_a_list_without_brackets_is_shown_with_them(recipe: Path, text: str, written: str) -> None:
    assert refused(recipe, f"parallel.stage_layers={text}").fix.endswith(f"such as '{written}'")


def test_a_section_in_the_place_of_a_list(recipe: Path) -> None:
    assert refused(recipe, "parallel.stage_layers={a: 1}").value == {"a": 1}


def test_an_override_that_sets_nothing(recipe: Path) -> None:
    assert str(refused(recipe, "parallel={}")).startswith("parallel={}: sets nothing; set one of its keys, for example")
    assert refused(recipe, "sharding={offload: {}}").path == "sharding.offload"
    assert load(recipe, ["model.moe={}"]).model.moe is not None, "which is to have experts, as many as by default"


def test_no_near_key(recipe: Path) -> None:
    assert refused(recipe, "xyzzy=1").fix.startswith("sections are model, parallel, sharding")
    assert refused(recipe, "parallel={xyzzy: 1}").path == "parallel.xyzzy"


@pytest.mark.parametrize(
    ("text", "path", "sentence"),
    [
        ("paralel:\n  tp: 2\n", "paralel.tp", "the nearest is parallel.tp (in "),
        ("parallel:\n  tp: {x: 2}\n", "parallel.tp.x", "no such key"),
        ("parallel.tp: 2\n", "parallel.tp", "indented"),
        ("1: 2\n", "1", "name of one key"),
        ("parallel: 2\n", "parallel", "a section of tp"),
        ("train: {steps: 2.5}\n", "train.steps", "change it in "),
        ("train:\n  steps: 1\n  steps: 2\n", "recipe", "line 3: the key 'steps' is given twice"),
        ("train:\n\tsteps: 1\n", "recipe", "line 2"),
        ("- 1\n", "recipe", "keys and values"),
        ("parallel: &a {b: *a}\n", "recipe", "anchors"),
    ],
)
def test_files_refused(tmp_path: Path, text: str, path: str, sentence: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    error = refused(file)
    assert error.path == path
    assert sentence in str(error)
    assert str(file) in str(error) or path in ("parallel.tp", "1")


def test_sections_left_empty(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("parallel:\nsharding:\n  offload:\n")
    assert load(file) == RunConfig()
    file.write_text("{}")
    assert load(file) == RunConfig()
    for nothing in ("", "# parallel:\n", "null\n"):
        file.write_text(nothing)
        assert "is empty; write {} in it" in str(refused(file))


def test_unreadable(tmp_path: Path) -> None:
    assert "Is a directory" in str(refused(tmp_path))
    (tmp_path / "latin.yaml").write_bytes(b"name: caf\xe9\n")
    assert "UTF-8" in str(refused(tmp_path / "latin.yaml"))


def test_unknown_recipe() -> None:
    assert "the nearest recipe is gpt-tiny" in str(refused("gpt-tin"))
    assert "recipes are gpt-175b, " in str(refused("xyzzy"))


@pytest.mark.parametrize("name", list(recipes()))
def test_dump_of_a_recipe_reads_back(name: str, tmp_path: Path) -> None:
    file = tmp_path / "resolved.yaml"
    file.write_text(dump(load(name)))
    assert load(file) == load(name)


@settings(deadline=None)
@given(
    name=st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,8}\Z"),
    lr=st.floats(min_value=0, exclude_min=True, allow_infinity=False),
    tp=st.integers(1, MOST),
)
def test_dump_reads_back(tmp_path_factory: pytest.TempPathFactory, name: str, lr: float, tp: int) -> None:
    config = RunConfig(name=name, optimizer=OptimizerConfig(lr=lr), parallel=ParallelConfig(tp=tp))
    file = tmp_path_factory.getbasetemp() / "resolved.yaml"
    file.write_text(dump(config))
    assert load(file) == config
