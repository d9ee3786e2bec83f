"""Records for people: a line each, and a progress bar where there is a terminal.

What is shown is made of plain records alone, so it does not matter whether they come from the rank in this
process or from the `metrics.jsonl` of a job that runs elsewhere (`follow`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from hpctrain.telemetry.metrics import Record, Value, from_json


def line(record: Record, total_steps: int | None = None) -> str:
    """The one line a record is shown as: printable characters only, whatever the record holds."""
    step = f"step {record.get('step', '?')}" + (f"/{total_steps}" if total_steps else "")
    parts = {"train": _train, "eval": _eval}.get(str(record.get("kind")), _event)(record)
    text = "  ".join([step, *parts])
    return "".join(c if c.isprintable() else " " for c in text)


def _train(r: Record) -> list[str]:
    parts = [
        f"loss {_number(r.get('loss'), '.4f')}",
        f"grad_norm {_number(r.get('grad_norm'), '.3f')}",
        f"lr {_number(r.get('lr'), '.1e')}",
        f"tokens/s/device {_number(r.get('tps'), ',.0f')}",
        "MFU n/a",
        f"memory {_number(r.get('memory_gib'), '.1f')} GiB",
        f"data {_share(r, 'time/data')}",
        f"comm {_share(r, 'time/communication')}",
    ]
    if r.get("mfu_palm") is not None and r.get("mfu_causal") is not None:
        parts[4] = f"MFU {_number(r['mfu_palm'], '.1%')} palm {_number(r['mfu_causal'], '.1%')} causal"
    if r.get("loss_scale") is not None:
        parts.append(f"loss_scale {_number(r['loss_scale'], 'g')}")
    if r.get("moe/load_imbalance") is not None:
        parts.append(f"load {_number(r['moe/load_imbalance'], '.2f')}x")
    if r.get("moe/dropped_tokens"):
        parts.append(f"dropped {_number(r['moe/dropped_tokens'], ',.0f')}")
    if r.get("skipped_steps"):
        parts.append(f"skipped {_number(r['skipped_steps'], '.0f')}")
    return parts


def _eval(r: Record) -> list[str]:
    parts = [f"validation loss {_number(r.get('loss'), '.4f')}"]
    if r.get("unigram_entropy") is not None:
        parts.append(f"unigram entropy {_number(r['unigram_entropy'], '.4f')}")
    return [*parts, f"over {_number(r.get('eval_tokens'), ',.0f')} tokens"]


def _event(r: Record) -> list[str]:
    shown = {"kind", "time", "step", "event", "message"}
    message = str(r.get("message") or "")
    facts = [f"{key}={value}" for key, value in r.items() if key not in shown]
    return [str(r.get("event", "event")), *([message] if message else []), *facts]


def _number(value: Value, form: str) -> str:
    return format(value, form) if isinstance(value, (int, float)) else "n/a"


def _share(r: Record, key: str) -> str:
    part, whole = r.get(key), r.get("time/step")
    if not isinstance(part, (int, float)) or not isinstance(whole, (int, float)) or not whole > 0:
        return "n/a"
    return f"{part / whole:.0%}"


class ConsoleView:
    """A sink that shows records: below them a progress bar on a terminal, plain lines anywhere else.

    Args:
        total_steps: of the run; None where it is not known, then there is no bar.
        stream: where to; colours and the bar only if it is a terminal that can.
    """

    name = "console"

    def __init__(self, total_steps: int | None, stream: TextIO) -> None:
        self._total, self._stream = total_steps, stream
        self._console: Console | None = None
        self._progress: Progress | None = None
        self._task = TaskID(0)
        if stream.isatty() and os.environ.get("TERM") != "dumb":
            self._console = Console(file=stream, highlight=False)
            if total_steps:
                self._start_bar(self._console, total_steps)

    def _start_bar(self, console: Console, total: int) -> None:
        columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=console)
        self._task = self._progress.add_task("training", total=total)
        self._progress.start()

    def write(self, record: Record) -> None:
        """Show a record."""
        text = line(record, self._total)
        if self._console is None:
            print(text, file=self._stream, flush=True)
            return
        style = {"train": "", "eval": "bold green"}.get(str(record.get("kind")), "cyan")
        self._console.print(Text(text, style))
        step = record.get("step")
        if self._progress is not None and isinstance(step, (int, float)):
            self._progress.update(self._task, completed=step)

    def close(self) -> None:
        """Take the bar away."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def follow(path: Path, stop: Callable[[], bool], poll_s: float = 0.2) -> Iterator[Record]:
    """The records of a file that another process is writing, as they come.

    The file may appear later, end in half a line, be cut, or be replaced when the run resumes. A line carries
    its time, so one that was handed out already is known, and is not handed out again.

    Args:
        path: of the file.
        stop: asked between looks; once it is true, what is there by then is handed out and the iterator ends.
        poll_s: seconds between looks.
    """
    file: IO[bytes] | None = None
    rest, seen = b"", set[int]()
    try:
        while True:
            last = stop()
            fresh = _reopen(path, file)
            if fresh is not file:
                file, rest = fresh, b""
            lines = (rest + file.read()).split(b"\n") if file is not None else [b""]
            rest = lines.pop()
            for text in lines:
                record = None if hash(text) in seen else from_json(text)
                if record is not None:
                    seen.add(hash(text))
                    yield record
            if last:
                return
            time.sleep(poll_s)
    finally:
        if file is not None:
            file.close()


def _reopen(path: Path, file: IO[bytes] | None) -> IO[bytes] | None:
    """The file at `path` now: `file` itself if it is still that one and was not cut."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return file
    if file is not None:
        held = os.fstat(file.fileno())
        if os.path.samestat(held, found) and found.st_size >= file.tell():
            return file
        file.close()
    try:
        return path.open("rb")
    except FileNotFoundError:
        return None
