"""Where records go. A sink that fails, for example on a full disk, never stops training."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from hpctrain.telemetry.metrics import Record, from_json, to_json

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_FOLDER = "tensorboard"


class Sink(Protocol):
    """Takes records, one at a time."""

    @property
    def name(self) -> str:
        """For messages."""
        ...

    def write(self, record: Record) -> None: ...

    def close(self) -> None: ...


class JsonlSink:
    """One JSON object a line, in the file as soon as `write` returns.

    Lines of an earlier life of the run past the step it continues from are taken out first, by replacing the
    file, so that every step is there once; so are lines torn by a crash. Of a run that begins anew the earlier file is
    kept as `metrics-1.jsonl`, `metrics-2.jsonl`, ...

    Args:
        path: made if it is not there.
        after_step: the step the run continues from; 0 for a run from the beginning.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path, after_step: int = 0) -> None:
        self.name, self.path = path.name, path
        self.dropped = _keep_until(path, after_step)
        self._file = path.open("ab", buffering=0)
        self._end = os.fstat(self._file.fileno()).st_size

    def write(self, record: Record) -> None:
        """Append a record and the time. A line that does not fit on the disk leaves nothing behind."""
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="microseconds")
        line = (to_json({"time": now, **record}) + "\n").encode()
        try:
            done = 0
            while done < len(line):
                done += self._file.write(line[done:]) or 0
        except OSError:
            self._file.truncate(self._end)
            raise
        self._end += len(line)

    def close(self) -> None:
        """Make what was written durable."""
        if not self._file.closed:
            os.fsync(self._file.fileno())
            self._file.close()


def _keep_until(path: Path, step: int) -> int:
    """Replace a file of records by its lines up to `step`, if any are to go; how many went."""
    if not path.exists():
        return 0
    lines = path.read_bytes().splitlines(keepends=True)

    def kept(line: bytes) -> bool:
        record = from_json(line) if line.endswith(b"\n") else None
        at = record.get("step", 0) if record is not None else None
        return isinstance(at, (int, float)) and at <= step

    keep = [line for line in lines if kept(line)]
    if step == 0 and len(keep) < len(lines):
        _keep_copy(path)
    if len(keep) < len(lines):
        part = path.with_name(path.name + ".part")
        with part.open("wb") as out:
            out.writelines(keep)
            out.flush()
            os.fsync(out.fileno())
        part.replace(path)
    return len(lines) - len(keep)


def _keep_copy(path: Path) -> None:
    """Have a file under a further name, the first that is free."""
    number = 1
    while (other := path.with_name(f"{path.stem}-{number}{path.suffix}")).exists():
        number += 1
    os.link(path, other)


class TensorBoardSink:
    """TensorBoard event files: `train/loss`, `eval/loss`, `time/data`, ...; events become text.

    Args:
        folder: of the event files.
        after_step: the step the run continues from; what an earlier life wrote past it is hidden.

    Raises:
        ImportError: tensorboard is not installed.
        OSError: the folder cannot be written.
    """

    name = "tensorboard"

    def __init__(self, folder: Path, after_step: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder), purge_step=after_step + 1)  # type: ignore[no-untyped-call]

    def write(self, record: Record) -> None:
        """Add every number of a record under its step."""
        kind, step = record.get("kind", "train"), record.get("step", 0)
        if kind == "event":
            self._writer.add_text(f"event/{record.get('event')}", str(record.get("message", "")), step)
            return
        for key, value in record.items():
            if isinstance(value, (int, float)) and not isinstance(value, bool) and key != "step":
                self._writer.add_scalar(key if "/" in key else f"{kind}/{key}", value, step)
        self._writer.flush()

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


class Sinks:
    """Gives every record to every sink. A sink that fails is reported once and tried again with the next record.

    Args:
        sinks: in the order they are served.
        warn: takes one line of text.
    """

    name = "sinks"

    def __init__(self, sinks: Iterable[Sink], warn: Callable[[str], None]) -> None:
        self._sinks, self._warn = list(sinks), warn
        self._reported: set[int] = set()

    def write(self, record: Record) -> None:
        """Give a record to all."""
        for sink in self._sinks:
            self._try(sink, partial(sink.write, record))

    def close(self) -> None:
        """Close all."""
        for sink in self._sinks:
            self._try(sink, sink.close)

    def _try(self, sink: Sink, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # a metric is never worth a run
            if id(sink) not in self._reported:
                self._reported.add(id(sink))
                self._warn(f"{sink.name}: cannot write metrics ({_reason(error)}); training goes on without them.")


def open_sinks(folder: Path, after_step: int, warn: Callable[[str], None], *more: Sink) -> Sinks:
    """The sinks of a run folder, `metrics.jsonl` and TensorBoard, and any others.

    One that cannot be opened is left out with one line to `warn`.
    """
    openers: tuple[tuple[str, Callable[[], Sink]], ...] = (
        (METRICS_FILE, lambda: JsonlSink(folder / METRICS_FILE, after_step)),
        (TensorBoardSink.name, lambda: TensorBoardSink(folder / TENSORBOARD_FOLDER, after_step)),
    )
    opened: list[Sink] = []
    for name, opener in openers:
        try:
            opened.append(opener())
        except ImportError:
            warn(f"{name}: not installed, so no event files are written; `pip install {name}` adds it.")
        except Exception as error:
            warn(f"{name}: cannot be opened ({_reason(error)}); training goes on without it.")
    return Sinks([*opened, *more], warn)


def _reason(error: Exception) -> str:
    text = error.strerror if isinstance(error, OSError) else None
    return " ".join((text or str(error) or type(error).__name__).split())
