"""Emulated machines: each a process 1 in namespaces of its own, which takes everything on it along when it ends.

Nothing is registered anywhere else: no named namespaces, no mounts that the rest of the system sees. So a lab
that lost any part of itself can still be ended completely.
"""

from __future__ import annotations

import os
import stat
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpctrain.errors import LabError
from hpctrain.lab import processes
from hpctrain.lab.processes import Process
from hpctrain.lab.requirements import PATH
from hpctrain.lab.spec import HEAD, LabSpec

START_TIMEOUT_S = 20.0
TCP_LISTEN = "0A"
NULL_DEVICE = os.makedev(1, 3)

SHARED = ("chrt", "--batch", "0")
"""Before what runs on nodes, which share the CPUs of one machine (`launch.life.process.let_others_finish` says why)."""

# The pid is written by the process that it belongs to, before it becomes anything that has to be ended.
LAUNCH = 'read -r stat </proc/$$/stat && echo "$stat" >"$1.new" && mv "$1.new" "$1" && shift && exec "$@"'


def start(spec: LabSpec, name: str) -> None:
    """Bring one machine up, without any daemon on it.

    Raises:
        LabError: it does not come up, with the reason that the system gave.
    """
    _furnish(spec, name)
    up, log = spec.run / f"{name}.up", spec.log(name)
    up.unlink(missing_ok=True)
    script = ("bash", str(spec.etc / "machine.sh"), name)
    owner = ("--map-current-user", "--keep-caps") if spec.rootless else ()
    isolated = ("unshare", *_namespaces(spec), *owner, "--fork", "--mount-proc", "--kill-child=SIGKILL", *script)
    with log.open("w") as output:
        child = subprocess.Popen(
            ["sh", "-c", LAUNCH, "sh", str(_pid_file(spec, name)), *isolated],
            cwd="/",
            env=environment(spec),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    deadline = time.monotonic() + START_TIMEOUT_S
    while not up.exists():
        if child.poll() is not None or time.monotonic() > deadline:
            raise LabError(f"the machine {name} of the lab did not start: {last_words(log)}")
        time.sleep(0.01)


def init(spec: LabSpec, name: str) -> Process | None:
    """Process 1 of a machine; None if the machine is not up."""
    outer = _outer(spec, name)
    return next(iter(outer.children()), None) if outer else None


def stop(spec: LabSpec, names: Sequence[str]) -> None:
    """End machines, as a power cut would, and wait until nothing of them runs.

    Raises:
        LabError: something of them cannot be ended.
    """
    outers = [outer for name in names if (outer := _outer(spec, name))]
    everything = [process for outer in outers for process in (*outer.children(), outer)]
    if not processes.kill(everything):
        left = ", ".join(str(process.pid) for process in everything if process.alive())
        raise LabError(f"processes {left} of the lab in {spec.folder} do not end; see what they wait for in /proc.")
    for name in names:
        _pid_file(spec, name).unlink(missing_ok=True)


def run(spec: LabSpec, name: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Start a program in the background of a machine; what it prints goes to the log of its name.

    Raises:
        LabError: the machine is not up.
    """
    first = init(spec, name)
    if not first:
        raise LabError(f"the machine {name} of the lab is not up: {last_words(spec.log(name))}")
    owner = ("--preserve-credentials",) if spec.rootless else ()
    enter = ("nsenter", "--target", str(first.pid), *_namespaces(spec), *owner, "--wd=/", "--")
    log = spec.log(Path(command[0]).name if name == HEAD else f"{Path(command[0]).name}.{name}")
    background = ("sh", "-c", '"$@" </dev/null >>"$0" 2>&1 &', str(log), *command)
    shared = SHARED if name in spec.node_names else ()
    subprocess.run([*shared, *enter, *background], env=dict(environment), check=True, timeout=START_TIMEOUT_S)


def programs(spec: LabSpec, name: str) -> dict[str, list[Process]]:
    """What runs on a machine, by the names of the programs; empty if it is not up."""
    first = init(spec, name)
    return processes.sharing_pids_with(first) if first else {}


def listens(spec: LabSpec, name: str, port: int) -> bool:
    """Whether a program on the machine takes connections on a TCP port. Asks the kernel: Slurm logs each probe."""
    first = init(spec, name)
    if not first:
        return False
    lines = [line.split() for line in Path(f"/proc/{first.pid}/net/tcp").read_text().splitlines()[1:]]
    return any(local.endswith(f":{port:04X}") and state == TCP_LISTEN for _, local, _, state, *_ in lines)


def environment(spec: LabSpec) -> dict[str, str]:
    """All that daemons inherit: jobs that ask for a clean environment get nothing of whoever started the lab."""
    return {
        "PATH": PATH,
        "LANG": "C.UTF-8",
        "SLURM_CONF": str(spec.slurm_conf),
        "MYSQL_UNIX_PORT": str(spec.database_socket),
    }


def last_words(log: Path) -> str:
    """The line of a log that says most about why its writer ended, and where the rest is."""
    try:
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    except OSError:
        lines = []
    bad = [line for line in lines if "fatal" in line.lower()] or [line for line in lines if "error" in line.lower()]
    said = (bad or lines or ["nothing"])[-1]
    return f"it said {said.rstrip('.')!r} (see {log})."


def _namespaces(spec: LabSpec) -> tuple[str, ...]:
    """What a machine has for itself. Machines of a plain lab share the network of the host."""
    own = (*(("--user",) if spec.rootless else ()), *(("--net",) if spec.rails else ()))
    return (*own, "--pid", "--mount", "--uts", "--ipc")


def _furnish(spec: LabSpec, name: str) -> None:
    """The folders of a machine, and device nodes in the place of GPUs."""
    home = spec.home(name)
    for part in ("spool", "tmp"):
        (home / part).mkdir(parents=True, exist_ok=True)
    (home / "tmp").chmod(0o1777)
    if name not in spec.node_names:
        return
    for i in range(spec.gpus):
        device = home / f"gpu{i}"
        if spec.rootless:
            device.touch()
        elif not device.exists():
            try:
                os.mknod(device, stat.S_IFCHR | 0o666, NULL_DEVICE)
            except PermissionError as error:
                raise LabError(
                    f"no device node can be made in {home}; the lab needs a root that may, so outside of an "
                    "unprivileged container, or with --gpus 0."
                ) from error


def _outer(spec: LabSpec, name: str) -> Process | None:
    """The process outside of the namespaces that holds a machine."""
    try:
        process = processes.parse(_pid_file(spec, name).read_text())
    except (OSError, ValueError, IndexError):
        return None
    return process if process.alive() else None


def _pid_file(spec: LabSpec, name: str) -> Path:
    return spec.run / f"{name}.pid"
