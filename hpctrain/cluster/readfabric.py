"""Which kind of file a fabric is in, and the fabric."""

from __future__ import annotations

import re
from pathlib import Path

from hpctrain.cluster.fabric import Fabric
from hpctrain.cluster.ibnet import from_ibnetdiscover
from hpctrain.cluster.slurmtopology import from_conf, from_yaml
from hpctrain.cluster.source import plain
from hpctrain.errors import ConfigError

LARGEST = 256 << 20
"""Bytes of a file that is still read."""


def read_fabric(path: Path | str, name: str = "") -> Fabric:
    """The fabric in a file: topology.conf, topology.yaml, or output of `scontrol show topology` or `ibnetdiscover`.

    Args:
        name: of a topology.yaml, which of its topologies; "": the default of the cluster.

    Raises:
        ConfigError: it cannot be read, is none of these, or holds no fabric.
    """
    path = Path(path)
    try:
        if path.stat().st_size > LARGEST:
            raise ConfigError("fabric", str(path), f"a file of at most {LARGEST >> 20} MiB")
        text = plain(path.read_bytes())
    except OSError as error:
        raise ConfigError("fabric", str(path), error.strerror or "cannot be read", "give a file") from error
    return fabric_in(text, path.name, name)


_CONF = re.compile(
    r"^[ \t]*#?[ \t]*(SwitchName|BlockName|BlockSizes|AggregatedBlock)\s*=", re.IGNORECASE | re.MULTILINE
)
_IBNET = re.compile(r'^(Switch|Ca)\s+\d+\s+"|^(vendid|switchguid|caguid)=', re.MULTILINE)
_YAML = re.compile(r"^[ \t]*-?[ \t]*topology\s*:", re.MULTILINE)


def looks_like(text: str) -> bool:
    """Whether a text may be a fabric."""
    return not text.lstrip().startswith("<") and any(kind.search(text) for kind in (_CONF, _IBNET, _YAML))


def fabric_in(text: str, source: str, name: str = "") -> Fabric:
    """The fabric in a text; by what it looks like, not by its name."""
    text = text.replace("\0", "")
    if _CONF.search(text):
        return from_conf(text, source)
    if _IBNET.search(text):
        return from_ibnetdiscover(text, source)
    if _YAML.search(text):
        return from_yaml(text, source, name)
    raise ConfigError(
        "fabric",
        source,
        "neither topology.conf, topology.yaml nor output of `scontrol show topology` or ibnetdiscover",
        "give one of these",
    )
