"""Every dotted key of a configuration, with its meaning and limits in words, made from the schema."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from hpctrain.config.schema import RunConfig


@dataclass(frozen=True)
class Key:
    """One key.

    Attributes:
        path: dotted path.
        kind: `int`, `float`, `bool`, `text`, `path`, `choice`, `list` or `section`.
        default: value when it is not set; None for a section.
        allowed: what is accepted, in words.
        description: what it means.
        nullable: whether `null` is accepted.
    """

    path: str
    kind: str
    default: Any
    allowed: str
    description: str
    nullable: bool

    @property
    def raw(self) -> bool:
        """Whether the text on a command line is the value, even if it looks like a number."""
        return self.kind in ("text", "path")


@cache
def keys() -> dict[str, Key]:
    """All keys and sections by path, in the order of the schema."""
    return {key.path: key for key in _walk(RunConfig, "")}


def _walk(section: type[BaseModel], prefix: str) -> Iterator[Key]:
    for name, field in section.model_fields.items():
        path, (annotation, nullable) = prefix + name, _unwrap(field.annotation)
        description = field.description or ""
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            inner = ", ".join(annotation.model_fields)
            text = description or (annotation.__doc__ or "").partition("\n")[0]
            allowed = f"must be a section of {inner}" + (", or null" if nullable else "")
            yield Key(path, "section", None, allowed, text, nullable)
            yield from _walk(annotation, path + ".")
        else:
            kind, allowed = _kind(annotation, field)
            allowed = "must be " + allowed + (", or null" if nullable else "")
            default = field.get_default()
            default = list(default) if isinstance(default, tuple) else default
            yield Key(path, kind, default, allowed, description, nullable)


def _unwrap(annotation: Any) -> tuple[Any, bool]:
    """The type without `| None` and without metadata, and whether None was in it."""
    if get_origin(annotation) in (Union, types.UnionType):
        rest = [a for a in get_args(annotation) if a is not type(None)]
        assert len(rest) == 1, annotation
        return rest[0], True
    return annotation, False


def _kind(annotation: Any, field: FieldInfo) -> tuple[str, str]:
    """Kind of a plain key and its limits in words."""
    limits = list(field.metadata)
    if hasattr(annotation, "__metadata__"):
        for entry in annotation.__metadata__:
            limits += entry.metadata if isinstance(entry, FieldInfo) else [entry]
        annotation = get_args(annotation)[0]
    if get_origin(annotation) is Literal:
        return "choice", "one of " + ", ".join(map(str, get_args(annotation)))
    if annotation in (int, float):
        noun = "an integer" if annotation is int else "a number"
        return annotation.__name__, noun + _bounds(limits)
    if annotation is bool:
        return "bool", "true or false"
    if annotation is Path:
        return "path", "a path"
    if get_origin(annotation) is tuple:
        return "list", f"a list, each {_kind(get_args(annotation)[0], field)[1]}"
    assert annotation is str, annotation
    pattern = next((m.pattern for m in limits if getattr(m, "pattern", None)), None)
    return "text", "text" + (f" that matches {pattern}" if pattern else "")


def _bounds(limits: Iterable[Any]) -> str:
    words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    found = [f"{words[n]} {getattr(m, n):g}" for m in limits for n in words if getattr(m, n, None) is not None]
    return ", " + " and ".join(found) if found else ""


def as_written(value: object) -> str:
    """A value as it is written on a command line or in a recipe."""
    if value is None:
        return "null"
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(as_written, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def nearest(name: str, names: Iterable[str], cutoff: float = 0.6) -> str:
    """The name that was most likely meant, or an empty string."""
    return next(iter(difflib.get_close_matches(name, list(names), n=1, cutoff=cutoff)), "")


def suggestion(path: str) -> str:
    """What to write instead of a key that does not exist, in words."""
    leaves = [k.path for k in keys().values() if k.kind != "section"]
    home, _, name = path.rpartition(".")
    inside = {_name(p): p for p in leaves if p.rpartition(".")[0] == home}
    anywhere = {_name(p): p for p in reversed(leaves)}
    near = (
        inside.get(nearest(name, inside))
        or anywhere.get(name)
        or nearest(path, leaves, cutoff=0.7)
        or anywhere.get(nearest(name, anywhere, cutoff=0.8))
    )
    if near:
        return f"the nearest is {near}"
    if home and inside:
        return f"keys of {home} are {', '.join(inside)}"
    return "sections are " + ", ".join(k.path for k in keys().values() if k.kind == "section" and "." not in k.path)


def _name(path: str) -> str:
    return path.rpartition(".")[2]
