"""gres.conf: what Slurm is told about the GPUs of nodes. Records for checks, not a source of nodes.

Keys are those of gres.conf(5). `Cores` are Slurm's own numbers of cores, not the CPUs of the operating system.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from hpctrain.cluster.hostlist import expand
from hpctrain.cluster.slurmconf import Line, lines
from hpctrain.errors import ConfigError

_SUFFIX = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40, "p": 1 << 50}


@dataclass(frozen=True)
class Gres:
    """One line.

    Attributes:
        name, type: of the resource, such as gpu and a100; "" where the line only says how they are found.
        nodes: it is for; (): for all that use the file.
        files: devices, one a resource.
        count: how many; by `files` where the line gives no number.
        cores: near it; (): not said.
        links: NVLinks to every resource of the node, -1 for itself; (): not said.
        autodetect: how Slurm finds them itself: nvml, nvidia, rsmi, oneapi, nrt, off; "": not said.
        flags: as they are.
    """

    name: str = ""
    type: str = ""
    nodes: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    count: int = 0
    cores: tuple[int, ...] = ()
    links: tuple[int, ...] = ()
    autodetect: str = ""
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class GresConf:
    """A file: its lines, and what could not be read, a sentence each."""

    lines: tuple[Gres, ...]
    problems: tuple[str, ...] = ()

    def of(self, host: str, name: str = "gpu") -> tuple[Gres, ...]:
        """Lines about a resource on a host; those that name the host before those for all."""
        mine = tuple(one for one in self.lines if one.name == name and host in one.nodes)
        return mine or tuple(one for one in self.lines if one.name == name and not one.nodes)

    def autodetect(self, host: str) -> str:
        """How Slurm finds devices on a host: what is said of the host, else of all."""
        said = [one.autodetect for one in self.lines if one.autodetect and host in one.nodes]
        return (said or [one.autodetect for one in self.lines if one.autodetect and not one.nodes] or [""])[-1]


def looks_like(text: str) -> bool:
    """Whether a text may be a gres.conf."""
    return (
        re.search(r"^[ \t]*(AutoDetect|Name|NodeName\s*=\S+.*\sName)\s*=", text, re.IGNORECASE | re.MULTILINE)
        is not None
    )


def read_gres(text: str) -> GresConf:
    """The lines of a gres.conf that say something; lines of a template are left out and named."""
    found: list[Gres] = []
    problems: list[str] = []
    for line in lines(text):
        if not line.values or (line.rest and not {"name", "autodetect"} & line.values.keys()):
            problems.append(f"line {line.number} is not of a gres.conf: left out")
        elif any("{{" in value or "{%" in value for value in (*line.values.values(), line.rest)):
            problems.append(f"line {line.number} is of a template: left out")
        else:
            found.append(_record(line, problems))
    return GresConf(tuple(found), tuple(problems))


def _record(line: Line, problems: list[str]) -> Gres:
    files = _expanded(line, "file", problems) or _expanded(line, "multiplefiles", problems)
    count = _count(line, problems) if "count" in line else len(files) or int("name" in line)
    name = line.get("name")
    if name == "gpu" and files and "count" in line and count != len(files):
        problems.append(f"line {line.number}: Count={line.get('count')} and {len(files)} files")
    return Gres(
        name,
        line.get("type"),
        _expanded(line, "nodename", problems),
        files,
        count,
        _numbers(line, "cores" if "cores" in line else "cpus", problems),
        _links(line, problems),
        line.get("autodetect").lower(),
        tuple(filter(None, line.get("flags").split(","))),
    )


def _expanded(line: Line, key: str, problems: list[str]) -> tuple[str, ...]:
    try:
        return tuple(expand(line.get(key)))
    except ConfigError as error:
        problems.append(f"line {line.number}: {error}")
        return ()


def _numbers(line: Line, key: str, problems: list[str]) -> tuple[int, ...]:
    """`0-3,8`, or the same in brackets."""
    value = line.get(key)
    inside = value[1:-1] if value[:1] == "[" and value[-1:] == "]" else value
    try:
        return tuple(sorted({int(number) for number in expand(f"[{inside}]")})) if inside else ()
    except (ConfigError, ValueError):
        problems.append(f"line {line.number}: {key.capitalize()}={value} is no list of numbers")
        return ()


def _links(line: Line, problems: list[str]) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in line.get("links").split(",") if number)
    except ValueError:
        problems.append(f"line {line.number}: Links={line.get('links')} is no list of numbers")
        return ()


def _count(line: Line, problems: list[str]) -> int:
    value = line.get("count").lower()
    number, suffix = value.rstrip("kmgtp"), value[len(value.rstrip("kmgtp")) :]
    if number.isdecimal() and number.isascii() and len(number) < 19 and suffix in _SUFFIX:
        return int(number) * _SUFFIX[suffix]
    problems.append(f"line {line.number}: Count={line.get('count')} is no number")
    return 0


def mismatches(conf: GresConf, host: str, gpus: int, cpus_near: Sequence[tuple[int, ...]] = ()) -> list[str]:
    """Where a gres.conf says something else about a host's GPUs than was found there, a sentence each.

    Args:
        gpus: found.
        cpus_near: of each, CPUs that are near; compared only as groups, as Slurm counts cores its own way.
    """
    mine = conf.of(host)
    told = sum(one.count for one in mine)
    out = [f"gres.conf gives {host} {told} GPUs, and it has {gpus}"] if mine and told != gpus else []
    sets = [one.cores for one in mine for _ in range(one.count) if one.cores]
    if len(sets) == len(cpus_near) == gpus and all(cpus_near):
        groups = [[a == b for a in rows for b in rows] for rows in (sets, list(cpus_near))]
        if groups[0] != groups[1]:
            out.append(f"gres.conf puts other GPUs of {host} near the same cores than the machine does")
    return out
