"""`hpctrain plan schedule`: what each rank of a pipeline does when."""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from rich.console import Console

from hpctrain.cli.outputs import picture_file
from hpctrain.cli.tables import whole_lines
from hpctrain.errors import ConfigError
from hpctrain.layout.schedule import SCHEDULES

if TYPE_CHECKING:
    from hpctrain.layout.actions import Schedule
    from hpctrain.layout.schedule_check import Peak
    from hpctrain.layout.schedule_claims import Bubble
    from hpctrain.layout.timeline import Timeline, Times

F = TypeVar("F", bound=Callable[..., Any])
MOST = 50_000
"""Forwards of one schedule that are played in seconds."""
NO_CLAIM = "none for these sizes and times (see docs/schedules.md)"


def _durations(ctx: click.Context, param: click.Parameter, value: str) -> tuple[float, ...]:
    """One number, or several separated by commas."""
    try:
        times = tuple(map(float, value.split(",")))
    except ValueError:
        raise click.BadParameter(f"{value!r} is no number, nor numbers separated by commas.") from None
    if not all(0 < time < math.inf for time in times):
        raise click.BadParameter(f"{value!r} is not above 0.")
    return times


def _time(flag: str, help: str) -> Callable[[F], F]:
    """An option for the time of one kind of action."""
    return click.option(flag, callback=_durations, metavar="TIME[,...]", default="1", show_default=True, help=help)


@click.command(epilog="\b\nExample:  hpctrain plan schedule --stages 4 --chunks 2 --micro-batches 8 --schedule zb-h1")
@click.option("--stages", type=click.IntRange(1), required=True, help="Ranks of the pp axis.")
@click.option("--chunks", type=click.IntRange(1), help="Virtual stages a rank holds. [default: 1, or 2 if it must]")
@click.option("--micro-batches", type=click.IntRange(1), required=True, help="Micro-batches of a step.")
@click.option("--schedule", "name", type=click.Choice(list(SCHEDULES)), default="1f1b", show_default=True)
@_time("--forward", "Of a micro-batch on all chunks of a rank; or one number a virtual stage.")
@_time("--backward-input", "The same for the gradient of the input.")
@_time("--backward-weight", "The same for the gradients of the weights.")
@click.option("--latency", type=click.FloatRange(0, math.inf, max_open=True), default=0.0, help="Of a transfer.")
@click.option("--png", type=picture_file("png"), help="Draw the timeline into this file, too.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def schedule(
    stages: int,
    chunks: int | None,
    micro_batches: int,
    name: str,
    latency: float,
    png: Path | None,
    as_json: bool,
    **durations: tuple[float, ...],
) -> None:
    """Draw what each rank of a pipeline does when.

    Beside it: the idle part of a step and its formula, and the activations that ranks keep. Times are in any one
    unit. A single number is a rank's whole share of the model, divided evenly over its chunks, so that schedules with
    and without chunks can be compared. A backward that is not split takes both of its times.
    """
    from hpctrain.cli.timelines import picture
    from hpctrain.layout.schedule import make_schedule
    from hpctrain.layout.schedule_check import check
    from hpctrain.layout.timeline import play

    chunks = chunks or (2 if name in ("interleaved", "zb-v") else 1)
    if stages * chunks * micro_batches > MOST:
        allowed = f"{stages} stages x {chunks} chunks x micro-batches must be at most {MOST:,}"
        raise ConfigError("micro_batches", micro_batches, allowed, "fewer show the same pattern")
    with Console(stderr=True).status("playing the schedule"):
        made = make_schedule(name, stages, chunks, micro_batches)
        timeline = play(made, _times(made, latency, durations))
        played = Played(made, timeline, check(made), _claim(made, latency, durations))
        if png:
            picture(made, timeline, played.title, png)
    if as_json:
        click.echo(json.dumps(played.plain(), indent=2))
    else:
        played.show()


