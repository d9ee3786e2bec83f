"""The daemons of a lab: what starts each one, and how one sees that it serves."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hpctrain.errors import LabError
from hpctrain.lab import machines
from hpctrain.lab.spec import HEAD, LabSpec

READY_TIMEOUT_S = 30.0
UNSEEN_S = 5.0
"""How long a daemon may be unseen without a break. While it forks itself into one, looks through /proc can miss it."""

PROGRAMS = ("munged", "mariadbd", "slurmdbd", "slurmctld", "slurmd", "slurmstepd")

SCHEMAS = (Path("/usr/share/mysql/mysql_system_tables.sql"), Path("/usr/share/mariadb/mysql_system_tables.sql"))


@dataclass(frozen=True)
class Daemon:
    """One program on one machine.

    Args:
        machine: where it runs.
        command: program and arguments; it may turn itself into a daemon.
        ready: whether it serves.
    """

    machine: str
    command: tuple[str, ...]
    ready: Callable[[], bool]

    @property
    def program(self) -> str:
        return self.command[0]

    def __str__(self) -> str:
        return f"{self.program} on {self.machine}"

    def runs(self, spec: LabSpec) -> bool:
        return self.program in machines.programs(spec, self.machine)

    def start(self, spec: LabSpec) -> None:
        """Start it and wait until it serves.

        Raises:
            LabError: it ended or does not serve in time, with what its log says.
        """
        machines.run(spec, self.machine, self.command, machines.environment(spec))
        begun = seen = time.monotonic()
        while not self.ready():
            now = time.monotonic()
            log = spec.log(self.program if self.machine == HEAD else f"{self.program}.{self.machine}")
            if self.runs(spec):
                seen = now
            if now - seen > UNSEEN_S:
                raise LabError(f"{self} ended at once: {machines.last_words(log)}")
            if now - begun > READY_TIMEOUT_S:
                raise LabError(f"{self} does not serve after {READY_TIMEOUT_S:g} s: {machines.last_words(log)}")
            time.sleep(0.02)


def of_head(spec: LabSpec) -> Iterator[Daemon]:
    """In the order in which they need each other."""
    yield Daemon(HEAD, _munged(spec), lambda: _answers(spec.munge_socket))
    if spec.accounting:
        yield Daemon(HEAD, _mariadbd(spec), lambda: _answers(spec.database_socket))
        yield Daemon(HEAD, ("slurmdbd",), lambda: machines.listens(spec, HEAD, spec.accounting_port))
    yield Daemon(HEAD, ("slurmctld",), lambda: machines.listens(spec, HEAD, spec.controller_port))


def of_node(spec: LabSpec, name: str) -> Daemon:
    """A slurmd that misses the controller backs off for minutes, so the controller comes first."""
    return Daemon(name, ("slurmd", "-N", name), lambda: machines.listens(spec, name, spec.node_port(name)))


def make_database(spec: LabSpec) -> None:
    """The system tables of MariaDB, without its users, help texts and time zones, which nobody here asks for.

    Raises:
        LabError: MariaDB does not make them.
    """
    schema = next((path for path in SCHEMAS if path.exists()), None)
    if schema is None:
        raise LabError(f"MariaDB's {SCHEMAS[0].name} is not in {SCHEMAS[0].parent}; reinstall mariadb-server-core.")
    (spec.database / "data" / "mysql").mkdir(parents=True)
    log = spec.log("mariadb-bootstrap")
    with log.open("w") as output:
        done = subprocess.run(
            [*_mariadbd(spec), "--bootstrap"],
            input=f"USE mysql;\n{schema.read_text()}",
            env=machines.environment(spec),
            stdout=output,
            stderr=output,
            text=True,
            timeout=READY_TIMEOUT_S,
        )
    if done.returncode:
        raise LabError(f"MariaDB cannot make its tables: {machines.last_words(log)}")


def _munged(spec: LabSpec) -> tuple[str, ...]:
    # By force: it refuses folders below one that others may not enter, such as /root.
    return (
        *("munged", "--force", "--num-threads=2"),
        f"--key-file={spec.etc}/munge.key",
        f"--socket={spec.munge_socket}",
        f"--pid-file={spec.run}/munged.pid",
        f"--log-file={spec.log('munged')}",
        f"--seed-file={spec.run}/munged.seed",
    )


def _mariadbd(spec: LabSpec) -> tuple[str, ...]:
    """Small, without network, and careless: the data lives no longer than the lab."""
    return (
        *("mariadbd", "--no-defaults", f"--user={spec.user}", "--skip-networking", "--skip-grant-tables"),
        f"--datadir={spec.database}/data",
        f"--socket={spec.database_socket}",
        f"--pid-file={spec.run}/mariadbd.pid",
        "--performance-schema=off",
        "--innodb-buffer-pool-size=64M",
        "--innodb-log-file-size=4M",
        "--innodb-data-file-path=ibdata1:4M:autoextend",
        "--innodb-flush-method=nosync",
        "--innodb-flush-log-at-trx-commit=0",
        "--innodb-doublewrite=0",
        "--innodb-lock-wait-timeout=900",
    )


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(str(path)) == 0
