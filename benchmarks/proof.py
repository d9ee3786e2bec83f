"""How long 16 ranks take to meet, with and without the proof that each is on its place, once their processes are up.

Ranks are forked from a warm process, so nothing is imported meanwhile. They stand for four hosts, all of them this
machine, whose rank table has four CPUs' worth of places on each. Measured is the slowest rank's time from its first
look for rank 0 to its verdict, which rank 0 gives once it has read and judged all arrivals and has written `proof.json`
and `rank_table.json`. The two take turns.

The hosts have addresses for names. A resolver whose request is lost waits 5 s before it asks again, and names that
nobody knows once made these times 10 to 16 s. What cannot be helped from here: torch's TCPStore asks for the name of
each process that connects (getnameinfo, in vain for addresses that /etc/hosts has), rank 0's of all of them, one after
the other. Times of 5 s and more are those of a name server that loses requests.

    python -m benchmarks.proof [--rounds 9] [--ranks 16]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from hpctrain.cluster.node import Gpu, Nic, Node, Numa
from hpctrain.config.schema import RunConfig
from hpctrain.launch.life.identity import TABLE_VARIABLE, Identity
from hpctrain.launch.local.zygote import Zygote
from hpctrain.launch.place.arrange import arrange
from hpctrain.launch.place.jobplan import JobPlan
from hpctrain.launch.place.machine import allowed_cpus
from hpctrain.launch.slurm.profile import site
from hpctrain.launch.slurm.rules import Slurm

HOSTS = [f"127.0.1.{i}" for i in range(1, 5)]
"""Addresses, so that no resolver is asked for names that it does not know."""


def body(folder: str, table: str, proves: bool) -> dict[str, float]:
    """Seconds of one rank, by phase."""
    import torch.distributed as dist

    from hpctrain.launch.rank.bootstrap import process_group

    rank, world = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    per_host = world // len(HOSTS)
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    os.environ |= {"SLURMD_NODENAME": HOSTS[rank // per_host], TABLE_VARIABLE: table, "HPCTRAIN_RAILS": "lo"}
    os.environ |= {"HPCTRAIN_GPUS": ",".join(map(str, range(per_host)))}
    me = Identity(rank, world, rank % per_host, per_host, "srun", "bench")
    with process_group(me, Path(folder), "cpu", 60.0, proves=proves) as made:
        assert bool(made.proof) == (proves and rank == 0)
        dist.barrier()  # nobody leaves while others connect to it
        return made.seconds


def rank_table(ranks: int) -> str:
    """Text of the table of a job on hosts like this machine."""
    cpus, per_host = allowed_cpus(), ranks // len(HOSTS)
    gpus = tuple(Gpu(i, uuid=str(i), numa=0, cpus=cpus) for i in range(per_host))
    node = Node(gpus=gpus, nics=(Nic("lo", interface="lo", verbs=False, role="rail"),), numas=(Numa(0, cpus),))
    tree = {"cluster": {"nodes": len(HOSTS), "gpus_per_node": per_host}, "parallel": {"tp": per_host}}
    plan = JobPlan((RunConfig.model_validate({**tree, "model": {"heads": 16, "kv_heads": 16}}),), site("lab").profile)
    return arrange(plan, 0, ("7", 0), HOSTS, node, None, Slurm()).job.dump()


def measure(zygote: Zygote, ranks: int, rounds: int) -> dict[str, Any]:
    """Seconds of the slowest rank of every round."""
    found: dict[str, list[float]] = {"with proof": [], "without": []}
    with tempfile.TemporaryDirectory(prefix="hpctrain-proof-") as made:
        table = Path(made) / "table.json"
        table.write_text(rank_table(ranks))
        for at in range(rounds):
            for name in sorted(found, reverse=bool(at % 2)):
                folder = str(Path(made) / f"{at}-{name}")
                seconds = zygote.run(body, ranks, folder, str(table), name == "with proof")
                found[name].append(max(one["rendezvous"] for one in seconds))
    medians = {name: statistics.median(values) for name, values in found.items()}
    return {
        "ranks": ranks,
        "seconds": found,
        "medians": medians,
        "proof_s": statistics.median(a - b for a, b in zip(found["with proof"], found["without"])),
        "load": os.getloadavg()[0],
        "under_1_s": medians["with proof"] < 1.0,
    }


def main() -> None:
    """Print the result as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--ranks", type=int, default=16)
    args = parser.parse_args()
    zygote = Zygote(["torch", "torch.distributed", "hpctrain.launch.rank.bootstrap"])
    try:
        print(json.dumps(measure(zygote, args.ranks, args.rounds), indent=1))
    finally:
        zygote.close()


if __name__ == "__main__":
    main()
