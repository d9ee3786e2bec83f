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

MAX_NODES, MAX_GPUS = 64, 16

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
        accounting: whether slurmdbd and a MariaDB of its own run, so that `sacct` answers.
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
    accounting: bool = False
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
    def node_names(self) -> tuple[str, ...]:
        return tuple(f"n{i}" for i in range(self.nodes))

    @property
    def machines(self) -> tuple[str, ...]:
        """The head and the nodes: everything that runs in namespaces of its own."""
        return (HEAD, *self.node_names)

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
        """A loopback address that no other machine of this lab, and no other lab, has."""
        high, low = divmod(self.first_port, 256)
        return f"127.{high}.{low}.{10 + self.machines.index(machine)}"

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
