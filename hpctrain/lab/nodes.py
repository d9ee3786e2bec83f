"""Nodes of a running lab: which are lost, how they come back, how they fail on purpose, and how they are."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from hpctrain.errors import LabError
from hpctrain.lab import daemons, fabric, folder, machines, processes
from hpctrain.lab.client import Cluster
from hpctrain.lab.spec import LabSpec

USABLE_TIMEOUT_S = 60.0


def lost(spec: LabSpec) -> list[str]:
    """Nodes on which no slurmd runs."""
    return [name for name in spec.node_names if not daemons.of_node(spec, name).runs(spec)]


def revive(spec: LabSpec, names: Sequence[str]) -> None:
    """Start what nodes lack, and wait until Slurm uses them again.

    Raises:
        LabError: one does not start, or Slurm does not take it back; with what its slurmd said.
    """
    for name in names:
        if not machines.init(spec, name):
            machines.start(spec, name)
        daemon = daemons.of_node(spec, name)
        if not daemon.runs(spec):
            if spec.rails:
                fabric.plug(spec, name)
            daemon.start(spec)
    if names:
        await_usable(spec, names)


def start_node(spec: LabSpec, name: str) -> None:
    """Bring one node back.

    Raises:
        LabError: there is no such node, or it does not come back.
    """
    known(spec, name)
    with folder.locked(spec.folder):
        revive(spec, [name])


def kill_node(spec: LabSpec, name: str, slurmd_only: bool = False) -> None:
    """End a node with everything on it, as a power cut would; or only its slurmd, under which its jobs live on.

    Raises:
        LabError: there is no such node, or something of it cannot be ended.
    """
    known(spec, name)
    with folder.locked(spec.folder):
        if not slurmd_only:
            machines.stop(spec, [name])
        elif not processes.kill(machines.programs(spec, name).get("slurmd", [])):
            raise LabError(f"slurmd on {name} does not end; see {spec.log(f'slurmd.{name}')}.")


def status(cluster: Cluster) -> dict[str, Any]:
    """The lab in plain data: where it is, what runs on each machine, and Slurm's word for each node."""
    spec, states = cluster.spec, cluster.node_states()
    jobs = cluster.run(["squeue", "--noheader", "--array", "--format=%i"]).stdout.split()
    rows = []
    for name in spec.machines:
        first = machines.init(spec, name)
        running = machines.programs(spec, name) if first else {}
        state = states.get(name, "up") if first else "dead"
        served = sorted(set(running) & set(daemons.PROGRAMS))
        rows.append({"name": name, "state": state, "daemons": served, "address": spec.address(name)})
    return {
        "folder": str(spec.folder),
        "slurm_conf": str(spec.slurm_conf),
        "slurm": cluster.run(["sinfo", "--version"]).stdout.strip(),
        "nodes": spec.nodes,
        "gpus_per_node": spec.gpus,
        "accounting": spec.accounting,
        "rails": spec.rails,
        "rail_mbit": spec.rail_mbit,
        "spine_mbit": spec.spine_mbit,
        "amiss": fabric.amiss(spec),
        "jobs": len(jobs),
        "machines": rows,
    }


def known(spec: LabSpec, name: str) -> None:
    """Raises LabError if there is no such node."""
    if name not in spec.node_names:
        raise LabError(f"the lab has no node {name!r}; it has {', '.join(spec.node_names)}.")


def await_usable(spec: LabSpec, names: Sequence[str]) -> None:
    """Wait until Slurm uses nodes.

    Raises:
        LabError: it does not take one back; with what its slurmd said.
    """
    deadline = time.monotonic() + USABLE_TIMEOUT_S
    while True:
        states = Cluster(spec).node_states()
        waiting = [name for name in names if not _usable(states.get(name, "unknown"))]
        if not waiting:
            return
        if time.monotonic() > deadline:
            name = waiting[0]
            raise LabError(
                f"node {name} is {states.get(name, 'unknown')} for Slurm after {USABLE_TIMEOUT_S:g} s: "
                f"{machines.last_words(spec.log(f'slurmd.{name}'))}"
            )
        time.sleep(0.05)


def _usable(state: str) -> bool:
    """A star means that the node does not answer. A drained node is as its administrator wants it."""
    return not state.endswith("*") and not state.startswith(("down", "unknown", "future"))
