"""What submissions leave behind."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hpctrain.launch.submit import leftovers

Programs = Callable[[str, str], None]


def left(home: Path, name: str, *inside: str) -> None:
    (home / "code" / name).mkdir(parents=True)
    for path in inside:
        (home / "jobs" / name / path).mkdir(parents=True)


def there(home: Path) -> list[str]:
    jobs, code = (sorted(path.name for path in (home / kind).iterdir()) for kind in ("jobs", "code"))
    assert jobs == code
    return jobs


@pytest.fixture
def home(tmp_path: Path, programs: Programs) -> Path:
    """A run folder with nine submissions; job 3 waits, and of array 4 one element runs."""
    rows = (r"3|PENDING|None|\n4_0|COMPLETED|None|\n4_1|RUNNING|None|n0\n", r"2|COMPLETED|None|n0\n")
    programs("squeue", f"printf '{''.join(rows)}'")
    programs("sacct", 'echo "sacct: error: Slurm accounting storage is disabled" >&2; exit 1')
    inside = {1: ("1",), 2: ("2",), 3: ("3",), 4: ("4_0", "4_1"), 5: ("5", "5.pkl")}
    for number in range(1, 10):
        left(tmp_path / "run", f"2026010{number}-120000-abcdef", *inside.get(number, (str(number),)))
    return tmp_path / "run"


def test_of_ended_jobs_but_the_last_nothing_stays(home: Path) -> None:
    leftovers.clear(home, "20260109-120000-abcdef")
    assert [int(name[7]) for name in there(home)] == [3, 4, 5, 6, 7, 8, 9]


def test_what_belongs_to_somebody_else_stays(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm does not tell of their jobs."""
    monkeypatch.setattr(os, "getuid", lambda: -1)
    leftovers.clear(home, "20260109-120000-abcdef")
    assert len(there(home)) == 9


def test_notes_by_which_ranks_met_go_when_they_are_old(home: Path) -> None:
    for run in (home, home / "lr-1"):
        (run / "rendezvous").mkdir(parents=True)
        for name in ("old", "new"):
            (run / "rendezvous" / f"{name}.json").touch()
        os.utime(run / "rendezvous" / "old.json", (0, time.time() - 2 * leftovers.MEETING_S))
    leftovers.clear(home, "20260109-120000-abcdef")
    assert [path.name for path in home.rglob("rendezvous/*.json")] == ["new.json"] * 2
