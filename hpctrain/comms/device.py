"""Rates of one device and of a disk: matrix products, copies in memory, writes and reads. One process, no ranks."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from hpctrain.errors import ConfigError
from hpctrain.layout.units import MIB
from hpctrain.telemetry.disk import transfers


def _clock(act: Callable[[], Any], iterations: int, device: torch.device) -> list[float]:
    """Seconds of each call, after two that do not count."""
    from hpctrain.comms.clock import repeat, timed
    from hpctrain.comms.torchmemory import TorchMemory

    repeat(act, 2, TorchMemory(device))
    if device.type == "cuda":
        from hpctrain.comms.cuda import timed_events

        return timed_events(act, iterations)
    return timed(act, iterations)


def gemm(
    shapes: Sequence[tuple[int, int, int]], dtypes: Sequence[str], iterations: int, device: torch.device
) -> Iterator[dict[str, Any]]:
    """Products [m, k] x [k, n]: seconds and FLOP/s, a multiply-add counted as two."""
    for dtype in dtypes:
        for m, n, k in shapes:
            kind = getattr(torch, dtype)
            a = torch.randn(m, k, device=device).to(kind)
            b = torch.randn(k, n, device=device).to(kind)
            out = torch.empty(m, n, dtype=kind, device=device)
            times = _clock(lambda a=a, b=b, out=out: torch.mm(a, b, out=out), iterations, device)  # type: ignore[misc]
            middle = statistics.median(times)
            yield {"m": m, "n": n, "k": k, "dtype": dtype, "seconds": middle, "flops": 2 * m * n * k / middle}


def shapes_of(text: str) -> list[tuple[int, int, int]]:
    """`1024` or `MxNxK`, with commas between.

    Raises:
        ConfigError: it is neither.
    """
    found = []
    for part in text.split(","):
        sizes = part.lower().split("x")
        if len(sizes) not in (1, 3) or not all(s.isdigit() and int(s) for s in sizes):
            raise ConfigError("--shapes", text, "must be sizes N or MxNxK with commas between")
        numbers = tuple(map(int, sizes)) * (3 if len(sizes) == 1 else 1)
        found.append((numbers[0], numbers[1], numbers[2]))
    return found


def memory(sizes: Sequence[int], iterations: int, device: torch.device) -> Iterator[dict[str, Any]]:
    """Copies on the device (bytes read and bytes written are both counted, as STREAM does), and on a GPU from and to
    pinned memory of the host (bytes are counted once).

    Raises:
        ConfigError: there is no memory for a size.
    """
    from hpctrain.comms.torchmemory import TorchMemory

    for size in sizes:
        a, b = (TorchMemory(device).zeros(size, "uint8") for _ in range(2))
        yield _rate("copy", size, 2 * size, _clock(lambda a=a, b=b: b.copy_(a), iterations, device))  # type: ignore[misc]
        if device.type == "cuda":
            host = torch.zeros(size, dtype=torch.uint8, pin_memory=True)
            ways = (
                ("host to device", lambda a=a, h=host: a.copy_(h, non_blocking=True)),  # type: ignore[misc]
                ("device to host", lambda a=a, h=host: h.copy_(a, non_blocking=True)),  # type: ignore[misc]
            )
            for name, act in ways:
                yield _rate(name, size, size, _clock(act, iterations, device))


def _rate(name: str, size: int, moved: int, times: Sequence[float]) -> dict[str, Any]:
    middle = statistics.median(times)
    return {"what": name, "size": size, "seconds": middle, "rate": moved / middle}


def nvme(folder: Path, size: int, rounds: int, threads: int = 1) -> Iterator[dict[str, Any]]:
    """Write a file and read it back as offloading does (`telemetry/disk.py`): bytes/s, median of the rounds.

    Args:
        folder: on the disk.
        size: bytes for each thread; whole blocks of 1 MiB.
        threads: blocks of 1 MiB that are under way at the same time.
    """
    size = max(MIB, size // MIB * MIB)
    found = transfers(folder, size * threads, MIB, threads, rounds)
    for name, seconds in (("write", found.write), ("read", found.read)):
        middle = statistics.median(seconds)
        yield {
            "what": name,
            "size": size,
            "threads": threads,
            "direct": found.direct,
            "seconds": middle,
            "rate": size * threads / middle,
        }
