"""What a study has found, as rows, sentences, CSV and a page."""

from __future__ import annotations

import csv
import html
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.files import write_whole
from hpctrain.layout.units import in_gib
from hpctrain.plan.scaling import Law, Mean, Point, Wire, efficiency, growth, law, wire_of
from hpctrain.scale.predict import sent_of
from hpctrain.scale.study import Study

CSV_FILE, PAGE_FILE, PICTURES = "scaling.csv", "scaling.html", ("scaling.png", "scaling.svg")
SEEN = 0.01
"""Shares of a step below this are not spoken of."""


@dataclass(frozen=True)
class Report:
    """A study with what is measured and predicted of it.

    Attributes:
        measured: sizes that are, the smallest first.
        predicted: by number of nodes; a sentence where the planner cannot price it.
        where: it was run or priced for, in words.
    """

    study: Study
    measured: Sequence[Point]
    predicted: Mapping[int, Point | str]
    where: str

    @property
    def shown(self) -> Sequence[Point]:
        """What the curve is: measured, or where nothing is, predicted."""
        return self.measured or [p for p in self.predicted.values() if isinstance(p, Point)]

    @property
    def law(self) -> Law | None:
        return law(self.shown) if self.shown else None

    @property
    def wire(self) -> Wire | None:
        """Of what was measured: a prediction was made of latencies and rates in the first place."""
        if not self.measured:
            return None
        messages, bytes_ = zip(*sent_of(self.study, [p.nodes for p in self.measured]))
        return wire_of([p.exposed.value for p in self.measured], messages, bytes_)

    def missing(self) -> list[int]:
        """Sizes that are not measured."""
        return [n for n in self.study.nodes if n not in {p.nodes for p in self.measured}]


def rows(report: Report) -> list[dict[str, Any]]:
    """Numbers of every size, for CSV and JSON; None where there is none. Rates in tokens/s, times in seconds."""
    of_measured = {p.nodes: (p, e) for p, e in zip(report.measured, _efficiency(report.measured))}
    guesses = [p for p in report.predicted.values() if isinstance(p, Point)]
    of_predicted = {p.nodes: (p, e.value) for p, e in zip(guesses, _efficiency(guesses))}
    out = []
    for nodes in report.study.nodes:
        size = report.study.size(nodes)
        row: dict[str, Any] = {"nodes": nodes, "devices": size.cluster.nodes * size.cluster.gpus_per_node}
        row["global_batch"] = size.train.global_batch
        point, share = of_measured.get(nodes, (None, None))
        row |= _interval("tokens_per_second", point.rate if point else None)
        row["tokens_per_second_device"] = point and point.rate.value / point.devices
        row |= _interval("step_seconds", point.seconds if point else None)
        row |= _interval("efficiency", share)
        row["mfu_causal"] = point and point.mfu
        row |= _interval("exposed_seconds", point.exposed if point else None)
        row["exposed_share"] = point and point.waits
        guess, ours = of_predicted.get(nodes, (None, None))
        row["predicted_tokens_per_second"] = guess and guess.rate.value
        row["predicted_efficiency"] = ours
        row["predicted_mfu_causal"] = guess and guess.mfu
        row["predicted_exposed_share"] = guess and guess.waits
        row["predicted_memory_bytes"] = guess and guess.needs
        row["device_memory_bytes"] = guess and guess.room
        row["predicted_fits"] = guess and guess.fits
        row["runs"], row["steps"] = (point.runs, point.steps) if point else (0, 0)
        out.append(row)
    return out


def _efficiency(points: Sequence[Point]) -> list[Mean]:
    return efficiency(points) if points else []


def _interval(name: str, mean: Mean | None) -> dict[str, float | None]:
    if mean is None:
        return {name: None, f"{name}_low": None, f"{name}_high": None}
    return {name: mean.value, f"{name}_low": mean.low, f"{name}_high": mean.high}


def table(report: Report) -> list[dict[str, str]]:
    """The same for people."""
    found, out = rows(report), []
    all_fit = all(row["predicted_fits"] is not False for row in found)
    for row in found:
        shown = {
            "nodes": str(row["nodes"]),
            "devices": str(row["devices"]),
            "tokens/s": _with(row, "tokens_per_second", "{:,.0f}"),
            "step s": _with(row, "step_seconds", "{:.3g}"),
            "efficiency %": _with(row, "efficiency", "{:.1f}", 100),
            "MFU %": _plain(row["mfu_causal"], "{:.2f}", 100),
            "waits %": _plain(row["exposed_share"], "{:.1f}", 100),
            "predicted tokens/s": _plain(row["predicted_tokens_per_second"], "{:,.0f}"),
            "efficiency % ": _plain(row["predicted_efficiency"], "{:.1f}", 100),
            "waits % ": _plain(row["predicted_exposed_share"], "{:.1f}", 100),
        }
        if not report.measured:
            shown = {k: v for k, v in shown.items() if k in ("nodes", "devices") or k.endswith(" ") or "predicted" in k}
            shown["MFU %"] = _plain(row["predicted_mfu_causal"], "{:.1f}", 100)
        if not all_fit:
            shown["memory"] = {None: "-", True: "fits", False: "does not fit"}[row["predicted_fits"]]
        out.append(shown)
    return out


def _plain(value: float | None, form: str, times: float = 1.0) -> str:
    return "-" if value is None else form.format(value * times)


