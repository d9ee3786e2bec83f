"""What a cluster is made of, as its vendors say: peaks, memories, links, switches. One YAML file a kind of cluster.

Every number carries its source. What software reaches of these numbers is not here but in `constants.py`, and what
was measured on a cluster, in a `Profile`, goes before both.
"""

from __future__ import annotations

import math
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from hpctrain.config.keys import nearest
from hpctrain.config.schema import Count, Section
from hpctrain.errors import ConfigError
from hpctrain.plan import bounds
from hpctrain.plan.constants import constants
from hpctrain.plan.files import section

if TYPE_CHECKING:
    from importlib.abc import Traversable

Dtype = Literal["fp8", "bf16", "fp16", "float32", "float64"]


class Fact(Section):
    """A number and who says so. What it may be is of its kind (`bounds`)."""

    value: float
    source: str = Field(min_length=3)


class ByteRate(Fact):
    value: bounds.ByteRate


class FlopRate(Fact):
    value: bounds.FlopRate


class Bytes(Fact):
    value: bounds.Bytes


class SomeBytes(Fact):
    value: bounds.SomeBytes


class Units(Fact):
    value: bounds.Units


class Copies(Fact):
    value: bounds.Copies


class Ports(Fact):
    value: bounds.Ports


class Ratio(Fact):
    value: bounds.Ratio


class Hours(Fact):
    value: bounds.Hours


class Seconds(Fact):
    value: bounds.Seconds


class Gpu(Section):
    """One device.

    Attributes:
        sms: units that each compute a tile of a matrix product at a time.
        peak: dense FLOP/s of matrix products by dtype.
        memory: bytes.
        memory_bandwidth: bytes/s.
        fp8_copies: of an operand that products in fp8 need: 2 where they want it transposed besides.
    """

    name: str
    sms: Units
    peak: dict[Dtype, FlopRate]
    memory: Bytes
    memory_bandwidth: ByteRate
    fp8_copies: Copies = Copies(value=2, source="TransformerEngine, common/gemm/cublaslt_gemm.cu: Hopper, TN alone")


class Domain(Section):
    """Devices that reach each other by the fast link, NVLink or what is like it.

    Attributes:
        link: names what software reaches of it, in `constants.yaml`.
        devices: of a domain: whole hosts, as on racks, or equal parts of a host.
        bandwidth: bytes/s of a device, each way.
    """

    link: str
    devices: Count
    bandwidth: ByteRate


class Host(Section):
    """One machine. Memory in bytes, bandwidths in bytes/s and each way; of PCIe for each device.

    Attributes:
        nics: ports to other hosts; 0 where there is one host, or one domain, and nothing beyond it.
        nvme: bytes of drives; 0 where there are none, and their rates are those of what checkpoints are written to.
    """

    devices: Count
    nics: Ports
    nic_bandwidth: ByteRate
    pcie_bandwidth: ByteRate
    memory: Bytes
    memory_bandwidth: ByteRate
    nvme: SomeBytes
    nvme_read: ByteRate
    nvme_write: ByteRate


class Level(Section):
    """A level of switches: how many devices it joins, and how much less goes up from it than comes in from below.

    The top level joins all there are.
    """

    name: str
    devices: Count
    oversubscription: Ratio


class Fabric(Section):
    """The network between hosts: of kind `fat-tree`, `rails` or `dragonfly`; levels from the leaves up."""

    kind: Literal["fat-tree", "rails", "dragonfly", "single"]
    network: str
    levels: tuple[Level, ...] = ()


class Failures(Section):
    """How often a device's share of the cluster fails, and what an interruption costs; hours and seconds."""

    device_mtbf_hours: Hours
    restart_seconds: Seconds


