"""Published scaling curves, to draw beside one's own."""

from __future__ import annotations

import csv
from functools import cache
from importlib.resources import files
from typing import NamedTuple


class Curve(NamedTuple):
    """A curve: `weak` or `strong`, devices and FLOP/s of each (1e12), and where they were read."""

    name: str
    kind: str
    devices: tuple[int, ...]
    tflops: tuple[float, ...]
    source: str

    def efficiency(self) -> list[float]:
        """FLOP/s of a device over those at the smallest size."""
        return [rate / self.tflops[0] for rate in self.tflops]


@cache
def curves(kind: str) -> tuple[Curve, ...]:
    """All of a kind."""
    text = files("hpctrain.plan").joinpath("published.csv").read_text(encoding="utf-8")
    rows = list(csv.DictReader(line for line in text.splitlines() if not line.startswith("#")))
    out = []
    for name in dict.fromkeys(row["curve"] for row in rows if row["kind"] == kind):
        mine = [row for row in rows if row["curve"] == name and row["kind"] == kind]
        devices, rates = tuple(int(r["devices"]) for r in mine), tuple(float(r["tflops"]) for r in mine)
        out.append(Curve(name, kind, devices, rates, mine[0]["source"]))
    return tuple(out)
