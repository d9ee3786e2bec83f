"""Which nodes are slow or broken, by what their devices and links measure against the median of all. Pure.

A node is named only where its value is low by more than noise explains: more than a share below the median of all
(`Limits`), and more than `SIGMAS` times the spread of all, of the samples of one, and of its own samples. Spreads are
medians of deviations, which bad nodes do not move until they are half of all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

SIGMAS = 4.0
"""Standard deviations."""
_SIGMA = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""
FEWEST = 3
"""Values from which one can be told to be the odd one."""


@dataclass(frozen=True)
class Limits:
    """Shares below the median from which a value counts as low, if it is no noise.

    GPUs of one kind differ by a few percent in clocks; processes on CPUs share them with whatever else runs there.
    """

    matmul: float = 0.10
    memory: float = 0.10
    local: float = 0.25
    rail: float = 0.25

    @staticmethod
    def of(device: str) -> Limits:
        """For a kind of device: cuda or cpu."""
        return Limits() if device == "cuda" else Limits(0.7, 0.7, 0.7, 0.7)


@dataclass(frozen=True)
class Device:
    """What one rank measured alone.

    Attributes:
        host, local: its node, and its number there.
        kind: cuda or cpu.
        name: of the device, for people; with its UUID.
        samples: of each metric, FLOP/s or bytes/s.
        wrong: what came out wrong, or is broken for certain, a sentence; "" for nothing.
    """

    host: str
    local: int
    kind: str = "cpu"
    name: str = ""
    samples: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    wrong: str = ""


@dataclass(frozen=True)
class Pair:
    """Bytes a second each way between two ranks at once.

    Attributes:
        metric: local (on a node) or rail (between nodes, the same local rank).
        a, b: host and local rank.
    """

    metric: str
    a: tuple[str, int]
    b: tuple[str, int]
    samples: tuple[float, ...]


@dataclass(frozen=True)
class Verdict:
    """What is concluded.

    Attributes:
        bad: of each host that is slow or broken, why.
        notes: what is odd and not blamed on a node, a sentence each.
        medians: of each metric, over all.
    """

    bad: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    medians: Mapping[str, float] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def judge(
    devices: Sequence[Device],
    pairs: Sequence[Pair],
    hosts: Sequence[str],
    per_node: int,
    limits: Limits | None = None,
    hung: Mapping[tuple[str, int], str] | None = None,
) -> Verdict:
    """The slow and broken of some nodes.

    Args:
        devices: those that reported.
        pairs: that were measured.
        hosts: all that were asked.
        per_node: devices of each.
        limits: None: those of the kind of device.
        hung: of those at which the measurement of links came to a halt, where they were.
    """
    limits = limits or Limits.of(devices[0].kind if devices else "cpu")
    said: dict[str, list[str]] = {host: [] for host in hosts}
    notes: list[str] = []
    medians: dict[str, float] = {}
    certain: dict[str, str] = {}
    for host in hosts:
        here = [device for device in devices if device.host == host]
        if len(here) < per_node:
            said[host].append(f"{per_node - len(here)} of its {per_node} devices did not report")
        wrong = [f"device {device.local}: {device.wrong}" for device in here if device.wrong]
        said[host] += wrong
        certain |= {host: "; ".join(wrong)} if wrong else {}
    for (host, local), words in (hung or {}).items():
        said[host].append(f"device {local}: {words}")
    for metric in ("matmul", "memory"):
        values = {(d.host, d.local): d.samples[metric] for d in devices if metric in d.samples}
        low = lowest(metric, values, getattr(limits, metric))
        medians |= {metric: _centre(values.values())} if values else {}
        for (host, local), words in low.items():
            said[host].append(f"device {local}: {words}")
        notes += _split(metric, values, getattr(limits, metric)) if not low else []
    for metric in ("local", "rail"):
        mine = [pair for pair in pairs if pair.metric == metric]
        low, more = slow_ends(metric, mine, getattr(limits, metric))
        medians |= {metric: _centre(pair.samples for pair in mine)} if mine else {}
        for (host, local), words in low.items():
            said[host].append(f"{'rail of device' if metric == 'rail' else 'device'} {local}: {words}")
        notes += more
    bad = {host: "; ".join(words) for host, words in said.items() if words}
    if len(bad) * 2 > len(hosts) and len(hosts) > 1:
        notes.append(
            f"{len(bad)} of {len(hosts)} nodes look bad, so nothing is a measure for the others, and none is left out "
            "but those that compute wrongly or are broken"
        )
        return Verdict(certain, (*notes, *(f"{host}: {words}" for host, words in bad.items())), medians)
    return Verdict(bad, tuple(notes), medians)


def lowest(
    metric: str,
    values: Mapping[tuple[str, int], Sequence[float]],
    limit: float,
    noises: Mapping[tuple[str, int], float] | None = None,
) -> dict[tuple[str, int], str]:
    """Those of some values that are low, and by how much, in words.

    Args:
        values: samples by host and number.
        limit: share below the median.
        noises: of each; None: the standard deviation of its samples.
    """
    found = {key: _middle(samples) for key, samples in values.items()}
    broken = {key: f"{metric} came to no result" for key, value in found.items() if not value > 0}
    good = {key: value for key, value in found.items() if value > 0}
    if len(good) < FEWEST:
        return broken
    centre = median(good.values())
    spread = _SIGMA * median([abs(value - centre) for value in good.values()])
    noise = {key: noises[key] if noises else _sigma(values[key]) for key in good}
    usual = max(spread, median(noise.values()))
    out = dict(broken)
    for key, value in good.items():
        if value < centre * (1 - limit) and centre - value > SIGMAS * max(usual, noise[key]):
            out[key] = f"{metric} {shown(metric, value)}, {100 * (1 - value / centre):.0f}% below the median of all"
    return out


def slow_ends(metric: str, pairs: Sequence[Pair], limit: float) -> tuple[dict[tuple[str, int], str], list[str]]:
    """Ends whose pairs are slow, whoever is at the other end; and pairs that are slow between two good ends.

    The slowest end is taken first, and its pairs are left out before the next is looked for: a good end is slow in
    the pairs with a bad one.
    """
    left = list(pairs)
    out: dict[tuple[str, int], str] = {}
    while True:
        ends: dict[tuple[str, int], list[float]] = {}
        within: dict[tuple[str, int], list[float]] = {}
        for pair in left:
            for end in (pair.a, pair.b):
                ends.setdefault(end, []).append(_middle(pair.samples))
                within.setdefault(end, []).append(_sigma(pair.samples))
        noises = {end: median(found) for end, found in within.items()}
        low = {end: words for end, words in lowest(metric, ends, limit, noises).items() if len(ends[end]) > 1}
        if not low:  # of an end with one partner it cannot be told which of the two is slow
            break
        worst = min(low, key=lambda end: (median(ends[end]), end))
        out[worst] = f"{low[worst]}, with {len(ends[worst])} others"
        left = [pair for pair in left if worst not in (pair.a, pair.b)]
    notes = []
    if len(left) >= FEWEST:
        slow = lowest(metric, {(str(i), 0): pair.samples for i, pair in enumerate(left)}, limit)
        for (i, _), words in slow.items():
            a, b = left[int(i)].a, left[int(i)].b
            notes.append(f"between device {a[1]} of {a[0]} and {b[1]} of {b[0]} alone: {words}")
    elif len({pair.a[0] for pair in pairs} | {pair.b[0] for pair in pairs}) == 2 and metric == "rail":
        values = [_middle(pair.samples) for pair in pairs]
        if min(values) < max(values) * (1 - limit):
            notes.append(f"rails between two nodes differ: {', '.join(shown(metric, value) for value in values)}")
    return out, notes


def _split(metric: str, values: Mapping[tuple[str, int], Sequence[float]], limit: float) -> list[str]:
    """Whether nodes fall into two parts, neither of which is the odd one."""
    by_host: dict[str, list[float]] = {}
    for (host, _), samples in values.items():
        by_host.setdefault(host, []).append(_middle(samples))
    middles = {host: median(found) for host, found in by_host.items()}
    if len(middles) < 2:
        return []
    least, most = min(middles, key=lambda h: middles[h]), max(middles, key=lambda h: middles[h])
    if middles[least] >= middles[most] * (1 - limit):
        return []
    a, b = shown(metric, middles[least]), shown(metric, middles[most])
    return [f"{metric}: {least} has {a} and {most} {b}, and which of them is odd cannot be told"]


def _middle(samples: Sequence[float]) -> float:
    return median(samples) if samples and all(map(math.isfinite, samples)) else 0.0


def _sigma(samples: Sequence[float]) -> float:
    """Standard deviation of samples but for the odd one."""
    middle = _middle(samples)
    return _SIGMA * median([abs(sample - middle) for sample in samples]) if samples and middle else 0.0


def _centre(all_samples: Iterable[Sequence[float]]) -> float:
    return median([_middle(samples) for samples in all_samples])


def shown(metric: str, value: float) -> str:
    """A value with its unit, three digits: 21.3 GB/s."""
    unit = "FLOP/s" if metric == "matmul" else "B/s"
    return f"{value / 1e12:.3g} T{unit}" if value >= 1e12 else f"{value / 1e9:.3g} G{unit}"


def rounds(number: int, most: int) -> list[list[int | None]]:
    """Who meets whom: in every round each has another partner, or none; after number - 1 rounds all have met.

    Args:
        number: of players.
        most: rounds; fewer than all are spread evenly over them.

    Returns:
        of each round, the partner of each player.
    """
    if number < 2:
        return []
    seats = number + number % 2  # one seat is empty where they are odd
    chosen = [round(i * (seats - 1) / min(most, seats - 1)) for i in range(min(most, seats - 1))]
    out: list[list[int | None]] = []
    for turn in chosen:
        partner: list[int | None] = [None] * number
        ring = [0, *((i + turn) % (seats - 1) + 1 for i in range(seats - 1))]
        for i in range(seats // 2):
            a, b = ring[i], ring[seats - 1 - i]
            if a < number and b < number:
                partner[a], partner[b] = b, a
        out.append(partner)
    return out
