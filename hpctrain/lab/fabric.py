"""The networks of a lab with rails: leaf switches, a spine between them, and a network of management.

Rail r is a network of its own, 10.1.r.0/24: every node has the interface `rail{r}` on the switch `leaf{r}`. What goes
from one rail to another passes the spine, a router with a link to each leaf. The switches are bridges in the network
namespace of one machine, the spine is another machine, a link is a veth pair with a token bucket at both ends. So all
of it ends with the machines, and the host has none of it.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hpctrain.errors import LabError
from hpctrain.lab import machines
from hpctrain.lab.requirements import PATH
from hpctrain.lab.spec import HEAD, MANAGEMENT, SPINE, SWITCHES, LabSpec

MANAGEMENT_MBIT = 1000
TIMEOUT_S = 30.0
FIRST_TABLE = 100
"""Routing table of rail 0 on every node; those of the other rails follow."""


@dataclass(frozen=True)
class Link:
    """A cable between a machine and a switch.

    Args:
        machine: the one end.
        interface: its name there.
        switch: the other end, a bridge.
        address: of the interface.
        mbit: rate each way, Mbit/s.
        rail: the rail that it is of; None for management.
    """

    machine: str
    interface: str
    switch: str
    address: str
    mbit: int
    rail: int | None = None

    @property
    def port(self) -> str:
        """Name of the switch's end."""
        return f"{self.machine}-{self.interface}"

    def __str__(self) -> str:
        return f"{self.machine}:{self.interface}"


@dataclass(frozen=True)
class Traffic:
    """Bytes that an interface has sent and received, with Ethernet, IP and TCP headers, of a large segment once."""

    sent: int = 0
    received: int = 0

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(self.sent - other.sent, self.received - other.received)


@dataclass(frozen=True)
class LinkState:
    """How a link is now.

    Args:
        up: whether it has a carrier.
        mbit: rate that it is limited to, Mbit/s; 0 where it has no limit.
    """

    up: bool
    mbit: int

    def __str__(self) -> str:
        return f"{self.mbit} Mbit/s" if self.up else "down"


def links(spec: LabSpec, machine: str) -> list[Link]:
    """Those that a machine has."""
    if machine == SPINE:
        return [_rail(spec, SPINE, f"leaf{r}", spec.spine_mbit, r) for r in range(spec.rails)]
    management = Link(machine, MANAGEMENT, "mgmt", spec.address(machine), MANAGEMENT_MBIT)
    if machine == HEAD:
        return [management]
    return [management, *(_rail(spec, machine, name, spec.rail_mbit, r) for r, name in enumerate(spec.rail_names))]


def _rail(spec: LabSpec, machine: str, interface: str, mbit: int, rail: int) -> Link:
    return Link(machine, interface, f"leaf{rail}", spec.rail_address(machine, rail), mbit, rail)


def build(spec: LabSpec) -> None:
    """Switches, and the links of the spine and the head; a node's are plugged in when it comes up.

    Raises:
        LabError: the system refuses a part.
    """
    switches = ("mgmt", *(f"leaf{r}" for r in range(spec.rails)))
    _ip(spec, SWITCHES, [f"link add name {switch} type bridge forward_delay 0 stp_state 0" for switch in switches])
    _ip(spec, SWITCHES, [f"link set {switch} up" for switch in switches])
    for machine in (SPINE, HEAD):
        plug(spec, machine)


def plug(spec: LabSpec, machine: str) -> None:
    """Make the links that a machine lacks, and set all of its links as they should be.

    Raises:
        LabError: the machine is not up, or the system refuses a part.
    """
    first = machines.init(spec, machine)
    if not first:
        raise LabError(f"the machine {machine} of the lab is not up: {machines.last_words(spec.log(machine))}")
    present = interfaces(spec, machine)
    missing = [link for link in links(spec, machine) if link.interface not in present]
    if missing:
        # The network of a machine that was killed may take a moment to end, and its links with it.
        _ip(spec, SWITCHES, [f"link del {link.port}" for link in missing], careless=True)
        _ip(spec, SWITCHES, [_cable(link, first.pid) for link in missing])
    configure(spec, machine)


def configure(spec: LabSpec, machine: str) -> None:
    """Addresses, routes, rates and states of a machine's links, whatever they were."""
    wanted = links(spec, machine)
    _ip(spec, SWITCHES, [f"link set {link.port} master {link.switch} up" for link in wanted])
    if machine in spec.node_names:
        _ip(spec, machine, [f"rule del pref {_table(link)}" for link in wanted if link.rail is not None], careless=True)
    _ip(spec, machine, [line for link in wanted for line in _end(spec, link)])
    shape(spec, wanted)


def shape(spec: LabSpec, slow: Iterable[Link], mbit: int | None = None) -> None:
    """Limit what links take each way to their rate, or to another one."""
    by_machine: dict[str, list[str]] = {}
    for link in slow:
        for machine, device in ((link.machine, link.interface), (SWITCHES, link.port)):
            line = f"qdisc replace dev {device} root tbf rate {mbit or link.mbit}mbit burst 128kb limit 512kb"
            by_machine.setdefault(machine, []).append(line)
    for machine, lines in by_machine.items():
        _run(spec, machine, ["tc", "-batch", "-"], lines)


