"""The lives of a run: how often it was started, from which step, and when to give up.

A job that fails at the same place every time would be requeued for ever, billing every try. The run folder
keeps one line a life; a number of lives in a row that began at the same step means no progress.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from hpctrain.errors import LaunchError

FILE = "lives.jsonl"
MAX_WITHOUT_PROGRESS = 3
"""Lives in a row that may begin at the same step."""


@dataclass(frozen=True)
class Life:
    """One start of a run.

    Attributes:
        key: of the launcher: names the job, its step and its restart.
        step: where it began.
    """

    key: str
    step: int


def lives(folder: Path) -> list[Life]:
    """All lives of a run so far; torn lines are left out."""
    path = folder / FILE
    out = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            out.append(Life(**json.loads(line)))
        except (ValueError, TypeError):
            continue
    return out


def begin(folder: Path, life: Life, restarts: int) -> None:
    """Note a life. Called by the first rank.

    Args:
        folder: of the run.
        life: about to begin.
        restarts: how often the job was requeued; one that a person starts is never refused.

    Raises:
        LaunchError: a requeued job that has made no progress in its last lives.
    """
    with (folder / FILE).open("a") as file:
        file.write(json.dumps(asdict(life)) + "\n")
    count = in_a_row(lives(folder))
    if restarts and count > MAX_WITHOUT_PROGRESS:
        raise LaunchError(
            f"{count} lives in a row of {folder} began at step {life.step} and came no further: not tried again; "
            f"look at {folder / 'logs'} for what ends them, then submit the run anew."
        )


def in_a_row(all_lives: list[Life]) -> int:
    """How many of the last lives began where the last one did."""
    count = 0
    for life in reversed(all_lives):
        if life.step != all_lives[-1].step:
            break
        count += 1
    return count