class Hardware(Section):
    """A kind of cluster."""

    name: str
    about: str
    aliases: tuple[str, ...] = ()
    gpu: Gpu
    domain: Domain
    host: Host
    fabric: Fabric
    failures: Failures

    @model_validator(mode="after")
    def _has_ports(self) -> Hardware:
        if not self.host.nics.value and self.fabric.kind != "single":
            raise ValueError(
                f"host.nics is 0, so no host reaches another, but fabric.kind is {self.fabric.kind}: "
                "give the ports, or use kind single"
            )
        return self

    @model_validator(mode="after")
    def _has_whole_domains(self) -> Hardware:
        domain, host = self.domain.devices, self.host.devices
        if domain % host and host % domain:
            raise ValueError(
                f"domain.devices is {domain} and host.devices {host}: a domain has whole hosts, or a host whole "
                f"domains, so use {_whole(domain, host)}"
            )
        return self

    def reaches(self, devices: int) -> None:
        """Whether a job of so many devices can be.

        Raises:
            ConfigError: it takes more than one domain, and hosts have no ports.
        """
        most = self.domain.devices
        if not self.host.nics.value and devices > most:
            allowed = f"hosts of {self.name} have no ports to others (host.nics: 0), so {most} devices at most"
            raise ConfigError("gpus", devices, allowed, f"use {most}, or give the ports")

    def peak(self, dtype: Dtype) -> float:
        """Dense FLOP/s of matrix products.

        Raises:
            ConfigError: the device has no such units.
        """
        fact = self.gpu.peak.get(dtype)
        if fact is None:
            known = ", ".join(self.gpu.peak)
            raise ConfigError("precision", dtype, f"{self.gpu.name} multiplies in {known}", "use one of these")
        return fact.value

    def part(self, devices: int) -> Hardware:
        """The same cluster with so many devices of each host in use, and their share of its ports.

        Raises:
            ConfigError: a host has fewer.
        """
        host, domain = self.host, self.domain
        if devices == host.devices:
            return self
        if devices > host.devices:
            allowed = f"a host of {self.name} has {host.devices} devices"
            raise ConfigError("cluster.gpus_per_node", devices, allowed, f"use at most {host.devices}")
        nics = host.nics.model_copy(update={"value": host.nics.value * devices / host.devices})
        if domain.devices < host.devices:
            within = devices if devices <= domain.devices else math.gcd(devices, domain.devices)
        else:
            within = domain.devices // host.devices * devices
        return self.model_copy(
            update={
                "host": host.model_copy(update={"devices": devices, "nics": nics}),
                "domain": domain.model_copy(update={"devices": within}),
            }
        )

    def oversubscription(self, devices: int) -> float:
        """What the levels below the one that joins so many devices take from traffic of all with all."""
        factor = 1.0
        for level in self.fabric.levels:
            if devices <= level.devices:
                break
            factor *= level.oversubscription.value
        return factor


def _whole(domain: int, host: int) -> str:
    """The sizes nearest to a domain's that go with a host of so many devices, in words."""
    if domain > host:
        return f"{domain // host * host} or {(domain // host + 1) * host}"
    fits = [size for size in range(1, host + 1) if host % size == 0]
    return f"{max(s for s in fits if s < domain)} or {min(s for s in fits if s > domain)}"


def names() -> dict[str, Traversable]:
    """Files of the package by name."""
    found = [f for f in files("hpctrain.plan").joinpath("hardware").iterdir() if f.name.endswith(".yaml")]
    return {f.name.removesuffix(".yaml"): f for f in sorted(found, key=lambda f: f.name)}


@cache
def hardware(name: str) -> Hardware:
    """The cluster of that name, alias, or file.

    Raises:
        ConfigError: there is none, or its file is not as it should be.
    """
    known = names()
    if name.lower() in known:
        return _read(known[name.lower()], name)
    for file in known.values():
        found = _read(file, file.name)
        if name.lower() in found.aliases:
            return found
    if Path(name).suffix in (".yaml", ".yml"):
        return _read(Path(name), name)
    every = {alias for file in known.values() for alias in _read(file, file.name).aliases} | set(known)
    near = nearest(name.lower(), sorted(every))
    fix = f"the nearest is {near}" if near else "or give a YAML file like these"
    raise ConfigError("cluster", name, f"must be one of {', '.join(known)}", fix)


@cache
def of_device(gpu: str) -> str:
    """The packaged cluster that has this device (`gpu.name`); empty where none has."""
    made = (hardware(name) for name in names())
    return next((cluster.name for cluster in made if cluster.gpu.name == gpu), "")


def _read(file: Traversable | Path, name: str) -> Hardware:
    made = section(Hardware, file, "cluster", name, "see docs/planner.md")
    known = constants().links
    for path, link in (("domain.link", made.domain.link), ("fabric.network", made.fabric.network)):
        if link not in known:
            near = nearest(link, sorted(known))
            fix = f"the nearest is {near}" if near else "take the one that is most like it"
            raise ConfigError("cluster", name, f"{path} is {link!r}, and must be one of {', '.join(known)}", fix)
    return made
