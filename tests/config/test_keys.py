"""Every key can be described, and the description agrees with what the schema accepts."""

from __future__ import annotations

import pytest
from pydantic import BaseModel

from hpctrain.config.keys import as_written, keys, suggestion
from hpctrain.config.load import load
from hpctrain.config.schema import RunConfig
from hpctrain.errors import ConfigError


def test_paths_are_those_of_a_configuration() -> None:
    def walk(section: BaseModel, prefix: str) -> set[str]:
        found: set[str] = set()
        for name, value in section:
            found |= walk(value, f"{prefix}{name}.") if isinstance(value, BaseModel) else {prefix + name}
        return found

    plain = {path for path, key in keys().items() if key.kind != "section"}
    inside_optional = {
        path for path in plain if path.startswith(("model.rope_scaling.", "model.moe.", "model.adapter."))
    }
    assert plain - inside_optional == walk(RunConfig(), "") - {"model.rope_scaling", "model.moe", "model.adapter"}


@pytest.mark.parametrize(
    ("path", "kind", "default", "allowed"),
    [
        ("parallel.tp", "int", 1, "must be an integer, at least 1 and at most 1e+12"),
        ("sharding.stage", "int", 0, "must be an integer, at least 0 and at most 3"),
        ("model.kv_heads", "int", None, "must be an integer, at least 1 and at most 1e+12, or null"),
        ("optimizer.beta1", "float", 0.9, "must be a number, at least 0 and below 1"),
        ("model.norm", "choice", "rmsnorm", "must be one of rmsnorm, layernorm"),
        ("parallel.sp", "bool", False, "must be true or false"),
    ],
)
def test_limits_in_words(path: str, kind: str, default: object, allowed: str) -> None:
    key = keys()[path]
    assert (key.kind, key.default, key.allowed) == (kind, default, allowed)


@pytest.mark.parametrize("path", [p for p, k in keys().items() if k.kind != "section"])
def test_every_default_is_accepted_and_every_stranger_refused(path: str) -> None:
    key = keys()[path]
    if key.default is not None:
        text = as_written(key.default)
        load("llama-8b", [f"{path}={text}"])
    if not key.raw:
        with pytest.raises(ConfigError, match=r"must be"):
            load("llama-8b", [f"{path}=stranger"])


def test_every_key_says_what_it_means() -> None:
    assert [path for path, key in keys().items() if len(key.description) < 10] == []


def test_suggestions_exist() -> None:
    for path, key in keys().items():
        if key.kind != "section":
            near = suggestion(path + "x").removeprefix("the nearest is ")
            assert near in keys()