def _with(row: Mapping[str, Any], name: str, form: str, times: float = 1.0) -> str:
    value, high = row[name], row[f"{name}_high"]
    if value is None:
        return "-"
    wide = "" if high is None else " ± " + form.format((high - value) * times)
    return form.format(value * times) + wide


def verdict(report: Report) -> list[str]:
    """What stops the curve, in sentences, which say where it is predicted; first, what of that cannot run."""
    said = _of_curve(report)
    return _too_large(report) + (said if report.measured else [f"predicted: {text}" for text in said])


def _too_large(report: Report) -> list[str]:
    """Predicted sizes that devices have no memory for, in a sentence."""
    nodes, needs, room = [], [], 0.0
    for point in report.predicted.values():
        if isinstance(point, Point) and point.fits is False:
            assert point.needs is not None and point.room is not None
            nodes.append(str(point.nodes))
            needs.append(in_gib(point.needs))
            room = point.room
    if not nodes:
        return []
    *before, last = dict.fromkeys(needs)
    needed = f"{', '.join(before)} and {last}" if before else last
    return [
        f"nodes={','.join(nodes)} cannot run as predicted: a device needs {needed} GiB and has {in_gib(room)} GiB for "
        "it; hpctrain plan finds layouts that fit"
    ]


def _of_curve(report: Report) -> list[str]:
    points = report.shown
    if len(points) < 2:
        return ["one size says nothing of a curve: name more nodes"]
    first, last = points[0], points[-1]
    shares = efficiency(points)
    out = [
        f"from {first.devices} to {last.devices} devices {last.rate.value / first.rate.value:.2f} times the tokens/s, "
        f"{100 * shares[-1].value:.1f}% of ideal"
    ]
    more = growth(first, last, report.study.strong)
    grown = [f"{name} {100 * s / last.seconds.value:.0f}%" for name, s in more.items() if s > SEEN * last.seconds.value]
    out.append(
        "what makes a step longer than ideal, of its time: " + ", ".join(grown)
        if grown
        else "no part of a step grows by more than a percent of it: nothing stops the curve yet"
    )
    if (wire := report.wire) is not None and last.waits > SEEN:
        out.append(_of_wire(report, wire, last))
    if (found := report.law) is not None:
        out.append(_of_law(found, first))
    return out


def _of_wire(report: Report, wire: Wire, last: Point) -> str:
    messages, bytes_ = sent_of(report.study, [last.nodes])[0]
    whole = wire.seconds(messages, bytes_)
    late = messages * wire.latency / whole
    rate = "without limit" if wire.rate == float("inf") else f"{wire.rate / 1e9:.3g} GB/s a rank"
    what = "bandwidth" if late < 0.5 else "latency"
    return (
        f"waiting is as {wire.latency * 1e6:.3g} us a message and {rate}: at {last.devices} devices "
        f"{messages:,.0f} messages are {100 * late:.0f}% of it and {bytes_ / 2**20:,.1f} MiB the rest, "
        f"so {what} bounds it"
    )


def _of_law(found: Law, first: Point) -> str:
    name = "the universal scalability law" if found.coherence > 0 else "Amdahl's law"
    text = f"{name} fits within {100 * found.error:.1f}%: {100 * found.contention:.2f}% serial"
    if found.peak is None:
        limit = "" if not found.contention else f", no more than {1 / found.contention:,.0f} times the smallest size"
        return text + limit
    return (
        text
        + f", {100 * found.coherence:.3f}% for each pair; tokens/s peak at {found.peak * first.devices:,.0f} devices"
    )


def write(report: Report, folder: Path) -> list[Path]:
    """The table as CSV, the figure, and a page with all of it; their paths."""
    from hpctrain.scale.draw import draw

    text = io.StringIO()
    made = rows(report)
    out = csv.DictWriter(text, list(made[0]))
    out.writeheader()
    out.writerows(made)
    write_whole(folder / CSV_FILE, text.getvalue())
    for name in PICTURES:
        draw(report, folder / name)
    write_whole(folder / PAGE_FILE, page(report))
    return [folder / name for name in (CSV_FILE, *PICTURES, PAGE_FILE)]


def page(report: Report) -> str:
    """The page."""
    study = report.study
    lines = table(report)
    head = "".join(f"<th>{html.escape(name.strip())}</th>" for name in lines[0])
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(value)}</td>" for value in line.values()) + "</tr>" for line in lines
    )
    said = "".join(f"<li>{html.escape(text)}.</li>" for text in verdict(report))
    cannot = [f"<li>{n} nodes: {html.escape(p)}</li>" for n, p in report.predicted.items() if isinstance(p, str)]
    runs = "an interval is 95%, over runs, or over blocks of steps of one run" if report.measured else "nothing was run"
    style = "body{font-family:sans-serif;max-width:60em;margin:2em auto}td,th{padding:.2em .8em;text-align:right}"
    return (
        f'<!doctype html><meta charset="utf-8"><title>{html.escape(study.base.name)}</title><style>{style}</style>'
        f"<h1>{html.escape(study.base.name)}</h1><p>{study.kind} scaling, {html.escape(report.where)}; {runs}.</p>"
        f'<img src="{PICTURES[1]}" style="width:100%"><table><tr>{head}</tr>{body}</table>'
        f"<h2>What stops the curve</h2><ul>{said}</ul>"
        + (f"<h2>Not predicted</h2><ul>{''.join(cannot)}</ul>" if cannot else "")
        + "\n"
    )
