"""From a node that was described to the one that a process is on: its own names, the GPUs and CPUs that it was given.

Machines of one kind are wired alike, but their devices are not called alike: names of NICs shift between nodes
(Oracle's H100 images: mlx5_0 here, mlx5_18 there), UUIDs are each GPU's own. So places are compared by PCI address.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from hpctrain.cluster.affinity import near
from hpctrain.cluster.node import Cpus, Distance, Gpu, Node


def gpu_rails(node: Node) -> tuple[int, ...]:
    """Of each GPU the rail it sends by, as an index of `Node.rails`: the first that NCCL gives it of those nearest.

    Where distances tell nothing, GPUs take rails in turn.
    """
    at = {nic.name: i for i, nic in enumerate(node.rails)}
    wide = max(1, len(at))
    return tuple(at[one.picks[0].name] if one.picks else i % wide for i, one in enumerate(near(node)))


def alike(node: Node) -> Node:
    """What a node says about others of its kind: without what is each node's own."""
    return replace(
        node,
        name="",
        gpus=tuple(replace(gpu, uuid="") for gpu in node.gpus),
        nics=tuple(replace(nic, guid="", state="") for nic in node.nics),
    )


@dataclass(frozen=True)
class Here:
    """A described node on the machine that a process is on.

    Attributes:
        node: with the names, UUIDs and states that its devices have here.
        missing: what of it is not there, a sentence each.
        unseen: why something could not be looked at, a sentence each.
    """

    node: Node
    missing: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()


def here(described: Node, live: Node) -> Here:
    """A described node on this machine.

    A machine that shows no NIC at all hides its /sys, as some containers do: that says nothing about its rails.
    """
    hidden = not live.nics and any(nic.role == "rail" for nic in described.nics)
    gpus, missing = [], []
    theirs = {gpu.pci: gpu for gpu in live.gpus if gpu.pci}
    for gpu in described.gpus:
        found = theirs.get(gpu.pci) if gpu.pci else next((g for g in live.gpus if g.index == gpu.index), None)
        if found is None and live.gpus:
            missing.append(f"{gpu.key} ({gpu.pci or 'no address'}) is not on this machine")
        own = (
            {} if found is None else {"uuid": found.uuid or gpu.uuid, "mig": found.mig if gpu.mig is None else gpu.mig}
        )
        gpus.append(replace(gpu, **own))  # type: ignore[arg-type]
    nics, names = [], {}
    for nic in described.nics:
        same = [n for n in live.nics if n.pci and n.pci == nic.pci and n.port == nic.port]
        same = same or [n for n in live.nics if n.name == nic.name and not (n.pci and nic.pci)]
        same = [n for n in same if n.verbs is not False or nic.verbs is False] or same
        if not same:
            if nic.role == "rail" and not hidden:
                missing.append(f"rail {nic.name} ({nic.pci or 'no address'}) is not on this machine")
            nics.append(nic)
            continue
        one = same[0]
        names[nic.name] = one.name
        own_nic = {"name": one.name, "interface": one.interface or nic.interface, "state": one.state or nic.state}
        rate = one.rate_gbit or nic.rate_gbit
        nics.append(replace(nic, **own_nic, rate_gbit=rate, link_layer=one.link_layer or nic.link_layer))  # type: ignore[arg-type]
    distances = {(names.get(a, a), names.get(b, b)): d for (a, b), d in described.distances.items()}
    cores = live.cores or described.cores
    node = replace(described, name=live.name, gpus=tuple(gpus), nics=tuple(nics), distances=distances, cores=cores)
    unseen = ("no NIC can be seen on this machine, so its rails are taken to be as described",) * hidden
    return Here(node, tuple(missing), unseen)


def with_gpus(node: Node, kept: Sequence[Gpu]) -> Node:
    """The node with some of its GPUs alone, numbered anew in the order given."""
    index = {gpu.index: i for i, gpu in enumerate(kept)}
    keys = {f"gpu{old}": f"gpu{new}" for old, new in index.items()}
    gone = {gpu.key for gpu in node.gpus} - keys.keys()

    def named(pairs: Iterable[tuple[tuple[str, str], Distance]]) -> dict[tuple[str, str], Distance]:
        return {(keys.get(a, a), keys.get(b, b)): d for (a, b), d in pairs if not {a, b} & gone}

    return replace(
        node,
        gpus=tuple(replace(gpu, index=i) for i, gpu in enumerate(kept)),
        distances=named(node.distances.items()),
        nvlinks={(keys[a], keys[b]): n for (a, b), n in node.nvlinks.items() if a in keys and b in keys},
        p2p={},
    )


def with_cpus(node: Node, allowed: Iterable[int]) -> Node:
    """The node with no other CPUs than those allowed."""
    mine = set(allowed)

    def cut(cpus: Cpus) -> Cpus:
        return tuple(cpu for cpu in cpus if cpu in mine)

    return replace(
        node,
        gpus=tuple(replace(gpu, cpus=cut(gpu.cpus)) for gpu in node.gpus),
        numas=tuple(replace(numa, cpus=cut(numa.cpus)) for numa in node.numas),
        cores=tuple(filter(None, map(cut, node.cores))),
    )


def visible(text: str | None, gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves of those of a node, in their order; all where it is not set.

    Numbers count in the order of PCI addresses, as CUDA_DEVICE_ORDER=PCI_BUS_ID does; a number that is not there ends
    the list, as it does for CUDA.
    """
    if text is None:
        return tuple(gpus)
    out: list[Gpu] = []
    for word in filter(None, (part.strip() for part in text.split(","))):
        found = [g for g in gpus if (g.index == int(word) if word.isdecimal() else g.uuid.startswith(word) and g.uuid)]
        if len(found) != 1:
            break
        out.append(found[0])
    return tuple(out)
