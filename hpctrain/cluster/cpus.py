"""CPU lists (`0-3,8`) and CPU masks (`ff,00000000`) of Linux, both ways."""

from __future__ import annotations

import re
from collections.abc import Iterable

from hpctrain.cluster.node import Cpus

MOST = 1 << 16
"""CPUs above this number are taken for damage."""


def parse_list(text: str) -> Cpus:
    """CPUs of a list such as `0-3,8`.

    Raises:
        ValueError: not such a list.
    """
    cpus: set[int] = set()
    for part in text.strip().split(","):
        match = re.fullmatch(r"\s*([0-9]{1,6})(?:-([0-9]{1,6}))?\s*", part)
        if not match:
            raise ValueError(f"{text!r} is not a list of CPUs")
        first, last = int(match[1]), int(match[2] or match[1])
        if first > last or last > MOST:
            raise ValueError(f"{text!r} holds the range {part.strip()!r}")
        if not cpus.isdisjoint(range(first, last + 1)):
            raise ValueError(f"{text!r} names a CPU twice")
        cpus.update(range(first, last + 1))
    return tuple(sorted(cpus))


def parse_mask(text: str) -> Cpus:
    """CPUs of a mask in words of 32 bits, the highest first, as the kernel, NCCL and hwloc write it.

    Raises:
        ValueError: not such a mask.
    """
    value = 0
    for word in text.strip().split(","):
        if not re.fullmatch(r"(0[xX])?[0-9a-fA-F]{0,16}", word):
            raise ValueError(f"{text!r} is not a mask of CPUs")
        value = value << 32 | int(word.lower().removeprefix("0x") or "0", 16)
    if value.bit_length() > MOST:
        raise ValueError(f"{text!r} is not a mask of CPUs")
    return tuple(i for i in range(value.bit_length()) if value >> i & 1)


def format_list(cpus: Cpus) -> str:
    """The shortest list: `0-3,8`."""
    runs: list[list[int]] = []
    for cpu in cpus:
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def cores(told: Iterable[Cpus]) -> tuple[Cpus, ...]:
    """Threads of each core, once; () if a core has none or two share one: a part of them would mislead."""
    found = sorted(set(told))
    threads = [cpu for core in found for cpu in core]
    return tuple(found) if all(found) and len(threads) == len(set(threads)) else ()