@dataclass(frozen=True)
class Played:
    """A schedule, how it went, what its ranks keep, and the bubble it claims."""

    schedule: Schedule
    timeline: Timeline
    peaks: tuple[Peak, ...]
    claim: Bubble | None

    @property
    def title(self) -> str:
        ranks = "1 rank" if self.schedule.stages == 1 else f"{self.schedule.stages} ranks"
        chunks = f" x {self.schedule.chunks} chunks" if self.schedule.chunks > 1 else ""
        return f"{self.schedule.name}: {ranks}{chunks}, {self.schedule.micro_batches} micro-batches"

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        made, timeline = self.schedule, self.timeline
        sizes = {"stages": made.stages, "chunks": made.chunks, "micro_batches": made.micro_batches}
        return {
            "schedule": made.name,
            **sizes,
            "step": timeline.end,
            "bubble": timeline.bubble,
            "own_bubble": timeline.own_bubble,
            "claim": self.claim._asdict() if self.claim else None,
            "peaks": [asdict(peak) for peak in self.peaks],
            "ranks": [
                [{**asdict(s.action), "start": s.start, "end": s.end} for s in spans] for spans in timeline.ranks
            ],
        }

    def show(self) -> None:
        """For people."""
        from hpctrain.cli.timelines import draw

        console = whole_lines(sys.stdout)
        width = min(shutil.get_terminal_size((80, 24)).columns, console.width)
        drawing = draw(self.schedule, self.timeline, width)
        console.print(self.title, "", *drawing.lines, "", *drawing.notes, "", sep="\n")
        together, own = self.timeline.bubble, self.timeline.own_bubble
        apart = f"; {own:.2%} where steps need not begin and end together" if together - own > 5e-5 else ""
        console.print(f"step         {self.timeline.end:.6g}")
        console.print(f"bubble       {together:.2%}{apart}")
        console.print(f"formula      {f'{self.claim.share:.2%} = {self.claim.formula}' if self.claim else NO_CLAIM}")
        unit = "stage" if self.schedule.chunks == 1 else "chunk"
        console.print(f"activations  {_by_rank([p.alive for p in self.peaks])}; of one micro-batch and {unit} each")
        if any(peak.weights for peak in self.peaks):
            whole = _by_rank([peak.whole for peak in self.peaks])
            console.print(f"of these     {whole} whole, others for weights alone")


def _by_rank(counts: list[int]) -> str:
    """The most, and the fewest and where, if ranks differ."""
    most, fewest = max(counts), min(counts)
    if most == fewest:
        return f"at most {most} on every rank" if len(counts) > 1 else f"at most {most}"
    return f"at most {most} on rank {counts.index(most)}, {fewest} on rank {counts.index(fewest)}"


def _times(schedule: Schedule, latency: float, durations: dict[str, tuple[float, ...]]) -> Times:
    """Times of every virtual stage from what was said on the command line."""
    from hpctrain.layout.timeline import Times

    stages, each = schedule.virtual_stages, {}
    for name, times in durations.items():
        if len(times) not in (1, stages):
            allowed = f"must be one number, or {stages}, one a virtual stage"
            raise ConfigError(name, ",".join(f"{time:g}" for time in times), allowed)
        each[name] = times if len(times) == stages else (times[0] / schedule.chunks,) * stages
    return Times(**each, latency=latency)


def _claim(schedule: Schedule, latency: float, durations: dict[str, tuple[float, ...]]) -> Bubble | None:
    """The bubble by formula, where stages are equal and transfers take no time."""
    from hpctrain.layout.schedule_claims import claimed_bubble

    if latency or any(len(set(times)) > 1 for times in durations.values()):
        return None
    whole = {name: times[0] * (schedule.chunks if len(times) > 1 else 1) for name, times in durations.items()}
    kinds = (whole["forward"], whole["backward_input"], whole["backward_weight"])
    return claimed_bubble(schedule.name, schedule.stages, schedule.chunks, schedule.micro_batches, *kinds)
