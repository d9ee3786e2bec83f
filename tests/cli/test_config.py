"""`hpctrain config`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from hpctrain.cli import main
from hpctrain.config.keys import keys
from hpctrain.config.load import load, recipes
from hpctrain.config.schema import RunConfig


def run(*arguments: str) -> str:
    result = CliRunner().invoke(main, ["config", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    return result.output


def test_show_prints_what_can_be_loaded_again(tmp_path: Path) -> None:
    shown = run("show", "llama-8b", "optimizer.lr=1e-5", "checkpoint.continue_from=null")
    (tmp_path / "shown.yaml").write_text(shown)
    config = load(tmp_path / "shown.yaml")
    assert config == load("llama-8b", ["optimizer.lr=1e-5"])
    as_json = run("show", "llama-8b", "optimizer.lr=1e-5", "--json")
    assert RunConfig.model_validate_json(as_json) == config


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["gpt-tin"],
            "error: recipe='gpt-tin': no recipe and no file has this name; the nearest recipe is gpt-tiny.\n",
        ),
        (["gpt-tiny", "tp=2"], "error: tp='2': there is no such key; the nearest is parallel.tp.\n"),
        (
            ["gpt-tiny", "train.steps=2.5"],
            "error: train.steps=2.5: must be an integer, at least 1 and at most 1e+12.\n",
        ),
    ],
)
def test_show_refuses_in_one_sentence(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(main, ["config", "show", *arguments])
    assert (result.exit_code, result.stderr, result.stdout) == (2, words, "")


def test_list() -> None:
    lines = run("list").splitlines()
    assert {line.split()[0] for line in lines} == set(recipes())
    assert lines[0].split()[:2] == ["llama-tiny", "792k"]
    assert lines[-1].split()[:2] == ["gpt-1t", "1.01T"]
    rows = {row["name"]: row for row in json.loads(run("list", "--json"))}
    assert rows["llama-8b"]["parameters"] == 8_030_261_248
    assert rows["llama-8b"]["description"].startswith("Llama 3.1 8B")


def test_schema_has_every_key() -> None:
    lines = run("schema").splitlines()
    plain = [key for key in keys().values() if key.kind != "section"]
    assert [line.partition("=")[0] for line in lines if "=" in line and line[0] not in " #"] == [k.path for k in plain]
    at = lines.index("sharding.stage=0")
    assert lines[at + 1].startswith("    an integer, at least 0 and at most 3. ZeRO stage")


def test_json_schema() -> None:
    schema = json.loads(run("schema", "--json"))
    assert set(schema["properties"]) == set(RunConfig.model_fields)
    assert schema["$defs"]["ShardingConfig"]["properties"]["stage"]["maximum"] == 3
