"""Files of records: whole lines, once each, and never in the way of training."""

from __future__ import annotations

import builtins
import datetime
import json
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpctrain.telemetry.metrics import Record, event, read_records
from hpctrain.telemetry.sinks import METRICS_FILE, JsonlSink, Sinks, TensorBoardSink, open_sinks


def train(step: int, loss: float = 1.0) -> Record:
    return {"kind": "train", "step": step, "loss": loss}


def steps(path: Path) -> list[Any]:
    return [r["step"] for r in read_records(path)]


class Memo:
    """A sink that remembers, or fails."""

    name = "memo"

    def __init__(self, broken: bool = False) -> None:
        self.records: list[Record] = []
        self.broken = broken

    def write(self, record: Record) -> None:
        if self.broken:
            raise OSError(28, "No space left on device")
        self.records.append(record)

    def close(self) -> None:
        if self.broken:
            raise RuntimeError


def test_a_line_is_there_when_write_returns(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / METRICS_FILE)
    sink.write(train(1, float("nan")))
    (line,) = (tmp_path / METRICS_FILE).read_text().splitlines()
    found = json.loads(line)
    assert found["loss"] == "NaN" and found["step"] == 1
    age = datetime.datetime.now(datetime.timezone.utc) - datetime.datetime.fromisoformat(found["time"])
    assert found["time"].endswith("+00:00") and 0 <= age.total_seconds() < 60
    sink.close()
    sink.close()


def test_resuming_drops_later_steps_of_the_earlier_life_and_torn_lines(tmp_path: Path) -> None:
    path = tmp_path / METRICS_FILE
    first = JsonlSink(path)
    for record in (event("start", 0), train(1), train(2), event("checkpoint", 2), train(3), train(4)):
        first.write(record)
    first.close()
    before = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(before) + b'{"kind": "train", "st')
    second = JsonlSink(path, after_step=2)
    assert second.dropped == 3
    second.write(train(3))
    second.close()
    assert steps(path) == [0, 1, 2, 2, 3]
    assert path.read_bytes().splitlines(keepends=True)[:4] == before[:4]
    assert [p.name for p in tmp_path.iterdir()] == [METRICS_FILE]


def test_a_run_that_begins_anew_keeps_what_was_there(tmp_path: Path) -> None:
    for life in (1, 2, 3):
        sink = JsonlSink(tmp_path / METRICS_FILE)
        for step in range(1, life + 1):
            sink.write(train(step))
        sink.close()
    assert {p.name: steps(p) for p in tmp_path.iterdir()} == {
        METRICS_FILE: [1, 2, 3],
        "metrics-1.jsonl": [1],
        "metrics-2.jsonl": [1, 2],
    }


def test_an_intact_file_is_not_rewritten(tmp_path: Path) -> None:
    path = tmp_path / METRICS_FILE
    JsonlSink(path).write(train(1))
    inode = path.stat().st_ino
    again = JsonlSink(path, after_step=1)
    again.write(train(2))
    assert path.stat().st_ino == inode and steps(path) == [1, 2] and again.dropped == 0


def test_a_failed_rewrite_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / METRICS_FILE
    old = JsonlSink(path)
    old.write(train(1))
    old.write(train(2))

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError):
        JsonlSink(path, after_step=1)
    assert steps(path) == [1, 2]


@pytest.fixture
def small_disk() -> Iterator[int]:
    """Files of this process may not grow past so many bytes."""
    limit, before = 200, resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_said_once_and_leaves_whole_lines(tmp_path: Path, small_disk: int) -> None:
    said: list[str] = []
    path, memo = tmp_path / METRICS_FILE, Memo()
    sinks = Sinks([JsonlSink(path), memo], said.append)
    for step in range(1, 20):
        sinks.write(train(step))
    assert len(said) == 1 and said[0].startswith("metrics.jsonl: cannot write metrics (File too large)")
    assert len(memo.records) == 19
    assert path.read_bytes().endswith(b"}\n") and steps(path) == [1, 2]
    resource.setrlimit(resource.RLIMIT_FSIZE, (10 * small_disk, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    sinks.write(train(20))
    sinks.close()
    assert steps(path) == [1, 2, 20]
    assert len(said) == 1


def test_one_broken_sink_does_not_keep_records_from_the_others() -> None:
    said: list[str] = []
    before, broken, after = Memo(), Memo(broken=True), Memo()
    sinks = Sinks([before, broken, after], said.append)
    sinks.write(train(1))
    sinks.write(train(2))
    sinks.close()
    assert said == ["memo: cannot write metrics (No space left on device); training goes on without them."]
    assert before.records == after.records == [train(1), train(2)]


def test_without_tensorboard_there_is_one_line_and_the_rest_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def absent(name: str, *rest: Any, **more: Any) -> Any:
        if name.split(".")[0] == "tensorboard" or name == "torch.utils.tensorboard":
            raise ImportError(f"No module named {name!r}")
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", absent)
    said: list[str] = []
    sinks = open_sinks(tmp_path, 0, said.append)
    sinks.write(train(1))
    sinks.close()
    assert len(said) == 1 and said[0].startswith("tensorboard: not installed") and "\n" not in said[0]
    assert steps(tmp_path / METRICS_FILE) == [1]


def test_a_folder_that_is_none_is_said_for_each_sink(tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "file").touch()
    memo = Memo()
    sinks = open_sinks(tmp_path / "file", 0, said.append, memo)
    sinks.write(train(1))
    assert [text.split(":")[0] for text in said] == [METRICS_FILE, "tensorboard"]
    assert memo.records == [train(1)]


def test_tensorboard_has_every_number_and_hides_what_a_resume_repeats(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first = TensorBoardSink(tmp_path)
    for step in (1, 2, 3):
        first.write({**train(step, 10.0 + step), "mfu_palm": None, "engine": "none", "time/data": 0.5, "time": "now"})
    first.close()
    second = TensorBoardSink(tmp_path, after_step=2)
    second.write(train(3, 7.0))
    second.write({"kind": "eval", "step": 3, "loss": 5.0})
    second.write(event("checkpoint", 3, "saved"))
    second.close()
    seen = EventAccumulator(str(tmp_path)).Reload()
    assert set(seen.Tags()["scalars"]) == {"train/loss", "time/data", "eval/loss"}
    assert [(e.step, e.value) for e in seen.Scalars("train/loss")] == [(1, 11.0), (2, 12.0), (3, 7.0)]
    assert [(e.step, e.value) for e in seen.Scalars("eval/loss")] == [(3, 5.0)]
    assert seen.Tags()["tensors"] == ["event/checkpoint/text_summary"]