def unplug(spec: LabSpec, cut: Iterable[Link]) -> None:
    """Take the carrier from links, as a pulled cable does: machines keep addresses and routes, and nothing arrives."""
    _ip(spec, SWITCHES, [f"link set {link.port} down" for link in cut])


def interfaces(spec: LabSpec, machine: str) -> dict[str, Traffic]:
    """Interfaces of a machine but the loopback, with what went through them; empty if it is not up."""
    first = machines.init(spec, machine)
    try:
        lines = Path(f"/proc/{first.pid}/net/dev").read_text().splitlines()[2:] if first else []
    except OSError:  # it ended just now
        lines = []
    return {name: traffic for name, traffic in map(parse, lines) if name != "lo"}


def parse(line: str) -> tuple[str, Traffic]:
    """Interface and bytes of a line of `/proc/net/dev`: name, eight numbers about receiving, eight about sending."""
    name, _, numbers = line.partition(":")
    fields = numbers.split()
    return name.strip(), Traffic(sent=int(fields[8]), received=int(fields[0]))


def counters(spec: LabSpec) -> dict[str, dict[str, Traffic]]:
    """Bytes by machine and interface, of nodes and spine that are up, since they came up.

    What the spine has sent is what has crossed from one rail to another. (It also receives, and leaves unanswered, the
    questions that nodes of a rail ask all others of it.)
    """
    check(spec)
    found = {machine: interfaces(spec, machine) for machine in (*spec.node_names, SPINE)}
    return {machine: dict(sorted(traffic.items())) for machine, traffic in found.items() if traffic}


def link_states(spec: LabSpec) -> dict[str, dict[str, LinkState]]:
    """By node and rail, and by spine and leaf; of machines that are up. Empty for a lab without rails."""
    if not spec.rails:
        return {}
    flags = {row["ifname"]: row["flags"] for row in json.loads(_run(spec, SWITCHES, ["ip", "-json", "link"], []))}
    rates = {
        row["dev"]: row["options"]["rate"] * 8 // 1_000_000
        for row in json.loads(_run(spec, SWITCHES, ["tc", "-json", "qdisc"], []))
        if row["kind"] == "tbf"
    }
    return {
        name: {
            link.interface: LinkState("LOWER_UP" in flags[link.port], rates.get(link.port, 0))
            for link in links(spec, name)
            if link.rail is not None and link.port in flags
        }
        for name in (*spec.node_names, SPINE)
        if machines.init(spec, name)
    }


def amiss(spec: LabSpec) -> list[str]:
    """Links of machines that are up, and are not as they were when the lab came up, in words."""
    states = link_states(spec)
    return [
        f"{link} is {state if not state.up else f'at {state}'}"
        for machine, found in states.items()
        for link in links(spec, machine)
        if (state := found.get(link.interface)) and state != LinkState(True, link.mbit)
    ]


def check(spec: LabSpec) -> None:
    """Raises LabError if the lab has no rails."""
    if not spec.rails:
        raise LabError(f"the lab in {spec.folder} has no rails; bring one up with hpctrain lab up --rails 4.")


def _cable(link: Link, pid: int) -> str:
    return f"link add name {link.port} type veth peer name {link.interface} netns {pid}"


def _end(spec: LabSpec, link: Link) -> Iterator[str]:
    """A machine's end. What comes from a node's rail leaves by that rail, also what is meant for another one."""
    yield f"link set {link.interface} up"
    yield f"addr replace {link.address}/24 dev {link.interface}"
    if link.rail is not None and link.machine != SPINE:
        network, table = link.address.rpartition(".")[0], _table(link)
        yield f"route replace {network}.0/24 dev {link.interface} table {table}"
        yield f"route replace default via {spec.rail_address(SPINE, link.rail)} dev {link.interface} table {table}"
        yield f"rule add from {link.address} lookup {table} pref {table}"


def _table(link: Link) -> int:
    assert link.rail is not None
    return FIRST_TABLE + link.rail


def _ip(spec: LabSpec, machine: str, lines: list[str], careless: bool = False) -> None:
    if lines:
        _run(spec, machine, ["ip", *(["-force"] if careless else []), "-batch", "-"], lines, check=not careless)


def _run(spec: LabSpec, machine: str, command: list[str], lines: list[str], check: bool = True) -> str:
    """A program in the network of a machine, with lines to read; gives what it says."""
    first = machines.init(spec, machine)
    if not first:
        raise LabError(f"the machine {machine} of the lab is not up; replace the lab with hpctrain lab up.")
    done = subprocess.run(
        ["nsenter", f"--net=/proc/{first.pid}/ns/net", "--", *command],
        input="\n".join(lines) + "\n",
        env={"PATH": PATH},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    if check and done.returncode:
        said = (done.stderr.strip() or "nothing").replace("\n", "; ").rstrip(".")
        raise LabError(f"{command[0]} cannot set up the network of {machine}: it said {said!r}.")
    return done.stdout
