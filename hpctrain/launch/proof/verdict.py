"""The proof before training: rank 0 holds all ranks against the rank table, and against each other.

What a rank found travels with its arrival at the roll call, so the proof costs no message of its own.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hpctrain.cluster.cpus import parse_list
from hpctrain.launch.place.bind import Binding
from hpctrain.launch.place.routes import beside
from hpctrain.launch.place.tablefile import JobTable
from hpctrain.launch.proof.compare import of_rank
from hpctrain.launch.proof.finding import Finding, Rank, grouped, ranges
from hpctrain.launch.proof.probe import Found

FILE = "proof.json"
"""In the run folder: that of the latest life."""

SKEW_S = 0.5
"""Clocks that differ by more, for certain, are named."""

ROWS = 24
"""Lines of the table; more are in the file."""

ALIKE = {"torch": True, "nccl": True, "hpctrain": True, "python": False, "driver": False}
"""Versions that all ranks share, and whether others stop the job."""

Reports = Mapping[int, tuple[Binding | None, Found]]
"""Of each rank what it was to have and what it found."""


@dataclass(frozen=True)
class Met:
    """What the roll call knows of a rank.

    Attributes:
        address: its own, on the way to other hosts; "" if not known.
        ahead: seconds of its clock before rank 0's, at the least and at the most.
    """

    address: str = ""
    ahead: tuple[float, float] = (-math.inf, math.inf)


@dataclass(frozen=True)
class Proof:
    """What rank 0 concluded.

    Attributes:
        findings: all of them.
        ranks, hosts: that were looked at.
        bound: ranks whose CPUs, GPU or NIC are as planned by a table.
    """

    findings: tuple[Finding, ...]
    ranks: int
    hosts: int
    bound: int

    @property
    def stops(self) -> bool:
        """Whether the job must not train."""
        return any(one.stops for one in self.findings)

    @property
    def summary(self) -> str:
        """One line for the log."""
        where = f"{self.ranks} ranks on {self.hosts} hosts"
        bound = f"{self.bound} of them placed by the rank table" if self.bound else "no rank table"
        bad = ranges({one.rank for one in self.findings if one.stops})  # type: ignore[arg-type]
        warned = Counter(one.what for one in self.findings if not one.stops)
        tail = f"; warnings: {', '.join(warned)}" if warned else ""
        return f"proof: {where}, {bound}: " + (f"ranks {bad} are not as planned" if bad else "all as planned") + tail

    @property
    def error(self) -> str:
        """Why all ranks stop; "" if they need not."""
        if not self.stops:
            return ""
        bad = ranges({one.rank for one in self.findings if one.stops})  # type: ignore[arg-type]
        what = dict.fromkeys(one.what for one in self.findings if one.stops)
        return (
            f"ranks {bad} of {self.ranks} are not as planned ({', '.join(what)}): rank 0 shows what was planned and "
            f"found, the usual cause and how to mend it; {FILE} in the run folder has all of it."
        )

    def table(self) -> str:
        """What stops the job, as a table; without that, warnings."""
        shown = [pair for pair in grouped(self.findings) if pair[1].stops or not self.stops]
        rows = [("rank", "what", "planned", "found", "usual cause", "mend")]
        rows += [(ranks, f.what, f.planned, f.found, f.cause, f.mend) for ranks, f in shown[:ROWS]]
        cells = [tuple(_short(cell) for cell in row[:4]) + row[4:] for row in rows]
        widths = [max(len(row[i]) for row in cells) for i in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in cells]
        return "\n".join([*lines, *([f"and {len(shown) - ROWS} more, in {FILE}"] if len(shown) > ROWS else [])])


def _short(cell: str) -> str:
    return cell if len(cell) <= 60 else f"{cell[:57]}..."


def examine(job: JobTable | None, reports: Reports, met: Mapping[int, Met] | None = None) -> Proof:
    """Judge all ranks. Pure.

    Args:
        met: what the roll call knows of them.
    """
    met = met or {}
    by_host: dict[str, list[int]] = {}
    for rank, (_, found) in reports.items():
        by_host.setdefault(found.host, []).append(rank)
    away = _away(by_host, reports)
    findings: list[Finding] = []
    for host, ranks in by_host.items():
        for rank in ranks:
            binding, found = reports[rank]
            mine = met.get(rank, Met()).address
            reach = [_reaches(at, mine, away[host]) for at in (found.at, found.socket_at)]
            findings += of_rank(Rank(rank, binding, found, len(ranks), len(reports), len(by_host), *reach))
        findings += _of_host(job, host, {rank: reports[rank] for rank in ranks})
    findings += _versions(reports)
    findings += _places(reports)
    findings += _rates(reports)
    findings += _clocks(by_host, met)
    if job is not None and job.unfit:
        findings += [_unfit(job, said) for said in job.unfit]
    bound = sum(binding is not None for binding, _ in reports.values())
    return Proof(tuple(sorted(findings, key=lambda f: (not f.stops, f.rank))), len(reports), len(by_host), bound)


def _away(by_host: Mapping[str, Sequence[int]], reports: Reports) -> dict[str, tuple[str, ...]]:
    """Of each host the addresses of another one, rank 0's where that is another one; () where nobody told them."""
    told = {host: next((a for r in ranks if (a := reports[r][1].addresses)), ()) for host, ranks in by_host.items()}
    home = reports[0][1].host if 0 in reports else ""
    other = next((found for host, found in told.items() if host != home and found), ())
    return {host: told.get(home, ()) if host != home else other for host in by_host}


