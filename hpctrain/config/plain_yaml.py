"""YAML with the scalars of YAML 1.2 and no surprises.

PyYAML follows YAML 1.1, where `1e-3` is text, `no` is false, `012` is ten and `1:30` is ninety. Here numbers
are numbers, only `true` and `false` are truth values, and a key given twice is an error.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any

import yaml

DEEPEST = 20
"""Levels of nesting that are read."""

_SCALARS = (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"~|null|Null|NULL|", "~nN\0"),
    ("int", r"[-+]?[0-9]+", "-+0123456789"),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", "-+0123456789."),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", "-+."),
)
_RESOLVERS: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
for _kind, _pattern, _first in _SCALARS:
    for _character in _first:
        _entry = (f"tag:yaml.org,2002:{_kind}", re.compile(f"^(?:{_pattern})$"))
        _RESOLVERS.setdefault("" if _character == "\0" else _character, []).append(_entry)


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = _RESOLVERS

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(problem="a key must be a plain name", problem_mark=key.start_mark)
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"the key {key.value!r} is given twice", problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers = _RESOLVERS


def _integer(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    return int(loader.construct_scalar(node))


_Loader.add_constructor("tag:yaml.org,2002:int", _integer)


def read(text: str) -> Any:
    """The value a YAML document stands for.

    Raises:
        ValueError: not one YAML document; the text says why and in which line.
    """
    try:
        _check_plain(text)
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f"line {mark.line + 1}: " if mark else ""
        raise ValueError(line + (error.problem or error.context or "not YAML")) from None
    except yaml.YAMLError as error:
        raise ValueError(str(error).splitlines()[0]) from None


def _check_plain(text: str) -> None:
    """Refuse what a configuration has no use for: tags, anchors, aliases and very deep nesting."""
    depth = 0
    for event in yaml.parse(text, _Loader):
        mark: Any = event.start_mark
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise yaml.MarkedYAMLError(problem="anchors (&) and aliases (*) are not used here", problem_mark=mark)
        if getattr(event, "tag", None):
            raise yaml.MarkedYAMLError(problem="tags (!) are not used here", problem_mark=mark)
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            raise yaml.MarkedYAMLError(problem=f"more than {DEEPEST} levels of nesting", problem_mark=mark)


def write(value: Any) -> str:
    """A YAML document that `read` turns into an equal value; keys keep their order."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False)
