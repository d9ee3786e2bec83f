"""A lab comes up, is made whole again, and goes down without a trace."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from hpctrain.errors import LabError
from hpctrain.lab import daemons, fabric, folder, machines, nodes, railbind, requirements
from hpctrain.lab.client import Cluster
from hpctrain.lab.spec import HEAD, LabSpec

DEFAULT_FOLDER = Path("/var/tmp/hpctrain-lab")

FIRST_PORT, LAST_PORT = 20000, 32000
"""Below the range that the kernel gives to clients."""

JOB_IDS = 50_000_000
"""How many of Slurm's 67 million job ids the first job of a lab is chosen from, by the clock."""

SAME = ("nodes", "gpus", "cpus", "accounting", "rails")
RATES = ("rail_mbit", "spine_mbit")
"""What a running lab must agree in with one that is asked for."""


@dataclass(frozen=True)
class Raised:
    """What `up` did.

    Args:
        cluster: the lab, ready.
        found: what was there before, in words; empty if there was nothing.
        seconds: until all nodes were usable.
        lacks: why it has no rails though some were asked for, as a sentence; empty if it is as wanted.
    """

    cluster: Cluster
    found: str
    seconds: float
    lacks: str = ""


def up(spec: LabSpec) -> Raised:
    """Bring a lab up, or complete one that has lost nodes, or replace one that has lost its head.

    Args:
        spec: what is wanted; ports, memory and the like are chosen here. Rails are left out where the machine does not
            give them.

    Raises:
        LabError: the machine lacks something, the folder is not a lab's, another lab runs in it, or a daemon fails.
    """
    requirements.check(spec.accounting)
    begun = time.monotonic()
    lacks = (requirements.obstacle_to_rails() if spec.rails else None) or ""
    if lacks:
        spec = replace(spec, rails=0)
    folder.claim(spec.folder)
    with folder.locked(spec.folder):
        present = folder.load(spec.folder)
        core = lost_core(present) if present else ""
        if present and not core:
            _agree(present, spec)
            lost = nodes.lost(present)
            nodes.revive(present, lost)
            found = f"it ran, without {' and '.join(lost)}" if lost else "it runs already"
            return Raised(Cluster(present), found, time.monotonic() - begun, lacks)
        found = ""
        if present:
            machines.stop(present, present.everything)
            found = f"its {core} was dead, so it was made anew and its jobs are lost"
        cluster = _make(_chosen(spec))
    return Raised(cluster, found, time.monotonic() - begun, lacks)


def down(where: Path) -> bool:
    """End everything in a lab and remove its folder.

    Returns:
        Whether there was one.

    Raises:
        LabError: the folder is not a lab's, or something in it cannot be ended.
    """
    if not where.exists():
        return False
    folder.check_owner(where)
    with folder.locked(where):
        present = folder.load(where)
        if present is None and any(where.iterdir()):
            raise LabError(f"{where} holds no lab, so it is left as it is; name the lab's folder with --folder.")
        if present:
            machines.stop(present, present.everything)
        folder.remove(where)
    return True


@contextmanager
def cluster(spec: LabSpec) -> Iterator[Cluster]:
    """A lab for the length of a block."""
    try:
        yield up(spec).cluster
    finally:
        down(spec.folder)


def attach(where: Path) -> Cluster:
    """The lab that runs in a folder.

    Raises:
        LabError: there is none, or its head is dead.
    """
    present = folder.load(where)
    if present is None:
        raise LabError(f"no lab runs in {where}; bring one up with hpctrain lab up, or name another with --folder.")
    folder.check_owner(where)
    if lost := lost_core(present):
        raise LabError(f"the {lost} of the lab in {where} is dead; replace the lab with hpctrain lab up.")
    return Cluster(present)


def lost_core(spec: LabSpec) -> str:
    """What a lab cannot be mended without, and has lost: its `head`, or its `network`; empty if it has lost neither."""
    running = machines.programs(spec, HEAD)
    if not all(daemon.program in running for daemon in daemons.of_head(spec)):
        return "head"
    return "" if all(machines.init(spec, name) for name in spec.network) else "network"


def _make(spec: LabSpec) -> Cluster:
    """Files, machines, daemons. On failure nothing runs, and the logs stay."""
    folder.write(spec)
    made = Cluster(spec)
    try:
        for name in spec.everything:
            machines.start(spec, name)
        if spec.rails:
            railbind.build(spec)
            fabric.build(spec)
        if spec.accounting:
            daemons.make_database(spec)
        for daemon in daemons.of_head(spec):
            daemon.start(spec)
        nodes.revive(spec, spec.node_names)
    except BaseException:
        machines.stop(spec, spec.everything)
        raise
    return made


def _chosen(spec: LabSpec) -> LabSpec:
    """The spec with what depends on the machine and the moment."""
    return replace(
        spec,
        user=requirements.user(),
        memory_mb=requirements.memory_mb() // spec.nodes,
        first_port=free_ports(len(spec.ports)),
        first_job=1 + int(time.time()) % JOB_IDS,
    )


def _agree(present: LabSpec, wanted: LabSpec) -> None:
    same = (*SAME, *RATES) if present.rails else SAME
    differing = [name for name in same if getattr(present, name) != getattr(wanted, name)]
    if differing:
        said = " and ".join(f"{name}={getattr(present, name)}, not {getattr(wanted, name)}" for name in differing)
        raise LabError(f"a lab runs in {present.folder} with {said}; end it with hpctrain lab down, or use --folder.")


def free_ports(count: int) -> int:
    """The first of `count` consecutive TCP ports that nobody uses."""
    for _ in range(200):
        first = random.SystemRandom().randrange(FIRST_PORT, LAST_PORT - count)
        if all(_free(port) for port in range(first, first + count)):
            return first
    raise LabError(f"there are no {count} free TCP ports in a row between {FIRST_PORT} and {LAST_PORT}; free some.")


def _free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True
