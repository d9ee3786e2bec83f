"""What a lab is: its size, its timings, where its files lie and which ports it uses. Plain data."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpctrain.errors import LabError

HEAD = "head"
"""The machine of the lab that runs everything but slurmd."""

SWITCHES, SPINE = "switches", "spine"
"""Machines of a lab with rails: the one holds the leaf switches and that of the management network, the other routes
between the leaves."""

MANAGEMENT = "eth0"
"""The interface that head and nodes have beside rails."""

MAX_NODES, MAX_GPUS, MAX_RAILS = 64, 16, 8

MAX_FOLDER = 52
"""Characters. A path of a Unix socket has at most 107, and slurmd makes them some folders further down."""


@dataclass(frozen=True)
class LabSpec:
    """A private Slurm cluster on one machine.

    Args:
        folder: absolute path of the one folder that holds all of it.
        nodes: emulated nodes, `n0`, `n1`, ...
        gpus: emulated GPUs of a node; 0 for none.
        cpus: CPUs that a node says it has. There is no binding, so they may be more than the machine's.
        memory_mb: MiB that a node says it has.
        rails: networks beside that of management, each with a leaf switch that all nodes hang on; 0 for a plain lab,
            whose machines share the network of the host.
        rail_mbit: rate of a node's link to a leaf, Mbit/s = 1e6 bit/s each way.
        spine_mbit: rate of a leaf's link to the spine.
        accounting: whether slurmdbd and a MariaDB of its own run, so that `sacct` answers.
        user: who runs it. Of another one than root the machines are in user namespaces, and have no rails.
        grace_s: seconds that a preempted job has after its warning. Slurm looks every 30 s who has used them up.
        kill_wait_s: seconds between SIGTERM and SIGKILL of a job that has to end.
        requeue_delay_s: seconds a requeued job waits. Slurm ties it to how long a job's credential is valid.
        message_timeout_s: seconds for which a daemon tries to reach another one.
        slurmd_timeout_s: silence after which a node is down. It is noticed by pings, so `message_timeout_s` and up
            to as long again come on top.
        first_port: first of the `ports` consecutive TCP ports of the lab; 0 while they are not chosen.
        first_job: id of the first job. Another in each lab, so that a folder named by job id is not found used.

    Raises:
        LabError: a size out of range, or a folder that cannot stand in Slurm's files.
    """

    folder: Path
    nodes: int = 4
    gpus: int = 4
    cpus: int = 8
    memory_mb: int = 4096
    rails: int = 0
    rail_mbit: int = 200
    spine_mbit: int = 100
    accounting: bool = False
    user: str = "root"
    grace_s: int = 5
    kill_wait_s: int = 2
    requeue_delay_s: int = 5
    message_timeout_s: int = 10
    slurmd_timeout_s: int = 10
    first_port: int = 0
    first_job: int = 1

    def __post_init__(self) -> None:
        for name, value, low, high in (
            ("nodes", self.nodes, 1, MAX_NODES),
            ("gpus", self.gpus, 0, MAX_GPUS),
            ("cpus", self.cpus, 1, 1024),
            ("rails", self.rails, 0, MAX_RAILS),
            ("rail_mbit", self.rail_mbit, 1, 10_000),
            ("spine_mbit", self.spine_mbit, 1, 10_000),
        ):
            if not low <= value <= high:
                raise LabError(f"a lab cannot have {name}={value}: choose from {low} to {high}.")
        text = str(self.folder)
        if not re.fullmatch(r"/[\w./+-]*", text, re.ASCII) or len(text) > MAX_FOLDER:
            raise LabError(
                f"the lab cannot live in {text!r}: Slurm needs an absolute path of at most {MAX_FOLDER} "
                "letters, digits and ._+-/; name another with --folder."
            )

    @property
    def rootless(self) -> bool:
        """Whether it does without root."""
        return self.user != "root"

    @property
    def node_names(self) -> tuple[str, ...]:
        return tuple(f"n{i}" for i in range(self.nodes))

    @property
    def machines(self) -> tuple[str, ...]:
        """The head and the nodes: everything that Slurm runs on."""
        return (HEAD, *self.node_names)

    @property
    def network(self) -> tuple[str, ...]:
        """Machines that are switches."""
        return (SWITCHES, SPINE) if self.rails else ()

    @property
    def everything(self) -> tuple[str, ...]:
        """All that runs in namespaces of its own."""
        return (*self.network, *self.machines)

    @property
    def rail_names(self) -> tuple[str, ...]:
        """Interfaces of a node, `rail0`, `rail1`, ..."""
        return tuple(f"rail{i}" for i in range(self.rails))

    @property
    def ports(self) -> range:
        """Controller, accounting, then one of each node."""
        return range(self.first_port, self.first_port + 2 + self.nodes)

    @property
    def controller_port(self) -> int:
        return self.ports[0]

    @property
    def accounting_port(self) -> int:
        return self.ports[1]

    def node_port(self, name: str) -> int:
        return self.ports[2 + self.node_names.index(name)]

    def address(self, machine: str) -> str:
        """On the management network; in a plain lab a loopback address that no other machine of any lab has."""
        if self.rails:
            return f"10.0.0.{self._host(machine)}"
        high, low = divmod(self.first_port, 256)
        return f"127.{high}.{low}.{self._host(machine)}"

    def rail_address(self, machine: str, rail: int) -> str:
        """Of a node or the spine on one rail. All rails together are 10.1.0.0/16."""
        return f"10.1.{rail}.{254 if machine == SPINE else self._host(machine)}"

    def _host(self, machine: str) -> int:
        return 10 + self.machines.index(machine)

    @property
    def etc(self) -> Path:
        """What the daemons are told."""
        return self.folder / "etc"

    @property
    def run(self) -> Path:
        """Sockets and process ids."""
        return self.folder / "run"

    @property
    def slurm_conf(self) -> Path:
        return self.etc / "slurm.conf"

    @property
    def programs(self) -> Path:
        """Slurm's commands, as they have to be called from outside of a lab with rails."""
        return self.folder / "bin"

    @property
    def railbind(self) -> Path:
        """A library that makes connections leave from the rail they were given; see `railbind.c`."""
        return self.folder / "lib" / "railbind.so"

    @property
    def munge_socket(self) -> Path:
        return self.run / "munge.socket"

    @property
    def database(self) -> Path:
        """Data and socket of MariaDB, for root alone."""
        return self.folder / "db"

    @property
    def database_socket(self) -> Path:
        return self.database / "socket"

    def log(self, name: str) -> Path:
        return self.folder / "log" / f"{name}.log"

    def home(self, machine: str) -> Path:
        """What belongs to one machine alone: device nodes, spool, temporary files."""
        return self.folder / machine

    def to_json(self) -> str:
        return json.dumps(asdict(self) | {"folder": str(self.folder)}, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> LabSpec:
        values: dict[str, Any] = json.loads(text)
        return cls(**values | {"folder": Path(values["folder"])})
