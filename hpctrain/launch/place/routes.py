"""By which interface this machine reaches another one, and whether an interface could."""

from __future__ import annotations

import ipaddress
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress

import psutil

NAMES_S = 6.0
"""How long the names of other hosts may take. A resolver that hears nothing asks again after 5 s."""


def own_address(host: str) -> str:
    """The address from which the kernel would send to a host; "" if it knows no way, or the name is not known.

    Nothing is sent: a datagram socket that is connected asks for the route alone.
    """
    with suppress(OSError, UnicodeError):  # the latter of what is no name at all
        for family, kind, protocol, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(address)
                own: str = probe.getsockname()[0]
                return own
    return ""


def interface_of(address: str) -> str:
    """The interface that has an address; "" for none."""
    for name, cards in psutil.net_if_addrs().items():
        if any(card.address.partition("%")[0] == address for card in cards):
            return str(name)
    return ""


def interface_to(hosts: Iterable[str]) -> str:
    """The interface by which the first of the hosts is reached that can be; "" if none can, or only by the loopback.

    Three are asked for at once: a resolver may need long to say that it knows no such name, and all of a job wait for a
    rank that waits for that.
    """
    asked = list(hosts)[:3]
    own: dict[str, str] = {}

    def ask(host: str) -> None:
        own[host] = own_address(host)

    threads = [threading.Thread(target=ask, args=(host,), daemon=True) for host in asked]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + NAMES_S
    for host, thread in zip(asked, threads):
        thread.join(max(deadline - time.monotonic(), 0.0))
        name = interface_of(address) if (address := own.get(host, "")) else ""
        if name and not name.startswith("lo"):
            return name
    return ""


def is_up(interfaces: str) -> bool | None:
    """Whether an interface is up, or all of a list as gloo takes it; None if one of them does not exist."""
    known = psutil.net_if_stats()
    found = [known.get(name) for name in interfaces.split(",") if name]
    return None if None in found else all(bool(one.isup) for one in found)


def networks(interfaces: Iterable[str] | None = None) -> tuple[str, ...]:
    """Addresses of interfaces with the length of their prefix, such as 10.1.0.11/24.

    Args:
        interfaces: None: all of this machine but the loopback.
    """
    wanted = None if interfaces is None else set(interfaces)
    found = []
    for name, cards in psutil.net_if_addrs().items():
        if name not in wanted if wanted is not None else name.startswith("lo"):
            continue
        for card in cards:
            if card.family in (socket.AF_INET, socket.AF_INET6) and not card.address.startswith("fe80:"):
                with suppress(ValueError):
                    length = int(ipaddress.ip_address(card.netmask or "")).bit_count()
                    found.append(f"{card.address.partition('%')[0]}/{length}")
    return tuple(found)


def beside(own: Iterable[str], others: Iterable[str]) -> bool:
    """Whether one of other machines' addresses is in a network of one's own, and is another one.

    Bridges of containers have the same address on every machine: what is sent to it never leaves.

    Args:
        own, others: addresses as `networks` gives them.
    """
    theirs = [ipaddress.ip_interface(text).ip for text in others]
    return any(
        address in one.network and address != one.ip for one in map(ipaddress.ip_interface, own) for address in theirs
    )


def taken(text: str, names: Sequence[str]) -> tuple[str, ...]:
    """Those of some names that a list of NCCL's takes, as NCCL_SOCKET_IFNAME and NCCL_IB_HCA have them.

    Entries are beginnings of names; after `=` whole names; after `^` what is left out. Behind a colon may be a port,
    and behind that a rail and a plane, which choose nothing. (NVIDIA's NCCL documentation, environment variables.)

    Args:
        names: with a port (mlx5_0:1) where they have one.
    """
    leaves_out, text = text.startswith("^"), text.removeprefix("^")
    whole, text = text.startswith("="), text.lstrip("=")
    entries = [entry.split(":") for entry in text.split(",") if entry]

    def fits(name: str) -> bool:
        device, _, port = name.partition(":")
        return any(
            (device == entry[0] if whole else device.startswith(entry[0]))
            and (len(entry) == 1 or not port or entry[1] in ("", port))
            for entry in entries
        )

    return tuple(name for name in names if fits(name) != leaves_out)
