"""The proof of one process: what it reports at the roll call, and on rank 0 the judgement of all.

Made for ranks that a launcher of a cluster started. Those of `hpctrain train` on one machine and of torchrun stay as
they are.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpctrain.launch.life.identity import Identity
from hpctrain.launch.meet.rollcall import Arrival, ahead, away_from
from hpctrain.launch.place.bind import Binding
from hpctrain.launch.place.routes import own_address
from hpctrain.launch.place.tablefile import JobTable
from hpctrain.launch.proof import record, verdict
from hpctrain.launch.proof.probe import Found, probe, torch_facts


class Witness:
    """Of one rank.

    Args:
        folder: run folder, where rank 0 keeps the proof.
        bound: the rank table and what this rank did about it, if there is one.
        wanted: whether a proof is to be made, where one can be.
    """

    def __init__(
        self, identity: Identity, folder: Path, bound: tuple[JobTable, Binding] | None, wanted: bool = True
    ) -> None:
        self._identity, self._folder = identity, folder
        self._job: JobTable | None = bound[0] if bound is not None else None
        self._binding: Binding | None = bound[1] if bound is not None else None
        self._wanted = wanted and identity.source in ("srun", "mpirun")
        self.summary = ""

    def report(self, uuid: str, pci: str) -> dict[str, Any]:
        """What this rank says of itself; empty where no proof is made."""
        if not self._wanted:
            return {}
        found = look(self._identity, self._job, self._binding, uuid, pci)
        return {"planned": self._binding.plain() if self._binding is not None else None, "found": found.plain()}

    def examine(self, arrivals: Mapping[int, Arrival], heard: Mapping[int, float]) -> str:
        """On rank 0: why the ranks must not train, or nothing. A table goes to stderr, all of it to the run folder."""
        if not self._wanted:
            return ""
        reports = {rank: of(arrival.report) for rank, arrival in arrivals.items() if arrival.report}
        met = {rank: verdict.Met(arrival.address, ahead(arrival, heard[rank])) for rank, arrival in arrivals.items()}
        # Those on this host reached rank 0 inside it: their way to others is this one's.
        out = own_address(other) if (other := away_from(arrivals)) else ""
        met |= {r: replace(met[r], address=out) for r, a in arrivals.items() if a.host == arrivals[0].host}
        found = verdict.examine(self._job, reports, met)
        record.write(self._folder, found, self._job, reports)
        self.summary = found.summary
        print(found.summary, flush=True)
        if found.findings:
            print(found.table(), file=sys.stderr, flush=True)
        return found.error


def look(identity: Identity, job: JobTable | None, binding: Binding | None, uuid: str, pci: str) -> Found:
    """What a rank finds.

    Args:
        uuid, pci: of the GPU that it computes on.
    """
    torch = sys.modules.get("torch")
    devices = torch.cuda.device_count() if torch is not None and (uuid or pci) else 0
    topo = job.topo_file if job is not None else ""
    return probe(binding, devices, uuid, pci, torch_facts(), identity.local_rank == 0, topo)


def of(report: Mapping[str, Any]) -> tuple[Binding | None, Found]:
    """What a rank said."""
    planned = report["planned"]
    return (Binding.of(planned) if planned is not None else None), Found.of(report["found"])
