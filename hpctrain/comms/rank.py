"""One rank of a measurement: meets the others, measures, and rank 0 leaves the result in the folder.

python -m hpctrain.comms.rank FOLDER      with the settings in FOLDER/spec.json, under mpirun
"""

from __future__ import annotations

import datetime
import json
import os
import re
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.comms.groups import Where
from hpctrain.comms.result import Result
from hpctrain.comms.spec import Spec
from hpctrain.errors import ConfigError
from hpctrain.launch.life.identity import ALONE, Identity, detect
from hpctrain.launch.rank.body import run_rank
from hpctrain.telemetry.environment import environment

if TYPE_CHECKING:
    from hpctrain.comms.backend import Party

SPEC_FILE = "spec.json"

MPI_PREFIXES = (
    *(f"OMPI_MCA_{framework}" for framework in ("btl", "coll", "mpi_", "mtl", "pml", "smsc")),
    *("MPIR_CVAR_", "I_MPI_ADJUST", "I_MPI_FABRICS", "I_MPI_OFI"),
)
"""Variables that choose algorithms and transports of MPI, beside those that every run records."""


def rank_main(plain: dict[str, Any], folder: str) -> None:
    """Measure as one rank. Rank 0 leaves `result.json` in the folder."""
    spec = Spec.of(plain)
    identity = detect(os.environ) or ALONE
    os.environ.update(placed(spec.environ, identity))
    if spec.threads:
        os.environ["OMP_NUM_THREADS"] = str(spec.threads)  # numpy's BLAS reads it when it is loaded
    with party_of(spec, identity, Path(folder)) as party:
        result = measured(spec, party)
        if party.rank == 0:
            result.write(Path(folder))


def placed(environ: Mapping[str, str], identity: Identity) -> dict[str, str]:
    """Variables with what stands for this rank's own in them filled in.

    Raises:
        ConfigError: no such interface here.
    """

    def fill(found: re.Match[str]) -> str:
        if found[1]:
            return _address(found[1].format(rank=identity.rank, local_rank=identity.local_rank))
        return str({"rank": identity.rank, "local_rank": identity.local_rank}[found[2]])

    pattern = r"\{address:((?:[^{}]|\{\w+\})+)\}|\{(rank|local_rank)\}"
    return {name: re.sub(pattern, fill, value) for name, value in environ.items()}


def _address(interface: str) -> str:
    """Of an interface of this machine, IPv4."""
    import psutil

    for card in psutil.net_if_addrs().get(interface, ()):
        if card.family == socket.AF_INET:
            return str(card.address)
    raise ConfigError("--env", interface, f"{socket.gethostname()} has no such interface with an IPv4 address")


@contextmanager
def party_of(spec: Spec, identity: Identity, folder: Path) -> Iterator[Party]:
    """All ranks over the backend of the settings. Collective."""
    if spec.backend == "mpi":
        from hpctrain.comms.mpibackend import mpi_party

        with mpi_party(identity, folder, spec.timeout_s) as party:
            yield party
        return
    from hpctrain.comms.torchbackend import torch_party

    with torch_party(identity, folder, spec.backend, spec.timeout_s, spec.threads) as made:
        yield made


def measured(spec: Spec, party: Party) -> Result:
    """What the settings ask for. Collective; the same on every rank, but for the environment, which rank 0 has."""
    from hpctrain.comms.kinds import KINDS

    start = _now()
    where = party.gather(_here(party))
    party.hosts = [at.host for at in where]
    kept = recorded() if party.rank == 0 else {}
    result = Result(spec.plain(), (), tuple(where), kept, start, "", party.library)
    return replace(KINDS[spec.kind](spec, party, where, result), end=_now())


def recorded() -> dict[str, Any]:
    """Versions and the variables that matter."""
    found = environment()
    extra = {name: os.environ[name] for name in sorted(os.environ) if name.startswith(MPI_PREFIXES)}
    return {**found, "variables": {**found["variables"], **extra}}


def _here(party: Party) -> Where:
    host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    return Where(host, party.local_rank, os.getpid(), party.memory.name)


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def main() -> None:
    """As a program under mpirun."""
    folder = Path(sys.argv[1])
    spec = json.loads((folder / SPEC_FILE).read_text())
    run_rank(rank_main, (spec, str(folder)))


if __name__ == "__main__":
    main()
