"""A node as a file: plain data, YAML, and back, so that what was seen on a machine can be planned with elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, TypeVar

import yaml

from hpctrain.cluster.cpus import format_list, parse_list
from hpctrain.cluster.node import Distance, Gpu, Nic, Node, Numa
from hpctrain.cluster.source import refusal
from hpctrain.config import plain_yaml

KEY = "hpctrain_node"
"""First key of such a file; its value is the version of the format."""
VERSION = 1

T = TypeVar("T", Gpu, Nic, Numa)


def plain(node: Node) -> dict[str, Any]:
    """For YAML and JSON; what is not known is left out."""
    out: dict[str, Any] = {KEY: VERSION, "name": node.name}
    out["gpus"] = [_record(gpu) for gpu in node.gpus]
    out["nics"] = [_record(nic) for nic in node.nics]
    out["numas"] = [_record(numa) for numa in node.numas]
    out["cores"] = [format_list(core) for core in node.cores]
    out["distances"] = [f"{a} {b} {d.name}" for (a, b), d in node.distances.items()]
    out["nvlinks"] = [f"{a} {b} {n}" for (a, b), n in node.nvlinks.items()]
    out["p2p"] = [f"{a} {b} {word}" for (a, b), word in node.p2p.items()]
    out |= {"sources": list(node.sources), "problems": list(node.problems), "partial": node.partial}
    return {key: value for key, value in out.items() if value not in ([], "", False)}


def dump(node: Node) -> str:
    """The text of a file."""
    return yaml.safe_dump(plain(node), sort_keys=False, default_flow_style=None, width=110)


def looks_like(text: str) -> bool:
    """Whether a text may be such a file."""
    return any(line.startswith(f"{KEY}:") for line in text.splitlines()[:50])


def load(text: str, source: str = "a node") -> Node:
    """The node in a file.

    Raises:
        ConfigError: it is none, or a part of it cannot be read; the sentence names it.
    """
    try:
        tree = plain_yaml.read(text)
    except ValueError as error:
        raise refusal(source, f"it must be YAML, but {error}") from None
    return of_plain(tree, source)


def of_plain(tree: Any, source: str = "a node") -> Node:
    """The node that `plain` has made data of.

    Raises:
        ConfigError: as `load`.
    """
    if not isinstance(tree, dict) or tree.get(KEY) != VERSION:
        raise refusal(source, f"it has no {KEY}: {VERSION}", "write it with hpctrain topo capture")
    try:
        return Node(
            name=str(tree.get("name", "")),
            gpus=tuple(_made(Gpu, record) for record in _list(tree, "gpus")),
            nics=tuple(_made(Nic, record) for record in _list(tree, "nics")),
            numas=tuple(_made(Numa, record) for record in _list(tree, "numas")),
            cores=tuple(parse_list(str(core)) for core in _list(tree, "cores")),
            distances={(a, b): Distance[word] for a, b, word in _triples(tree, "distances")},
            nvlinks={(a, b): int(count) for a, b, count in _triples(tree, "nvlinks")},
            p2p={(a, b): word for a, b, word in _triples(tree, "p2p")},
            sources=tuple(map(str, _list(tree, "sources"))),
            problems=tuple(map(str, _list(tree, "problems"))),
            partial=tree.get("partial", False) is True,
        )
    except (TypeError, ValueError, KeyError) as error:
        word = f"{error.args[0]!r} is not known" if isinstance(error, KeyError) else str(error)
        raise refusal(
            source, f"a part of it cannot be read: {word}", "write it anew with hpctrain topo capture"
        ) from None


def _record(device: Gpu | Nic | Numa) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for item in fields(device):
        value = getattr(device, item.name)
        if value == item.default and item.default is not MISSING:
            continue
        if item.name == "cpus":
            value = format_list(value)
        out[item.name] = list(value) if isinstance(value, tuple) else value
    return out


def _made(kind: type[T], record: Any) -> T:
    if not isinstance(record, Mapping):
        raise ValueError(f"{record!r} is no {kind.__name__}")
    known = {item.name: item for item in fields(kind)}
    values: dict[str, Any] = {}
    for name, value in record.items():
        if name not in known:
            raise ValueError(f"a {kind.__name__} has no {name}")
        if name == "cpus":
            value = parse_list(str(value))
        elif isinstance(value, list):
            value = tuple(value)
        elif isinstance(known[name].default, str) and not isinstance(value, str):
            value = str(value)
        elif name in ("index", "port") and not isinstance(value, int):
            raise ValueError(f"{name} of a {kind.__name__} is a number, not {value!r}")
        values[name] = value
    return kind(**values)


def _list(tree: Mapping[str, Any], key: str) -> list[Any]:
    value = tree.get(key, [])
    if not isinstance(value, list):
        raise ValueError(f"{key} is a list")
    return value


def _triples(tree: Mapping[str, Any], key: str) -> list[tuple[str, str, str]]:
    """`gpu0 mlx5_0 PIX`: two devices, and what is between them."""
    out = []
    for line in _list(tree, key):
        parts = str(line).split(" ")
        if len(parts) != 3:
            raise ValueError(f"{line!r} in {key} is not two devices and a word")
        out.append((parts[0], parts[1], parts[2]))
    return out
