"""Pictures: bandwidth by size with the fitted lines, and matrices of pairs and rails as heat maps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.comms.fit import Fit, sent
from hpctrain.comms.result import Result, Row
from hpctrain.comms.sizes import named
from hpctrain.files import write_picture
from hpctrain.layout.bus import factor

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#555555", "#000000")
"""Okabe and Ito's, which the colour-blind can tell apart."""


def _figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", dpi=130)


def curves(results: Sequence[Result], path: Path, fits: Sequence[Sequence[Fit]] = ()) -> None:
    """busbw and time over size, a colour a line of the tables; of groups that ran at once, the slowest. Fitted lines
    are dashed; `fits` are those of each result."""
    figure = _figure(11, 4.8)
    bus, time = figure.subplots(1, 2)
    several = len({result.library for result in results}) > 1
    placed = {key for result in results for key in _lines(result)}
    number = 0
    for result, own in zip(results, fits or ((),) * len(results)):
        head = (result.library, str(result.spec.get("note", "")))
        for key, rows in _lines(result).items():
            color = COLORS[number % len(COLORS)]
            number += 1
            both = len({other for other in placed if other[:-1] == key[:-1]}) > 1
            _draw_line(bus, time, rows, color, _label((*head, *key), several, both))
            for fit in own:
                if fit.line == key:
                    _draw_fit(bus, time, fit, rows, color)
    for axes, name in ((bus, "busbw (GB/s, 1e9 B/s)"), (time, "time (us); band from the fastest to p95")):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("S (bytes)")
        axes.set_ylabel(name)
        axes.xaxis.set_major_formatter(lambda value, _: named(value))
        axes.grid(True, which="major", lw=0.4, alpha=0.5)
        axes.spines[["top", "right"]].set_visible(False)
    if number:
        bus.legend(fontsize=7, frameon=False, title="dashed: fitted" if any(fits) else None, title_fontsize=7)
    write_picture(path, figure, dpi=130)


def _lines(result: Result) -> dict[tuple[str, ...], list[Row]]:
    """Rows of each curve by size, the slowest of each."""
    found: dict[tuple[str, ...], dict[int, Row]] = {}
    for row in result.rows:
        if row.size and len(row.ranks) > 1:
            sizes = found.setdefault(row.line, {})
            if row.size not in sizes or row.seconds > sizes[row.size].seconds:
                sizes[row.size] = row
    return {key: [sizes[size] for size in sorted(sizes)] for key, sizes in found.items()}


def _draw_line(bus: Any, time: Any, rows: Sequence[Row], color: str, label: str) -> None:
    sizes = [row.size for row in rows]
    bus.plot(sizes, [row.busbw or 0 for row in rows], marker="o", ms=3, lw=1.2, color=color, label=label)
    time.plot(sizes, [row.seconds * 1e6 for row in rows], marker="o", ms=3, lw=1.2, color=color)
    low, high = ([getattr(row.spread, name) * 1e6 for row in rows] for name in ("min", "p95"))
    time.fill_between(sizes, low, high, color=color, alpha=0.15, lw=0)


def _draw_fit(bus: Any, time: Any, fit: Fit, rows: Sequence[Row], color: str) -> None:
    row = rows[0]
    over, times = sent(row) / row.size, factor(row.operation, len(row.ranks))
    every = np.geomspace(row.size, rows[-1].size, 200)
    seconds = np.array([fit.seconds(size * over) for size in every])
    bus.plot(every, every * times / seconds / 1e9, ls="--", lw=1, color=color)
    time.plot(every, seconds * 1e6, ls="--", lw=1, color=color)


def _label(key: Sequence[str], several: bool, both: bool) -> str:
    library, note, operation, _, algorithm, groups, ranks, dtype, reduction, placement = key
    parts = [operation, algorithm, f"over {groups} of {ranks}" if groups != "world" else f"{ranks} ranks"]
    parts += [dtype if dtype != "float32" else "", reduction if reduction not in ("sum", "none") else ""]
    parts += [placement.replace("_", " ") if both else "", note]
    return " ".join(filter(None, [*parts, f"({library})" if several else ""]))


def matrix(
    values: Sequence[Sequence[float | None]], path: Path, title: str, unit: str, labels: Sequence[str], axis: str
) -> None:
    """A heat map; what was not measured is grey. Dark is slow, so that slow ones stand out."""
    from matplotlib import colormaps

    data = np.array([[np.nan if value is None else value for value in row] for row in values], dtype=float)
    n = len(data)
    side = min(12.0, max(4.5, 0.34 * n + 2.5))
    figure = _figure(side + 1, side)
    axes = figure.subplots()
    colors = colormaps["viridis"].with_extremes(bad="#dddddd")
    shown = axes.imshow(data, cmap=colors, vmin=0, vmax=float(np.nanmax(data)) if np.isfinite(data).any() else 1)
    every = max(1, n // 32)
    ticks = list(range(0, n, every))
    axes.set_xticks(ticks, [labels[i] for i in ticks], rotation=90 if n > 6 else 0, fontsize=7)
    axes.set_yticks(ticks, [labels[i] for i in ticks], fontsize=7)
    axes.set_xlabel(axis)
    axes.set_ylabel(axis)
    axes.set_title(title, fontsize=9)
    if n <= 16:
        middle = float(np.nanmax(data)) / 2 if np.isfinite(data).any() else 0
        for (i, j), value in np.ndenumerate(data):
            if np.isfinite(value):
                axes.text(j, i, f"{value:.3g}", ha="center", va="center", fontsize=6,
                          color="white" if value < middle else "black")  # fmt: skip
    figure.colorbar(shown, label=unit, shrink=0.85)
    write_picture(path, figure, dpi=130)