def _reaches(at: Sequence[str], mine: str, others: Sequence[str]) -> bool | None:
    """Whether an interface is on the way to another host: by the route that was taken, or in one network with it.

    Args:
        at: its addresses.
        mine: the rank's own on its way.
        others: of the other host.
    """
    if any(text.partition("/")[0] == mine for text in at):
        return True
    return beside(at, others) if at and others else None


def _unfit(job: JobTable, said: str) -> Finding:
    host = job.table.hosts[0]
    return Finding(0, "node", "fit", said, "a broken or shared GPU", f"exclude {host} and have it looked at")


def _of_host(job: JobTable | None, host: str, reports: Reports) -> Iterator[Finding]:
    """What ranks of a host must share, or must not."""
    given: set[int] = set()
    for binding, found in reports.values():
        given |= set(binding.allowed if binding is not None else parse_list(found.cpus))
    first = next(iter(reports.values()))[1]
    need = min(first.asked_cpus * len(reports), first.cpu_count) or min(len(reports), first.cpu_count)
    planned: set[int] = set()
    if job is not None and job.exclusive and host in job.table.hosts:
        planned = {cpu for cpus in job.table.cpus(host) for cpu in cpus}
    if len(given) < need or 2 * len(given & planned) < len(planned):
        wanted = max(need, len(planned))
        for rank in reports:
            yield Finding(
                rank,
                "CPUs of the node",
                f"{wanted} for {len(reports)} ranks",
                f"{len(given)}",
                "SLURM_CPU_BIND of another job was inherited, or the step was given a part of the job's CPUs",
                "submit with hpctrain submit, which strips SLURM_*; unset SLURM_CPU_BIND in the prologue",
            )
    lists = {found.hcas for _, found in reports.values()}
    if len(lists) > 1:
        for rank, (_, found) in reports.items():
            yield Finding(
                rank,
                "NCCL_IB_HCA",
                "the same on all ranks of a node",
                found.hcas or "not set",
                "a wrapper names each rank its own NIC",
                "unset NCCL_IB_HCA: NCCL picks the near one of a list that all have",
            )


def _versions(reports: Reports) -> Iterator[Finding]:
    for name, stops in ALIKE.items():
        values = Counter(found.versions.get(name, "") for _, found in reports.values())
        usual = values.most_common(1)[0][0] if values else ""
        for rank, (_, found) in reports.items():
            mine = found.versions.get(name, "")
            if mine != usual and mine and usual:
                yield Finding(
                    rank,
                    f"version of {name}",
                    usual,
                    mine,
                    "an environment that is not on a shared file system",
                    f"install {name} {usual} on {found.host}, or exclude it",
                    stops=stops,
                )


def _places(reports: Reports) -> Iterator[Finding]:
    """Ranks on other places than the table's, and two on one."""
    users = Counter(binding.row for binding, _ in reports.values() if binding is not None)
    for rank, (binding, _) in reports.items():
        if binding is None:
            continue
        twice = users[binding.row] > 1
        if binding.row != rank or twice:
            yield Finding(
                rank,
                "place",
                f"row {rank} of the rank table",
                f"row {binding.row}, on {binding.host}",
                "Slurm numbers nodes otherwise than its list of nodes, or SLURM_DISTRIBUTION is set",
                "unset SLURM_DISTRIBUTION; it costs speed alone" if not twice else "start each rank once",
                stops=twice,
            )


def _rates(reports: Reports) -> Iterator[Finding]:
    best = max((found.rate_gbit or 0.0 for _, found in reports.values()), default=0.0)
    for rank, (binding, found) in reports.items():
        if binding is not None and found.rate_gbit and 2 * found.rate_gbit <= best:
            yield Finding(
                rank,
                "rate of NIC",
                f"{best:g} Gbit/s",
                f"{binding.nic} {found.rate_gbit:g} Gbit/s",
                "a link that came up with fewer lanes",
                f"exclude {binding.host} and have its cables looked at",
                stops=False,
            )


def _clocks(by_host: Mapping[str, Sequence[int]], met: Mapping[int, Met]) -> Iterator[Finding]:
    """Hosts whose clocks differ from rank 0's for certain: a clock is in what all ranks of its host allow."""
    for host, ranks in by_host.items():
        bounds = [met[rank].ahead for rank in ranks if rank in met]
        least = max((low for low, _ in bounds), default=-math.inf)
        most = min((high for _, high in bounds), default=math.inf)
        late = -most if most < 0 else least
        if late > SKEW_S:
            yield Finding(
                min(ranks),
                "clock",
                "that of rank 0",
                f"{late:.1f} s or more {'behind' if most < 0 else 'ahead'} on {host}",
                "time is not synchronized (chronyd, ntpd)",
                "tell the administrator; times of logs and files mislead",
                stops=False,
            )
