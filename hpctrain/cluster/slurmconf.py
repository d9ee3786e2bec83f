"""Lines of Slurm's configuration files and of `scontrol show`: `Key=value Key=value`, keys in any case."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from hpctrain.cluster.hostlist import expand
from hpctrain.errors import ConfigError

_PAIR = re.compile(r"""([A-Za-z_]+)\s*=\s*("[^"]*"|[^\s"]\S*|)""")


@dataclass(frozen=True)
class Line:
    """A line that says something.

    Attributes:
        number: of its first line in the file, from 1.
        values: by key, in lower case.
        rest: what is no pair of key and value.
    """

    number: int
    values: Mapping[str, str]
    rest: str = ""

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def get(self, key: str) -> str:
        """The value of a key, "" where it has none."""
        return self.values.get(key, "")


def lines(text: str) -> Iterator[Line]:
    """Lines without comments; one that ends in a backslash goes on in the next."""
    joined, first = "", 0
    for number, raw in enumerate([*text.splitlines(), ""], 1):
        first = first or number
        line = re.sub(r"(?<!\\)#.*", "", raw).rstrip()
        if joined.endswith(","):  # a list that goes on
            line = line.lstrip()
        if line.endswith("\\"):
            joined += line[:-1].rstrip()
            joined += "" if joined.endswith(",") else " "
            continue
        joined += line
        if joined.strip():
            pairs = {key.lower(): value.strip('"') for key, value in _PAIR.findall(joined)}
            yield Line(first, pairs, _PAIR.sub("", joined).strip())
        joined, first = "", 0


def commented(text: str, key: str) -> list[str]:
    """Values of a key in lines that are commented out."""
    return re.findall(rf"^[ \t]*#[ \t]*{key}\s*=\s*(\S+)", text, re.IGNORECASE | re.MULTILINE)


def hosts(line: Line, key: str, problems: list[str]) -> list[str]:
    """The names in the hostlist of a key; what is no hostlist is a problem, and what is in order before it is kept."""
    value = line.get(key)
    try:
        return expand(value)
    except ConfigError as error:
        problems.append(f"line {line.number}: {error}")
    kept = value.rpartition(",")[0]
    while kept:
        try:
            return expand(kept)
        except ConfigError:
            kept = kept.rpartition(",")[0]
    return []


def some(names: Iterable[str]) -> str:
    """The first of some names, and how many more there are."""
    listed = list(names)
    return ", ".join(listed[:3]) + (f" and {len(listed) - 3} more" if len(listed) > 3 else "")
