"""The health step of a job, before its ranks train: run by the batch script.

    python -m hpctrain.launch.health.step place FOLDER LIFE                         on the first node
    srun … python -m hpctrain.launch.health.step measure LIFE DEVICE TIMEOUT_S      on every device of every node
    python -m hpctrain.launch.health.step decide RUN LIFE JOB NODES PER_NODE        on the first node

FOLDER is that of the submission, LIFE a folder of this life of the job. `place` says where each rank of the measurement
is, so that it measures its own GPU, over its own rail. `decide` keeps what was found in the run folder. Nodes that it
finds slow or broken are not used again by the run: where the job has enough others, it prints srun's flag that leaves
them out; where it has not, the job goes back into the queue with them excluded, and `REQUEUED` is its exit status.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from hpctrain.cluster.hostlist import expand, fold
from hpctrain.errors import HpctrainError
from hpctrain.launch.health.judge import Device, Pair, Verdict, judge, shown
from hpctrain.launch.health.place import place
from hpctrain.launch.health.record import STOPPED, Record, end_of, read, write
from hpctrain.launch.life.identity import ALONE, Identity, detect
from hpctrain.launch.life.stop import SIGNALS
from hpctrain.launch.place import badnodes
from hpctrain.launch.slurm import exclude
from hpctrain.launch.slurm.client import SlurmError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from hpctrain.launch.proof.finding import Finding

REQUEUED = 10
"""Exit status: the job is back in the queue."""
RECORD = "health.json"
"""In the run folder: what the latest life of the job found."""

LINK_S = 120.0
"""Of one exchange between two ranks."""

BROKEN = ("NIC", "device", "GPU", "machine", "locked memory")
"""What the proof of a training would stop for, and is the node's fault."""
UNJOINED = ("NIC", "device")
"""Without these nobody need wait for its links."""


def measure(life: Path, device: str, timeout_s: float, env: Mapping[str, str]) -> int:
    """One rank of the step, on the place that ranks of its number have. What it found is on disk before it waits."""
    from hpctrain.launch.health.measure import alone, lines, links
    from hpctrain.launch.place.bind import bind
    from hpctrain.launch.rank.bootstrap import process_group, settle

    identity = detect(env) or ALONE
    for number in SIGNALS:
        signal.signal(number, lambda *_: _stopped(life))
    bound, at = settle(identity, device, bind(identity))  # type: ignore[arg-type]
    samples, wrong = alone(at)
    host = env.get("SLURMD_NODENAME") or socket.gethostname()
    rows = _broken(identity, bound, at)
    broken = "; ".join(filter(None, [wrong, *(f"{row.what}: {row.found}" for row in rows)]))
    record = Record(life, identity.rank, Device(host, identity.local_rank, at.type, _name(at), samples, broken))
    interface = os.environ.pop("GLOO_SOCKET_IFNAME", "")  # a rail that is broken must not keep ranks from lining up
    with process_group(identity, life, device, timeout_s, proves=False, bound=bound) as world:  # type: ignore[arg-type]
        nodes = joined(world.store, identity, not any(row.what in UNJOINED for row in rows))
        members = [node * identity.local_world + local for node in nodes for local in range(identity.local_world)]
        groups = lines(at, interface, members, LINK_S)
        for met in links(identity.rank, identity.local_world, nodes, at, record.begin, groups):
            record.add(met)
        record.end()
    return 0


