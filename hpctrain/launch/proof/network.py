"""Holds NICs, lists of devices and interfaces of a rank against the plan. Pure.

A variable that somebody has set by hand is a warning as long as it can work: they may know better. One that takes a
device which is no rail, or an interface that does not reach the other hosts, stops the job: it would hang.
"""

from __future__ import annotations

from collections.abc import Iterator

from hpctrain.launch.place.routes import taken
from hpctrain.launch.place.variables import hca_names
from hpctrain.launch.proof.finding import Finding, Rank


def of_network(one: Rank) -> Iterator[Finding]:
    """What is otherwise than planned."""
    yield from _nic(one)
    yield from _hcas(one)
    yield from _interface(one)
    yield from _sockets(one)


def _nic(one: Rank) -> Iterator[Finding]:
    found, binding = one.found, one.binding
    if binding is None:
        return
    for said in binding.missing:
        yield Finding(
            one.rank,
            "device",
            said.partition(" is not")[0],
            "not there",
            "this node is wired otherwise, or its driver lost the device",
            "exclude the node, or capture its description anew",
        )
    for said in binding.unseen:
        yield Finding(
            one.rank,
            "device",
            "seen",
            said,
            "a container without /sys",
            "mount /sys into the container: then the proof can tell",
            stops=False,
        )
    if binding.nic and found.nic in ("down", "absent"):
        yield Finding(
            one.rank,
            "NIC",
            f"{binding.nic} active",
            f"{binding.nic} {found.nic}",
            "cable, switch port or subnet manager",
            f"exclude {binding.host} and have the port looked at (ibstat {binding.nic})",
        )


def _hcas(one: Rank) -> Iterator[Finding]:
    found, binding = one.found, one.binding
    if binding is None or not binding.hcas or found.hcas == binding.hcas:
        return
    rails = set(hca_names(binding.hcas) or ())
    takes = set(taken(found.hcas, binding.verbs or hca_names(found.hcas) or ())) if found.hcas else set()
    others = sorted(takes - rails)
    prefixes = found.hcas and hca_names(found.hcas) is None
    shown = found.hcas or "not set"
    if others:
        shown = f"{found.hcas}: takes {', '.join(others[:2])}, no rail"
    elif found.hcas and not takes:
        shown = f"{found.hcas}: takes no device"
    yield Finding(
        one.rank,
        "NCCL_IB_HCA",
        binding.hcas,
        shown,
        "it was set by hand" + (": without = it is a list of prefixes, mlx5_1 takes mlx5_10" if prefixes else ""),
        "unset NCCL_IB_HCA: hpctrain names exactly the rails",
        stops="NCCL_IB_HCA" not in binding.kept or bool(others) or not takes,
    )


def _interface(one: Rank) -> Iterator[Finding]:
    found, binding = one.found, one.binding
    name = found.interface
    cause = "GLOO_SOCKET_IFNAME was set by hand, for all ranks or all nodes alike"
    mend = "unset GLOO_SOCKET_IFNAME: hpctrain takes the rank's rail, or the route to the others"
    planned = binding.interface if binding is not None else ""
    if name.startswith(("=", "^")):
        why = "gloo takes plain names, not NCCL's syntax"
        yield Finding(one.rank, "interface", planned or "one name", name, why, mend)
    elif name and not found.up:
        state = "is down" if found.up is not None else "does not exist"
        yield Finding(one.rank, "interface", planned or "one that is up", f"{name} {state}", cause, mend)
    elif name and name != planned and one.hosts > 1 and one.reach is False:
        shown = f"{name}, from which no way leads to them"
        yield Finding(one.rank, "interface", planned or "one that reaches the other hosts", shown, cause, mend)
    elif planned and name != planned:
        kept = binding is not None and "GLOO_SOCKET_IFNAME" in binding.kept
        yield Finding(one.rank, "interface", planned, name or "not set", cause, mend, stops=not kept)


def _sockets(one: Rank) -> Iterator[Finding]:
    """The interface that NCCL takes to find its peers; on the CPU nobody asks for it."""
    found, binding = one.found, one.binding
    planned = {**binding.kept, **binding.set}.get("NCCL_SOCKET_IFNAME", "") if binding is not None else ""
    if one.hosts == 1 or not found.sockets or found.sockets == planned:
        return
    if not found.socket:
        shown = f"{found.sockets}: names none of this host"
    elif one.sockets_reach is False:
        shown = f"{found.sockets}: takes {found.socket}, from which no way leads to them"
    else:
        return
    yield Finding(
        one.rank,
        "interface of NCCL",
        planned or "one that reaches the other hosts",
        shown,
        "NCCL_SOCKET_IFNAME was set by hand: names without = are beginnings, and ^ alone lets the loopback in",
        "unset NCCL_SOCKET_IFNAME: hpctrain takes the route to the others",
        stops=bool(found.devices),
    )
