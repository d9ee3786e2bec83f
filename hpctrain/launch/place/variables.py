"""Variables that put a rank's traffic where the rank table has it: NCCL, gloo, UCX, Open MPI. Pure.

Sources: NVIDIA's NCCL documentation, environment variables (an HCA list is of prefixes unless it begins with `=`;
rail after device and port from 2.30.5 on; 32 devices at most); gloo takes one plain name of an interface
(aws-samples/aws-do-eks, pull request 51).
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpctrain.cluster.node import Nic

MOST_HCAS = 32
"""Devices that NCCL's list may have."""

RAILS_FROM = (2, 30, 5)
"""NCCL that takes the rail of a device."""

Triple = tuple[int, ...]


@dataclass(frozen=True)
class Traffic:
    """What is known about how a rank sends.

    Attributes:
        rails: NICs that carry collectives, of its whole node, in the order of rails.
        nic: its own of them; None if not known.
        route: interface by which it reaches the other nodes; "" if not known, or if there are none.
        crosses: messages go from one rail to another, or rails are not known to hang on switches of their own.
        nccl: version; None if not known.
        topo_file: NCCL's picture of the machine, where it cannot see it itself.
        bound: its CPUs are set to those near its GPU.
        hosts: on which there are ranks.
    """

    rails: Sequence[Nic] = ()
    nic: Nic | None = None
    route: str = ""
    crosses: bool = True
    nccl: Triple | None = None
    topo_file: str = ""
    bound: bool = False
    hosts: int = 1


def variables(traffic: Traffic) -> tuple[dict[str, str], tuple[str, ...]]:
    """Variables by name, and what could not be said, a sentence each.

    Those of NCCL are the same for all ranks of a node but for none: NCCL picks the near NIC itself, and a list that
    differs between ranks of a node makes it choose differently at both ends.
    """
    out = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    said: list[str] = []
    if traffic.bound:  # its helper threads would crowd the rank's CPUs otherwise
        out["NCCL_IGNORE_CPU_AFFINITY"] = "1"
    if traffic.topo_file:
        out["NCCL_TOPO_FILE"] = traffic.topo_file
    if traffic.hosts == 1:
        return out, ()
    verbs = [nic for nic in traffic.rails if nic.verbs is not False and nic.link_layer != "efa"]
    if len(verbs) > MOST_HCAS:
        said.append(f"{len(verbs)} rails are more than the {MOST_HCAS} that NCCL takes in a list: it chooses itself")
    elif verbs:
        out["NCCL_IB_HCA"] = hca_list(verbs, traffic.nccl)
    if len(traffic.rails) > 1 and not traffic.crosses:
        out["NCCL_CROSS_NIC"] = "0"
    if traffic.route:
        out["NCCL_SOCKET_IFNAME"] = f"={traffic.route}"
        out["OMPI_MCA_btl_tcp_if_include"] = traffic.route
    if gloo := gloo_interface(traffic):
        out["GLOO_SOCKET_IFNAME"] = gloo
    if traffic.nic is not None and traffic.nic in verbs:
        out["UCX_NET_DEVICES"] = device(traffic.nic)
    elif traffic.nic is not None and traffic.nic.verbs is False and traffic.nic.interface:
        out["UCX_NET_DEVICES"] = traffic.nic.interface
    return out, tuple(said)


def gloo_interface(traffic: Traffic) -> str:
    """The rail of a rank where rails are plain interfaces; else the one by which it reaches other nodes."""
    nic = traffic.nic
    if nic is not None and nic.role == "rail" and nic.verbs is False and nic.interface and nic.state != "down":
        return nic.interface
    return traffic.route


def device(nic: Nic) -> str:
    """A port as NCCL and UCX name it: mlx5_0:1."""
    return f"{nic.name.split(':')[0]}:{nic.port}"


def hca_list(rails: Sequence[Nic], nccl: Triple | None = None) -> str:
    """The exact list of ports, in the order of rails, with the number of the rail where NCCL knows it.

    Of a list without `=` at its beginning, mlx5_1 also takes mlx5_10 to mlx5_19.
    """
    with_rail = nccl is not None and nccl >= RAILS_FROM
    return "=" + ",".join(device(nic) + (f":{i}" if with_rail else "") for i, nic in enumerate(rails))


def hca_names(text: str) -> tuple[str, ...] | None:
    """Ports in an exact list, without rails; None for a list of prefixes or of what is left out."""
    if not text.startswith("="):
        return None
    return tuple(":".join([*word.split(":"), "1"][:2]) for word in text[1:].lstrip("=").split(",") if word)


def apply(planned: Mapping[str, str], env: Mapping[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Those of the planned variables that nobody has set; and of the others, which differ from the plan."""
    new = {name: value for name, value in planned.items() if name not in env}
    kept = [name for name, value in planned.items() if name in env and env[name] != value]
    return new, tuple(kept)


def nccl_version() -> Triple | None:
    """Of the library that comes with torch, as packages tell it; None if none does. Nothing is imported."""
    for package in ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11"):
        try:
            found = re.findall(r"\d+", importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            continue
        return tuple(int(part) for part in found[:3])
    return None
