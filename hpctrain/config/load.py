"""From a recipe and `key=value` overrides to a typed configuration, or to one sentence about what is wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from hpctrain.config import plain_yaml
from hpctrain.config.keys import Key, keys, nearest, suggestion
from hpctrain.config.schema import RunConfig
from hpctrain.errors import ConfigError

if TYPE_CHECKING:
    from importlib.abc import Traversable

Tree = dict[str, Any]

DEPTH = 3
"""Levels of sections that are looked into; the schema has fewer, and YAML aliases can nest without end."""


def load(recipe: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration of a run.

    Args:
        recipe: name of a recipe of the package, or path of a YAML file.
        overrides: `key=value` with dotted keys; a later one wins.

    Raises:
        ConfigError: no such recipe, not YAML, a key that does not exist, a value of another type or out of
            its limits.
    """
    tree = _read(recipe)
    _check_names(tree, str(recipe))
    given = {_override(tree, text) for text in overrides}
    try:
        return RunConfig.model_validate_json(json.dumps(tree), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        path = ".".join(part for part in first["loc"] if isinstance(part, str))  # numbers are places in a list
        value, key = _at(tree, path), keys()[path]
        fixes = [f"write {_as_list(value, key)}"] if key.kind == "list" else []
        fixes += [] if any(path == g or path.startswith(f"{g}.") for g in given) else [f"change it in {recipe}"]
        allowed = "must be finite" if first["type"] == "finite_number" else key.allowed
        raise ConfigError(path, value, allowed, ", and ".join(fixes)) from None


def dump(config: RunConfig) -> str:
    """The whole configuration as YAML that `load` reads back to an equal one."""
    return plain_yaml.write(config.model_dump(mode="json"))


def recipes() -> dict[str, Traversable]:
    """The recipes of the package by name, sorted."""
    found = [f for f in files("hpctrain.config").joinpath("recipes").iterdir() if f.name.endswith(".yaml")]
    return {f.name.removesuffix(".yaml"): f for f in sorted(found, key=lambda f: f.name)}


def description(recipe: str) -> str:
    """One line about a recipe of the package: the first comment of its file."""
    return recipes()[recipe].read_text(encoding="utf-8").splitlines()[0].lstrip("# ")


def _read(recipe: str | Path) -> Tree:
    known = recipes()
    source: Traversable | Path = known.get(str(recipe)) or Path(recipe)
    try:
        tree = plain_yaml.read(source.read_text(encoding="utf-8"))
    except FileNotFoundError:
        near = nearest(Path(recipe).stem, known)
        fix = f"the nearest recipe is {near}" if near else "recipes are " + ", ".join(known)
        raise ConfigError("recipe", str(recipe), "no recipe and no file has this name", fix) from None
    except OSError as error:
        raise ConfigError("recipe", str(recipe), f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError("recipe", str(recipe), "must be a YAML file in UTF-8") from None
    except ValueError as error:
        raise ConfigError("recipe", str(recipe), f"must be YAML, but {error}") from None
    if tree is None:
        raise ConfigError(
            "recipe", str(recipe), "is empty", "write {} in it to have all defaults, or name another file"
        )
    if not isinstance(tree, dict):
        raise ConfigError("recipe", str(recipe), "must be YAML with keys and values at its top")
    return tree


def _check_names(tree: Tree, origin: str) -> None:
    """Refuse keys that do not exist; drop sections without content, as commented-out keys leave them."""
    for path, value in list(_leaves(tree)):
        key = keys().get(path)
        if key is None:
            raise ConfigError(path, value, "there is no such key", f"{suggestion(path)} (in {origin})")
        if value is None and key.kind == "section" and not key.nullable:
            *sections, name = path.split(".")
            inside = tree
            for section in sections:
                inside = inside[section]
            del inside[name]


def _leaves(tree: Tree, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if not isinstance(name, str) or "." in name:
            fix = "write sections as indented blocks, not with dots"
            raise ConfigError(f"{prefix}{name}", value, "must be the name of one key or section", fix)
        if isinstance(value, dict) and value and prefix.count(".") < DEPTH:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _override(tree: Tree, text: str) -> str:
    """Set what a `key=value` says; returns the key."""
    if not text.isprintable() and any("\ud800" <= letter <= "\udfff" for letter in text):
        raise ConfigError("override", ascii(text), "must be text in UTF-8")
    path, equals, value = text.partition("=")
    path = path.strip()
    if not equals or not path:
        raise ConfigError("override", text, "must be written key=value", "for example parallel.tp=2")
    key = keys().get(path)
    if key is None:
        raise ConfigError(path, value, "there is no such key", suggestion(path))
    if not value.strip():
        raise ConfigError(path, value, key.allowed, "give a value after the equals sign")
    parsed = _value(key, value)
    if key.kind == "section":
        if isinstance(parsed, dict):
            for inner, leaf in [*_leaves(parsed, f"{path}."), *([] if parsed else [(path, parsed)])]:
                known = keys().get(inner)
                if known is None:
                    raise ConfigError(inner, value, "there is no such key", suggestion(inner))
                if not leaf and known.kind == "section" and not known.nullable:
                    raise ConfigError(
                        inner, leaf, "sets nothing", f"set one of its keys, for example {_example(inner)}"
                    )
        elif parsed is not None or not key.nullable:
            raise ConfigError(path, parsed, key.allowed, f"set one of its keys, for example {_example(path)}")
    *sections, name = path.split(".")
    for section in sections:
        inside = tree.get(section)
        if not isinstance(inside, dict):
            inside = tree[section] = {}
        tree = inside
    tree[name] = _merged(tree.get(name), parsed) if key.kind == "section" else parsed
    return path


def _at(tree: Tree, path: str) -> Any:
    """What a tree holds at a path; a section that is none is what there is."""
    value: Any = tree
    for name in path.split("."):
        if not isinstance(value, dict) or name not in value:
            break
        value = value[name]
    return value


def _as_list(value: Any, key: Key) -> str:
    """How a list is written: the numbers or names that were given as text, else an example."""
    names = re.findall(r"\w+", key.allowed.partition("each one of ")[2].partition(", or null")[0])
    if names:
        given = [name for name in re.findall(r"\w+", str(value)) if name in names]
        return f"it in brackets and quotes, such as '[{','.join(given or names[:1])}]'"
    numbers = re.findall(r"-?\w+(?:\.\w+)?", str(value)) if isinstance(value, (str, int)) else []
    if not numbers or isinstance(value, bool) or not all(number.isdecimal() for number in numbers):
        numbers = ["3", "1"]
    return f"it in brackets and quotes, such as '[{','.join(numbers)}]'"


def _merged(old: Any, new: Any) -> Any:
    """A section with some of its keys set anew; the others stay."""
    if not isinstance(old, dict) or not isinstance(new, dict):
        return new
    return {**old, **{name: _merged(old.get(name), value) for name, value in new.items()}}


def _value(key: Key, text: str) -> Any:
    try:
        parsed = plain_yaml.read(text)
    except ValueError:
        parsed = text
    if key.raw and not (parsed is None and key.nullable):
        return parsed if isinstance(parsed, str) else text
    return parsed


def _example(section: str) -> str:
    return next(p for p, k in keys().items() if p.startswith(f"{section}.") and k.kind != "section")