def joined(store: Store, me: Identity, mine: bool) -> list[int]:
    """Numbers of the nodes whose ranks all have their NIC: only these measure links. Collective.

    Args:
        mine: whether this rank has.
    """
    store.set(f"joined/{me.rank}", str(int(mine)))
    if me.rank == 0:
        said = store.multi_get([f"joined/{rank}" for rank in range(me.world)])
        nodes = range(me.world // me.local_world)
        good = [n for n in nodes if all(int(w) for w in said[n * me.local_world : (n + 1) * me.local_world])]
        store.set("joined", json.dumps(good))
    found: list[int] = json.loads(store.get("joined"))
    return found


def _broken(identity: Identity, bound: Any, at: Any) -> list[Finding]:
    """What of this rank's place is broken."""
    from hpctrain.launch.place.device import names_of
    from hpctrain.launch.proof.compare import of_rank
    from hpctrain.launch.proof.finding import Rank
    from hpctrain.launch.proof.witness import look

    job, binding = bound or (None, None)
    found = look(identity, job, binding, *names_of(at))
    rows = of_rank(Rank(identity.rank, binding, found, identity.local_world, identity.world))
    return [row for row in rows if row.stops and row.what in BROKEN]


def _stopped(life: Path) -> None:
    """The job is to end: ranks that are missing then are not broken."""
    (life / STOPPED).touch()
    os._exit(0)


def _name(place: Any) -> str:
    import torch

    if place.type != "cuda":
        return "CPU"
    found = torch.cuda.get_device_properties(place)
    return f"{found.name} {found.uuid}"


def decide(run: Path, life: Path, job: str, nodes: int, per_node: int, hosts: Sequence[str]) -> int:
    """What becomes of the job; on stdout is what srun has to leave out.

    Args:
        run: run folder.
        job: as scontrol names it.
        nodes: that the layout uses; what there are more are spares.
        hosts: of the allocation.
    """
    spares = len(hosts) - nodes
    if badnodes.leave(run, job, hosts, spares):
        print(f"health: the job is back in the queue, without {fold(badnodes.known(run), sort=True)}", file=sys.stderr)
        return REQUEUED
    if (life / STOPPED).exists():
        print("health: the job was asked to stop meanwhile: nothing is concluded", file=sys.stderr)
        return 0
    left = read(life)
    verdict = judge(left.devices, left.pairs, hosts, per_node, hung=left.hung)
    verdict = replace(verdict, notes=(*verdict.notes, *left.notes))
    rows = [_row(device, left.pairs) for device in left.devices]
    write(run / RECORD, {"job": job, "hosts": list(hosts), **verdict.plain(), "devices": rows})
    for line in summary(verdict, len(left.devices), hosts):
        print(line, file=sys.stderr)
    if verdict.bad:
        badnodes.remember(run, verdict.bad)
    out = badnodes.held(badnodes.known(run), hosts)
    if len(out) <= spares:
        print(f"--exclude={fold(out)}" if out else "")
        return 0
    exclude.requeue_without(job, badnodes.known(run))
    print(f"health: the job is back in the queue, without {fold(badnodes.known(run), sort=True)}", file=sys.stderr)
    return REQUEUED


def summary(verdict: Verdict, devices: int, hosts: Sequence[str]) -> Iterable[str]:
    """Lines for the log."""
    parts = [f"{metric} {shown(metric, value)}" for metric, value in verdict.medians.items()]
    yield f"health: {devices} devices of {len(hosts)} nodes; medians: {', '.join(parts) or 'none'}"
    yield from (f"health: {host} is left out: {why}" for host, why in verdict.bad.items())
    yield from (f"health: {note}" for note in verdict.notes)


def _row(device: Device, pairs: Sequence[Pair]) -> dict[str, Any]:
    """A device for people: medians of what it measured."""
    found = {name: median(values) for name, values in device.samples.items()}
    for metric in ("local", "rail"):
        mine = [median(p.samples) for p in pairs if p.metric == metric and end_of(device) in (p.a, p.b)]
        found |= {metric: median(mine)} if mine else {}
    units = {name: shown(name, value) for name, value in found.items()}
    return {"host": device.host, "local": device.local, "name": device.name, **units, "wrong": device.wrong}


def main(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """The step of the batch script."""
    try:
        if argv[0] == "measure":
            return measure(Path(argv[1]), argv[2], float(argv[3]), env)
        if argv[0] == "place":
            print(place(Path(argv[1]), Path(argv[2]), env))
            return 0
        run, life, job, nodes, per_node = argv[1:6]
        return decide(Path(run), Path(life), job, int(nodes), int(per_node), expand(env["SLURM_JOB_NODELIST"]))
    except SlurmError as error:
        print(f"error: {error}", file=sys.stderr)
        return badnodes.REFUSED
    except badnodes.BadNodes as error:
        print(f"error: {error}", file=sys.stderr)
        return badnodes.REFUSED
    except HpctrainError as error:
        print(f"warning: health: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
