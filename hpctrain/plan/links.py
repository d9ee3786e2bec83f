"""How long ranks take to exchange bytes, by where their group lies. All sizes may be numpy arrays.

A group of an axis has so many devices in each domain (NVLink, or what is like it) and spans so many domains. Inside
one domain it is a ring over the fast link, or a reduction in the switches. Across domains it is the fastest of

- a flat ring over all, which enters and leaves each domain by all ports of the group's devices there,
- a double tree (all-reduce), which takes log2 of the domains instead of all of them,
- a hierarchy: inside the domain, then between domains each device with its peers over its own port, then inside again.

Rings and trees of neighbours cross the upper levels of a fabric once for each ring, so its oversubscription does not
meet them; all-to-all it meets fully.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from hpctrain.layout.traffic import wire
from hpctrain.plan.constants import Constants, Link, Profile
from hpctrain.plan.gemm import Array, Device
from hpctrain.plan.hardware import Dtype, Hardware, of_device

TREE = 0.92
"""What a double tree reaches of a ring's rate between hosts: NCCL's tuning model, src/graph/tuning.cc."""

GAP = 3e-6
"""Seconds from one kernel to the next on a stream that is never empty. Launch latencies of 2 to 5 us are reported for
CUDA by NVIDIA (Nsight Systems blog, "Understanding the Visualization of Overhead and Latency")."""

GRAPH_GAP = 1e-6
"""The same in a CUDA graph, about: NVIDIA, "Constant Time Launch for Straight-Line CUDA Graphs"."""

CHANNELS = 0.2
"""Share of a device that collectives keep busy while they run beside computation: NCCL's kernels take a block for each
channel, up to 24 of 108 SMs on A100 and 24 to 32 of 132 on H100 (NCCL_MAX_NCHANNELS in NCCL's documentation)."""

RING_CHANNELS, MOST_DOUBLED = 2, 16
"""Channels of collectives between hosts: of a ring through each port, and the most up to which devices that have fp8
(compute capability 9.0 and later) have twice as many (NCCL, src/graph/connect.cc)."""

UNKNOWN = 0.8
"""Share of its peak that a device is taken to reach of which no table says anything."""

STEPS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}
"""Rounds of a ring."""


@dataclass(frozen=True)
class Group:
    """Where a group of ranks lies.

    Attributes:
        size: ranks.
        inside: of them in one domain.
        span: devices from its first rank's place to its last's.
    """

    size: Array
    inside: Array
    span: Array

    @property
    def domains(self) -> Array:
        return self.size / self.inside


def _equal_parts(size: Array, most: Array) -> Array:
    """The largest parts of `most` ranks or fewer that groups are cut into evenly: as many of each domain are used."""
    inside = np.minimum(size, most)
    if np.all(size % inside == 0):
        return inside
    sizes, most = np.broadcast_arrays(size, most)
    out = np.ones(sizes.shape, dtype=np.int64)
    for number in np.unique(sizes):
        parts = np.array([d for d in range(1, int(np.max(most)) + 1) if number % d == 0])
        here = sizes == number
        out[here] = parts[np.searchsorted(parts, most[here], side="right") - 1]
    return out


