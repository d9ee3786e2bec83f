"""The curves of a study: ideal, measured, predicted and published on one figure."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.files import write_picture
from hpctrain.plan.published import curves
from hpctrain.plan.scaling import Point, efficiency

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from hpctrain.scale.report import Report

MEASURED, PREDICTED, IDEAL, PUBLISHED = "C0", "C1", "0.5", "0.75"


def draw(report: Report, path: Path) -> None:
    """Draw tokens/s and efficiency over devices into a picture; its ending says of which kind."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    guesses = [p for p in report.predicted.values() if isinstance(p, Point)]
    _rates(left, report, guesses)
    _shares(right, report, guesses)
    figure.suptitle(f"{report.study.base.name}: {report.study.kind} scaling, {report.where}", fontsize=10)
    write_picture(path, figure)


def _rates(axes: Axes, report: Report, guesses: list[Point]) -> None:
    first = report.shown[0]
    sizes = sorted({p.devices for p in [*report.measured, *guesses]})
    axes.plot(
        sizes, [first.rate.value * n / first.devices for n in sizes], "--", color=IDEAL, linewidth=1, label="ideal"
    )
    if report.measured:
        axes.errorbar(
            [p.devices for p in report.measured],
            [p.rate.value for p in report.measured],
            [p.rate.half or 0.0 for p in report.measured],
            fmt="o-", color=MEASURED, capsize=3, label="measured, 95%",
        )  # fmt: skip
    if guesses:
        axes.plot(
            [p.devices for p in guesses], [p.rate.value for p in guesses], "x--", color=PREDICTED, label="predicted"
        )
    _logarithmic(axes, sizes)
    axes.set(yscale="log", xlabel="devices", ylabel="tokens/s")
    axes.legend(fontsize=8)


def _shares(axes: Axes, report: Report, guesses: list[Point]) -> None:
    sizes: list[float] = sorted({p.devices for p in [*report.measured, *guesses]})
    for number, curve in enumerate(curves(report.study.kind)):
        of_first = [n / curve.devices[0] * sizes[0] for n in curve.devices]  # each begins where ours does
        style = ("-", ":", "-.")[number % 3]
        axes.plot(of_first, [100 * e for e in curve.efficiency()], style, color=PUBLISHED, label=curve.name)
        sizes = [*sizes, *(n for n in of_first if n <= 4 * max(p.devices for p in report.shown))]
    axes.axhline(100, linestyle="--", color=IDEAL, linewidth=1, label="ideal")
    if report.measured:
        found = efficiency(report.measured)
        axes.errorbar(
            [p.devices for p in report.measured],
            [100 * e.value for e in found],
            [100 * (e.half or 0.0) for e in found],
            fmt="o", color=MEASURED, capsize=3, label="measured, 95%",
        )  # fmt: skip
    if guesses:
        axes.plot(
            [p.devices for p in guesses], [100 * e.value for e in efficiency(guesses)], "x--", color=PREDICTED,
            label="predicted",
        )  # fmt: skip
    if report.law is not None:
        first = report.shown[0].devices
        places = [first * (max(sizes) / first) ** (i / 60) for i in range(61)]
        law = [100 * report.law.rate(n / first) * first / n for n in places]
        axes.plot(places, law, color=MEASURED if report.measured else PREDICTED, linewidth=0.8, label="law that fits")
    _logarithmic(axes, sizes)
    axes.set(xlim=(min(sizes) * 0.9, max(sizes) * 1.1), ylim=(0, 125), xlabel="devices", ylabel="efficiency, %")
    axes.legend(fontsize=7)


def _logarithmic(axes: Axes, sizes: list[float] | list[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.grid(alpha=0.3)
