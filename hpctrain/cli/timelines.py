"""Pictures of a schedule that was played: text that fits a terminal, and a PNG."""

from __future__ import annotations

import statistics
import textwrap
from pathlib import Path
from typing import NamedTuple

from rich.text import Text

from hpctrain.files import write_picture
from hpctrain.layout.actions import Kind, Schedule
from hpctrain.layout.timeline import Span, Timeline


class Look(NamedTuple):
    """How a kind of action is drawn: its letter, its colour on a terminal and in a picture, its name."""

    letter: str
    colour: str
    paint: str
    name: str


LOOKS: dict[Kind, Look] = {
    "forward": Look("F", "blue", "#4c78a8", "forward"),
    "backward": Look("B", "green", "#54a24b", "backward"),
    "backward_input": Look("I", "cyan", "#72b7b2", "gradient of the input"),
    "backward_weight": Look("W", "yellow", "#eeca3b", "gradients of weights"),
}
WIDEST = 4
"""Columns of the shortest action where there is room."""
GAP = " ~ "
IDLE = "."


class Drawing(NamedTuple):
    """Lines of a timeline, and what is to be known of them."""

    lines: list[Text]
    notes: list[str]


def draw(schedule: Schedule, timeline: Timeline, width: int) -> Drawing:
    """One line a rank, at most `width` columns wide.

    An action is as wide as it is long, and shows its letter, and its micro-batch where there is room. What cannot fit
    is left out in the middle, where a long schedule repeats itself, and the notes say so.
    """
    labels = [f"rank {rank}" for rank in range(schedule.stages)]
    margin = len(labels[-1]) + 2
    room = max(width - margin, len(GAP) + 2)
    scale = _scale(timeline, room)
    columns = _column(timeline.end, scale)
    lines = [_line(schedule, spans, scale, columns) for spans in timeline.ranks]
    notes = textwrap.wrap(_legend(schedule), width)
    hidden = sum(_column(span.start, scale) == _column(span.end, scale) for spans in timeline.ranks for span in spans)
    if hidden:
        notes.append(f"{hidden} actions too short for a column are not drawn")
    if columns > room:
        head = (room - len(GAP) + 1) // 2
        tail = columns - (room - len(GAP) - head)
        lines = [line[:head] + GAP + line[tail:] for line in lines]
        notes.append(
            f"shortened: from {head / scale:.4g} to {tail / scale:.4g} of {timeline.end:.4g} is left out at{GAP}"
        )
    return Drawing([Text(label.ljust(margin)) + line for label, line in zip(labels, lines)], notes)


def _scale(timeline: Timeline, room: int) -> float:
    """Columns a unit of time: as many as let all fit, but at least one for the shortest kind of action.

    A kind that takes less than a quarter of the longest is not counted: one column for it would be too many for others.
    """
    lengths: dict[Kind, list[float]] = {}
    for span in (span for spans in timeline.ranks for span in spans):
        lengths.setdefault(span.action.kind, []).append(span.end - span.start)
    usual = [statistics.median(of_kind) for of_kind in lengths.values()]
    shortest = min(length for length in usual if 4 * length >= max(usual))
    fitting = (columns for columns in range(WIDEST, 1, -1) if _column(timeline.end, columns / shortest) <= room)
    return next(fitting, 1) / shortest


def _column(time: float, scale: float) -> int:
    return int(time * scale + 0.5 + 1e-9)


def _line(schedule: Schedule, spans: tuple[Span, ...], scale: float, columns: int) -> Text:
    """What one rank does, one column after another."""
    line = Text()
    for span in spans:
        start, width = _column(span.start, scale), _column(span.end, scale) - _column(span.start, scale)
        line.append(IDLE * (start - len(line)))
        look, chunk = LOOKS[span.action.kind], schedule.chunk(span.action.stage)
        letter = look.letter.lower() if chunk % 2 else look.letter
        label = f"{letter}{span.action.micro_batch}"
        label = label if len(label) <= width else letter[:width]
        line.append(label.ljust(width), style=f"{'black' if chunk % 2 else 'bold black'} on {look.colour}")
    line.append(IDLE * (columns - len(line)))
    return line


def _legend(schedule: Schedule) -> str:
    kinds = {action.kind for order in schedule.ranks for action in order}
    parts = [f"{look.letter} {look.name}" for kind, look in LOOKS.items() if kind in kinds]
    small = ["small letters: odd chunks"] if schedule.chunks > 1 else []
    return ", ".join([*parts, *small, f"{IDLE} idle"])


def picture(schedule: Schedule, timeline: Timeline, title: str, path: Path) -> None:
    """Draw a timeline, as the suffix of the file says: time to the right, a row a rank, later chunks lighter."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(12, 1.6 + 0.4 * min(schedule.stages, 60)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    per_unit = 11 * 72 / timeline.end  # points, of a figure 12 inches wide with its margins
    for rank, spans in enumerate(timeline.ranks):
        for (look, strength), alike in _by_look(schedule, spans).items():
            bars = [(span.start, span.end - span.start) for span in alike]
            rows = (rank - 0.45, 0.9)
            axes.broken_barh(bars, rows, facecolor=look.paint, alpha=strength, edgecolor="white", linewidth=0.5)
        for span in spans:
            label = str(span.action.micro_batch)
            if (span.end - span.start) * per_unit > 6 * len(label):
                middle = (span.start + span.end) / 2
                axes.text(middle, rank, label, ha="center", va="center", fontsize=7)
    kinds = {action.kind for order in schedule.ranks for action in order}
    handles = [Patch(color=look.paint, label=look.name) for kind, look in LOOKS.items() if kind in kinds]
    axes.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=4, frameon=False)
    axes.set(title=title, xlabel="time", xlim=(0, timeline.end), ylim=(schedule.stages - 0.4, -0.6))
    axes.set_yticks(range(schedule.stages), [f"rank {rank}" for rank in range(schedule.stages)])
    write_picture(path, figure)


def _by_look(schedule: Schedule, spans: tuple[Span, ...]) -> dict[tuple[Look, float], list[Span]]:
    """Spans that are drawn alike: by kind, and by chunk, the first at full strength and the last at half."""
    alike: dict[tuple[Look, float], list[Span]] = {}
    for span in spans:
        strength = 1 - 0.5 * schedule.chunk(span.action.stage) / max(1, schedule.chunks - 1)
        alike.setdefault((LOOKS[span.action.kind], strength), []).append(span)
    return alike
