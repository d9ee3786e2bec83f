"""What people see, and following a file that another process writes."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpctrain.telemetry.console import ConsoleView, follow, line
from hpctrain.telemetry.metrics import EvalMetrics, Record, event, to_json
from hpctrain.telemetry.sinks import JsonlSink
from tests.telemetry.test_metrics import STEP


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_step() -> None:
    assert line(STEP.record(), 300) == (
        "step 20/300  loss 2.8996  grad_norm 0.957  lr 9.8e-04  tokens/s/device 7,375  MFU n/a  memory 0.9 GiB"
        "  data 1%  comm 12%"
    )


def test_a_step_on_a_gpu_in_fp16_with_skips() -> None:
    record = {**STEP.record(), "mfu_palm": 0.4567, "mfu_causal": 0.406, "loss_scale": 65536.0, "skipped_steps": 2}
    text = line(record)
    assert text.startswith("step 20  loss") and "  MFU 45.7% palm 40.6% causal  " in text
    assert text.endswith("  loss_scale 65536  skipped 2")


def test_a_step_of_experts() -> None:
    loads: Record = {"moe/load_imbalance": 1.678, "moe/dropped_tokens": 1234.0}
    assert line({**STEP.record(), **loads}).endswith("comm 12%  load 1.68x  dropped 1,234")
    assert line({**STEP.record(), **loads, "moe/dropped_tokens": 0.0}).endswith("comm 12%  load 1.68x")


def test_an_evaluation_and_an_event() -> None:
    record = EvalMetrics(100, 2.5, 4096, 0.2, unigram_entropy=3.25).record()
    assert line(record, 300) == "step 100/300  validation loss 2.5000  unigram entropy 3.2500  over 4,096 tokens"
    assert "unigram" not in line(EvalMetrics(100, 2.5, 4096, 0.2).record())
    assert line(event("checkpoint", 7, "committed", seconds=1.5), 9) == "step 7/9  checkpoint  committed  seconds=1.5"


@pytest.mark.parametrize(
    "record",
    [{}, {"kind": "train"}, {"kind": "eval"}, {"kind": "event"}, {"kind": "later"}, {"kind": "train", "loss": "odd"}],
)
def test_records_with_gaps_are_shown(record: Record) -> None:
    assert line(record, 5).startswith("step ?/5")


def test_not_finite() -> None:
    text = line({**STEP.record(), "loss": math.nan, "grad_norm": math.inf})
    assert "loss nan  grad_norm inf" in text


def test_piped_output_is_one_plain_line_a_record() -> None:
    out = io.StringIO()
    view = ConsoleView(300, out)
    view.write(STEP.record())
    view.write(event("warning", 20, "two\nlines \x1b[31mred\x1b[0m \r[bold]x[/bold]"))
    view.close()
    first, second = out.getvalue().splitlines()
    assert first == line(STEP.record(), 300)
    assert second == "step 20/300  warning  two lines  [31mred [0m  [bold]x[/bold]"
    assert all(c.isprintable() or c == "\n" for c in out.getvalue())


def test_a_terminal_has_a_bar_and_markup_is_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("NO_COLOR", raising=False)
    out = Terminal()
    view = ConsoleView(40, out)
    view.write(STEP.record())
    view.write(event("note", 20, "[bold]x[/bold]"))
    view.close()
    view.close()
    assert "training" in out.getvalue() and "20/40" in out.getvalue() and "\x1b[" in out.getvalue()
    assert "loss 2.8996  grad_norm 0.957" in out.getvalue() and "[bold]x[/bold]" in out.getvalue()


def test_a_terminal_that_can_nothing_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    out = Terminal()
    ConsoleView(40, out).write(STEP.record())
    assert out.getvalue() == line(STEP.record(), 40) + "\n"


Look = Callable[[], None]


def watch(path: Path, *looks: Look) -> list[object]:
    """Steps that `follow` hands out when one of `looks` happens before each of its looks at the file."""
    left: Iterator[Look] = iter(looks)
    count = len(looks)

    def stop() -> bool:
        nonlocal count
        count -= 1
        next(left, lambda: None)()
        return count <= 0

    return [r["step"] for r in follow(path, stop, poll_s=0.0)]


def text(*steps: int) -> bytes:
    return b"".join(to_json({"kind": "train", "step": s}).encode() + b"\n" for s in steps)


def test_following_a_file_that_appears_later_and_grows_by_halves(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"

    def add(data: bytes) -> Look:
        def look() -> None:
            with path.open("ab") as out:
                out.write(data)

        return look

    whole = text(1, 2, 3)
    looks = [
        lambda: None,
        add(whole[:5]),
        add(whole[5:40]),
        lambda: None,
        add(whole[40:] + b"junk\n"),
        add(text(4)[:-1]),
    ]
    assert watch(path, *looks) == [1, 2, 3]
    assert watch(path, lambda: None) == [1, 2, 3]


def test_following_a_run_that_resumes(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = JsonlSink(path)

    def resume() -> None:
        first.write({"kind": "train", "step": 4})  # written, not yet seen, and taken out again
        second = JsonlSink(path, after_step=2)
        second.write({"kind": "train", "step": 3, "loss": 1.0})
        second.write({"kind": "train", "step": 4, "loss": 1.0})

    def begin() -> None:
        for step in (1, 2, 3):
            first.write({"kind": "train", "step": step})

    assert watch(path, begin, resume, lambda: None) == [1, 2, 3, 3, 4]


def test_following_a_file_that_is_cut_and_one_that_goes_away(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(text(1, 2, 3))
    looks = [lambda: None, lambda: void(path.write_bytes(text(1, 5))), path.unlink, lambda: None]
    assert watch(path, *looks) == [1, 2, 3, 5]
    assert watch(path, lambda: None) == []


def void(_: object) -> None:
    return None
