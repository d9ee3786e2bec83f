"""Where a rank computes: the GPU that the rank table gives it, or the one of its local number, or the CPU."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any, Literal

from hpctrain.errors import LaunchError
from hpctrain.launch.life.identity import Identity
from hpctrain.launch.place.bind import Binding

if TYPE_CHECKING:
    import torch


def choose(asked: Literal["auto", "cpu", "cuda"], identity: Identity, binding: Binding | None = None) -> torch.device:
    """The device of this rank, made current.

    Raises:
        LaunchError: there is no such device.
    """
    import torch

    if asked == "cpu" or (asked == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count == 0:
        raise LaunchError(
            "cluster.device=cuda, but torch sees no GPU here: run on a GPU node, or set cluster.device=cpu or auto."
        )
    planned = None if binding is None or count == 1 else _planned(binding, count)
    # One visible GPU is the rank's own where the launcher hides the others; the roll call sees if it is not.
    index = planned if planned is not None else identity.local_rank if count > 1 else 0
    if index >= count:
        raise LaunchError(
            f"rank {identity.rank} is number {index} on {socket.gethostname()}, which has {count} visible GPUs: "
            "ask for as many GPUs as ranks on each node, or set cluster.device=cpu."
        )
    place = torch.device("cuda", index)
    torch.cuda.set_device(place)
    return place


def _planned(binding: Binding, count: int) -> int | None:
    """The index that torch gives to the GPU of a plan: by its UUID, else its address, else its place."""
    if binding.uuid or binding.pci:
        for index in range(count):
            uuid, pci = names(index)
            if (binding.uuid and same(uuid, binding.uuid)) or (not binding.uuid and pci and pci == binding.pci):
                return index
    return binding.gpu


def same(a: str, b: str) -> bool:
    """Whether two UUIDs are of one GPU; torch leaves GPU- out."""
    return a.removeprefix("GPU-") == b.removeprefix("GPU-")


def names(index: int) -> tuple[str, str]:
    """UUID and PCI address of a device of torch's; "" for one that it does not tell."""
    import torch

    found: Any = torch.cuda.get_device_properties(index)
    pci = ""
    if hasattr(found, "pci_bus_id"):
        pci = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
    return str(getattr(found, "uuid", "")), pci


def addresses() -> tuple[str, ...]:
    """PCI addresses of all of torch's devices; none where it does not tell them, or has no devices."""
    import torch

    if not torch.cuda.is_available():
        return ()
    return tuple(pci for index in range(torch.cuda.device_count()) if (pci := names(index)[1]))


def names_of(place: torch.device) -> tuple[str, str]:
    """The same of the device that a rank computes on; nothing on the CPU."""
    return names(place.index) if place.type == "cuda" else ("", "")