@dataclass(frozen=True)
class Machine:
    """Hardware, what software reaches of it, and what was measured: all that a cost is made of."""

    hardware: Hardware
    constants: Constants
    profile: Profile | None = None
    gap: float = GAP

    def of(self, devices: int) -> Machine:
        """The same as a job of so many devices has it: of each domain it takes equally many hosts, the most that go,
        as `launch` asks Slurm for with --segment, so that groups of ranks lie in domains alike. Domains that are no
        larger than a host stay as they are: jobs fill one after another.

        Raises:
            ConfigError: hosts have no ports, and one domain is too small.
        """
        self.hardware.reaches(devices)
        domain, host = self.hardware.domain, self.hardware.host.devices
        if devices <= domain.devices or domain.devices <= host or devices % host:
            return self
        inside = int(_equal_parts(devices // host, domain.devices // host)) * host
        made = domain.model_copy(update={"devices": inside})
        return replace(self, hardware=self.hardware.model_copy(update={"domain": made}))

    def of_one_port(self) -> Machine:
        """The same where a host has one port."""
        host = self.hardware.host
        made = host.model_copy(update={"nics": host.nics.model_copy(update={"value": 1})})
        return replace(self, hardware=self.hardware.model_copy(update={"host": made}))

    def group(self, size: Array, stride: Array) -> Group:
        """The group of an axis whose neighbours are `stride` ranks apart; ranks fill one domain after another."""
        domain = self.hardware.domain.devices
        return Group(size, _equal_parts(size, np.maximum(1, domain // stride)), size * stride)

    def device(self, dtype: Dtype) -> Device:
        """Rates of a device in a step that computes in `dtype`."""
        gpu, training, measured = self.hardware.gpu, self.constants.training, self.profile
        share = self._fitted().get(dtype, UNKNOWN)
        rate = (measured and measured.matmul.get(dtype)) or self.hardware.peak(dtype) * share * training.matmul
        bandwidth = (measured and measured.memory_bandwidth) or gpu.memory_bandwidth.value * training.memory
        return Device(rate, gpu.sms.value, bandwidth, self.gap)

    def _fitted(self) -> dict[str, float]:
        """Shares of the peak by dtype: those of the cluster's name; of a name that is not in the constants, those of
        the packaged cluster that has the same device."""
        known, name = self.constants.matmul, self.hardware.name
        return known.get(name if name in known else of_device(self.hardware.gpu.name), {})

    @property
    def fast(self) -> Link:
        return self.constants.links[self.hardware.domain.link]

    @property
    def net(self) -> Link:
        return self.constants.links[self.hardware.fabric.network]

    @property
    def inner(self) -> float:
        """Bytes/s of a device's links in its domain, as they are in a step. What a step reaches of a sweep is known of
        collectives of tp (`Training`), which run over these links; networks are taken to do as in their sweeps."""
        return self.hardware.domain.bandwidth.value * self.constants.training.collective

    @property
    def port(self) -> float:
        """Bytes/s that a device's share of the host's ports carries, each way; of no ports nobody asks, and they take
        no time."""
        host = self.hardware.host
        if not host.nics.value:
            return math.inf
        return host.nics.value * host.nic_bandwidth.value / host.devices

    def busy(self, group: Group) -> Array:
        """Share of a device that collectives of a group keep busy beside computation. Inside a domain it is `CHANNELS`;
        groups that leave it have as many channels as their ports ask for, and no more."""
        gpu, host = self.hardware.gpu, self.hardware.host
        channels = RING_CHANNELS * group.inside * host.nics.value / host.devices
        if "fp8" in gpu.peak:
            channels = np.maximum(channels, np.minimum(2 * channels, MOST_DOUBLED))
        return np.where(group.domains > 1, np.minimum(CHANNELS, channels / gpu.sms.value), CHANNELS)

    def collective(self, operation: str, payload: Array, group: Group) -> Array:
        """Seconds of a collective with `payload` bytes put in by each rank (`layout.traffic.Payload`)."""
        best: Array = np.inf
        for _, time in self.ways(operation, payload, group):
            best = np.minimum(best, time)
        if self.profile is not None:
            best = self._measured(operation, payload, group, best)
        return np.where(group.size > 1, best, 0.0)

    def copied(self, operation: str, payload: Array, group: Group) -> Array:
        """Seconds of a ring of copies that devices of one domain make into each other's memory, as user buffers do: at
        the rate of large messages, and a hop for each, with no library in between."""
        sent = wire(operation, payload, group.size)  # type: ignore[arg-type]
        inside = sent / (self.fast.lines[-1].rate * self.inner) + self.fast.hop * STEPS[operation] * (group.size - 1)
        across = group.domains > 1
        return np.where(across, self.collective(operation, payload, group), inside) * (group.size > 1)

    def _measured(self, operation: str, payload: Array, group: Group, otherwise: Array) -> Array:
        """What the profile says where it has the operation, inside a host or between hosts: of the group that is
        nearest in size."""
        assert self.profile is not None
        sent = wire(operation, payload, group.size)  # type: ignore[arg-type]
        out = otherwise
        for across in (False, True):
            fits = [m for m in self.profile.collectives if m.operation == operation and (m.hosts > 1) == across]
            if not fits:
                continue
            size = np.asarray(group.size, float)
            far = np.array([np.abs(np.log2(size) - np.log2(fit.devices)) for fit in fits])
            times = [np.minimum.reduce([line.latency + sent / line.rate for line in fit.lines]) for fit in fits]
            chosen = np.choose(np.argmin(far, axis=0), np.broadcast_arrays(*times)) if len(fits) > 1 else times[0]
            out = np.where((group.domains > 1) == across, chosen, out)
        return out

    def chosen(self, operation: str, payload: float, group: Group) -> str:
        """The fastest way of a collective: in-domain ring, in-switch reduction, ring, tree or hierarchy."""
        return min(self.ways(operation, payload, group), key=lambda way: float(way[1]))[0]

    def ways(self, operation: str, payload: Array, group: Group) -> list[tuple[str, Array]]:
        """Ways of a collective and their seconds; infinite where a group cannot go that way."""
        across = group.domains > 1
        inner = self._inside(operation, payload, group.size)
        if operation == "all_to_all":
            outer = [("direct", self._all_to_all(payload, group))]
        else:
            outer = [
                ("ring", self._ring(operation, payload, group)),
                ("hierarchy", self._hierarchy(operation, payload, group)),
            ]
            if operation == "all_reduce":
                outer.append(("tree", self._tree(payload, group)))
        return [(name, np.where(across, np.inf, time)) for name, time in inner] + [
            (name, np.where(across, time, np.inf)) for name, time in outer
        ]

    def send(self, payload: Array, away: Array) -> Array:
        """Seconds until another rank has `payload` bytes; `away`: it is in another domain."""
        near = self._lines(self.fast, payload, self.inner, self.fast.hop)
        far = self._lines(self.net, payload, self.port, self.net.hop, 2)
        if self.profile is not None:
            near = self._sent(payload, False, near)
            far = self._sent(payload, True, far)
        return np.where(away, far, near)

    def _sent(self, payload: Array, across: bool, otherwise: Array) -> Array:
        """What the profile says of a message inside a host or between hosts."""
        assert self.profile is not None
        fits = [m for m in self.profile.collectives if m.operation == "send" and (m.hosts > 1) == across]
        if not fits:
            return otherwise
        fit = min(fits, key=lambda m: m.devices)
        return np.minimum.reduce([line.latency + payload / line.rate for line in fit.lines])

    def _lines(
        self, link: Link, sent: Array, bandwidth: Array, hops: Array, rounds: int = 1, steps: Array = 1
    ) -> Array:
        """The fastest of a link's lines for so many bytes out of a device and so many seconds of hops.

        A line's latency is that of an all-reduce of `link.ranks`, which goes around twice (`Link`); what goes around
        once has half of the first line's. What others have above it is of filling a ring, step after step.

        Args:
            steps: from rank to rank until all have what they need.
        """
        start, best = link.lines[0].latency, np.inf
        for line in link.lines:
            fill = (line.latency - start) * steps / (STEPS["all_reduce"] * (link.ranks - 1))
            best = np.minimum(best, start * rounds / 2 + fill + sent / (line.rate * bandwidth))
        return best + hops

    def _inside(self, operation: str, payload: Array, size: Array) -> list[tuple[str, Array]]:
        """Over the fast link, in one domain. An all-to-all has no ring: NCCL runs up to 8 sends in each block of a
        kernel (src/include/device.h), so that there is a step for all and none for each."""
        rounds = STEPS[operation]
        steps = 1 if operation == "all_to_all" else rounds * (size - 1)
        sent = wire(operation, payload, size)  # type: ignore[arg-type]
        ring = self._lines(self.fast, sent, self.inner, self.fast.hop * steps, rounds, steps)
        out = [("in-domain ring", ring)]
        if operation == "all_reduce" and self.fast.all_reduce is not None:
            switched = self.fast.lines[0].latency + payload / (self.fast.all_reduce * self.inner)
            out.append(("in-switch", np.where(size > 4, switched, np.inf)))
        return out

    def _outer(self, sent: Array, inside: Array, hops: Array, share: float = 1.0) -> Array:
        """Bytes out of each device of a ring that goes through domains by `inside` devices' ports. Inside them it goes
        no faster than in a sweep."""
        inner = self.fast.lines[-1].rate * self.hardware.domain.bandwidth.value
        best: Array = np.inf
        for line in self.net.lines:
            rate = np.minimum(line.rate * self.port * inside * share, inner)
            best = np.minimum(best, line.latency + sent / rate)
        return best + hops

    def _ring(self, operation: str, payload: Array, group: Group) -> Array:
        steps, domains = STEPS[operation], group.domains
        hops = steps * ((group.size - domains) * self.fast.hop + domains * self.net.hop)
        return self._outer(wire(operation, payload, group.size), group.inside, hops)  # type: ignore[arg-type]

    def _tree(self, payload: Array, group: Group) -> Array:
        hops = 2 * ((group.inside - 1) * self.fast.hop + np.log2(np.maximum(group.domains, 1)) * self.net.hop)
        return self._outer(wire("all_reduce", payload, group.size), group.inside, hops, TREE)  # type: ignore[arg-type]

    def _hierarchy(self, operation: str, payload: Array, group: Group) -> Array:
        """Inside, between, inside."""
        inside, domains = group.inside, group.domains
        many = inside > 1

        def within(what: str, size: Array) -> Array:
            return np.where(many, np.minimum.reduce([t for _, t in self._inside(what, size, inside)]), 0.0)

        def between(what: str, size: Array) -> Array:
            hops = STEPS[what] * domains * self.net.hop
            return self._outer(wire(what, size, domains), 1.0, hops)  # type: ignore[arg-type]

        if operation == "all_reduce":
            part = payload / inside
            return within("reduce_scatter", payload) + between("all_reduce", part) + within("all_gather", part)
        if operation == "reduce_scatter":
            return within("reduce_scatter", payload) + between("reduce_scatter", payload / inside)
        return between("all_gather", payload) + within("all_gather", payload * domains)

    def _all_to_all(self, payload: Array, group: Group) -> Array:
        """Each device to each other, all at once: what stays in the domain by its link, beside it what leaves by the
        port."""
        size, inside = group.size, group.inside
        near = payload * (inside - 1) / size / (self.fast.lines[-1].rate * self.inner)
        beyond = np.ones_like(np.asarray(size, float))
        for level in self.hardware.fabric.levels:
            beyond = np.where(group.span > level.devices, beyond * level.oversubscription.value, beyond)
        far = payload * (size - inside) / size * beyond / (self.net.lines[-1].rate * self.port)
        return np.maximum(near, far) + self.net.lines[0].latency + self.net.hop
