"""`hpctrain plan schedule`."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from hpctrain.cli import main
from hpctrain.cli.timelines import draw
from hpctrain.layout.schedule import make_schedule
from hpctrain.layout.timeline import Times, play


def invoke(line: str, columns: int = 80) -> Result:
    return CliRunner().invoke(main, ["plan", "schedule", *line.split()], env={"COLUMNS": str(columns)})


def run(line: str, columns: int = 80) -> str:
    result = invoke(line, columns)
    assert (result.exit_code, result.stderr) == (0, "")
    return result.stdout


def test_a_timeline_with_bubble_formula_and_peaks() -> None:
    assert run("--stages 3 --micro-batches 4 --schedule zb-h1") == (
        "zb-h1: 3 ranks, 4 micro-batches\n"
        "\n"
        "rank 0  F0  F1  F2  ........B0      F3  B1      B2      B3      \n"
        "rank 1  ....F0  F1  ....I0  F2  I1  W0  F3  I2  W1  I3  W2  W3  \n"
        "rank 2  ........F0  I0  F1  I1  F2  I2  W0  F3  I3  W1  W2  W3  \n"
        "\n"
        "F forward, B backward, I gradient of the input, W gradients of weights, . idle\n"
        "\n"
        "step         14\n"
        "bubble       14.29%\n"
        "formula      14.29% = x / (m(F+I+W)+x), x = (p-1)(F+I-W)\n"
        "activations  at most 3 on every rank; of one micro-batch and stage each\n"
        "of these     at most 3 on rank 0, 1 on rank 2 whole, others for weights alone\n"
    )


def test_what_cannot_fit_is_left_out_in_the_middle() -> None:
    lines = run("--stages 2 --micro-batches 20 --schedule interleaved --chunks 2", columns=40).splitlines()
    assert lines[2:4] == ["rank 0  FFffF.b0Fb1fB0f ~  fB .b .b B B ", "rank 1  .FFfb0fb1FB0FB1 ~ B fb fb B B .."]
    assert lines[7] == "shortened: from 7.5 to 54.5 of 61.5 is left out at ~ "


@pytest.mark.parametrize("columns", [30, 80, 200])
@pytest.mark.parametrize(
    "arguments", ["--stages 4 --micro-batches 8", "--stages 12 --micro-batches 64 --schedule zb-v"]
)
def test_timelines_fit_the_width(columns: int, arguments: str) -> None:
    lines = [line for line in run(arguments, columns).splitlines() if line.startswith("rank ")]
    assert len({len(line) for line in lines}) == 1 and len(lines[0]) <= columns


def test_colours_only_on_a_terminal() -> None:
    schedule = make_schedule("zb-v", 2, 2, 3)
    drawing = draw(schedule, play(schedule, Times.even(schedule)), 80)
    plain, coloured = io.StringIO(), io.StringIO()
    Console(file=plain).print(*drawing.lines)
    Console(file=coloured, force_terminal=True, color_system="standard").print(*drawing.lines)
    assert "\x1b[" not in plain.getvalue()
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured.getvalue()) == plain.getvalue() != coloured.getvalue()


def test_uneven_stages_have_no_formula_and_short_actions_are_counted() -> None:
    shown = run("--stages 2 --micro-batches 2 --forward 1,2 --backward-weight 3,1")
    assert "formula      none for these sizes and times (see docs/schedules.md)\n" in shown
    shown = run("--stages 2 --micro-batches 2 --schedule zb-h1 --backward-weight 0.01")
    assert "2 actions too short for a column are not drawn\n" in shown


def test_latency_is_between_ranks() -> None:
    assert "step         9\n" in run("--stages 2 --micro-batches 2")
    shown = run("--stages 2 --micro-batches 2 --latency 0.5")
    assert "step         10\n" in shown and "formula      none" in shown


def test_even_times_given_a_stage_at_a_time_are_those_of_a_whole_rank() -> None:
    each = "--forward 0.5,0.5,0.5,0.5 --backward-input 0.5,0.5,0.5,0.5 --backward-weight 0.5,0.5,0.5,0.5"
    assert run(f"--stages 2 --micro-batches 4 --schedule zb-v {each}") == run(
        "--stages 2 --micro-batches 4 --schedule zb-v"
    )


def test_json_holds_every_action_and_its_time() -> None:
    shown = json.loads(run("--stages 2 --micro-batches 2 --schedule interleaved --json"))
    assert {key: shown[key] for key in ("schedule", "stages", "chunks", "micro_batches", "step")} == {
        "schedule": "interleaved",
        "stages": 2,
        "chunks": 2,
        "micro_batches": 2,
        "step": 7.5,
    }
    assert shown["bubble"] == shown["own_bubble"] == pytest.approx(shown["claim"]["share"]) == pytest.approx(0.2)
    assert shown["claim"]["formula"] == "(p-1) / (vm+p-1)"
    assert [len(spans) for spans in shown["ranks"]] == [8, 8]
    assert shown["ranks"][1][0] == {"kind": "forward", "stage": 1, "micro_batch": 0, "start": 0.5, "end": 1.0}
    assert shown["peaks"][0] == {"alive": 4, "whole": 4, "weights": 0, "received": 2}


@pytest.mark.parametrize(("suffix", "begins"), [("png", b"\x89PNG"), ("SVG", b"<?xml"), ("pdf", b"%PDF")])
def test_a_picture(tmp_path: Path, suffix: str, begins: bytes) -> None:
    path = tmp_path / f"made.{suffix}"
    run(f"--stages 2 --micro-batches 3 --schedule zb-v --png {path}")
    assert path.read_bytes().startswith(begins)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--stages 2 --micro-batches 2 --schedule dual", "'dual' is not one of 'gpipe', '1f1b', 'interleaved'"),
        ("--stages 0 --micro-batches 2", "0 is not in the range x>=1."),
        ("--stages 2 --micro-batches 2 --forward 1;2", "'1;2' is no number, nor numbers separated by commas."),
        ("--stages 2 --micro-batches 2 --forward 0", "'0' is not above 0."),
        ("--stages 2 --micro-batches 2 --backward-weight nan", "'nan' is not above 0."),
        ("--stages 2 --micro-batches 2 --latency inf", "inf is not in the range 0<=x<inf."),
        (
            "--stages 2 --micro-batches 2 --forward 1,2,3",
            "error: forward='1,2,3': must be one number, or 2, one a virtual stage.\n",
        ),
        (
            "--stages 2 --micro-batches 2 --chunks 2",
            "error: parallel.chunks=2: 1f1b has 1 chunk a rank; "
            "use parallel.chunks=1, or parallel.schedule=interleaved or zb-h1.\n",
        ),
        (
            "--stages 1000 --micro-batches 1000",
            "error: micro_batches=1000: 1000 stages x 1 chunks x micro-batches must be at most 50,000; "
            "fewer show the same pattern.\n",
        ),
        (
            "--stages 2 --micro-batches 2 --png x.foo",
            "error: png='x.foo': a picture's name ends in .png, .svg or .pdf; for example x.png.\n",
        ),
        (
            "--stages 2 --micro-batches 2 --png /no/such/folder/a.png",
            "error: png='/no/such/folder/a.png': its folder must be there; "
            "make /no/such/folder, or use another path.\n",
        ),
    ],
)
def test_bad_input_is_refused(arguments: str, sentence: str) -> None:
    result = invoke(arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert sentence in result.stderr


def test_steps_that_need_not_meet_have_a_bubble_of_their_own() -> None:
    shown = run("--stages 4 --micro-batches 8 --schedule zb-v")
    assert "bubble       5.88%; 0.00% where steps need not begin and end together\n" in shown


def test_the_example_of_the_help() -> None:
    shown = CliRunner().invoke(main, ["plan", "schedule", "--help"]).stdout
    example = "--stages 4 --chunks 2 --micro-batches 8 --schedule zb-h1"
    assert f"Example:  hpctrain plan schedule {example}\n" in shown
    assert "bubble       5.88%" in run(example)


def test_chunks_are_as_many_as_a_schedule_needs() -> None:
    titles = {
        name: run(f"--stages 2 --micro-batches 2 --schedule {name}").splitlines()[0]
        for name in ("zb-h1", "zb-v", "1f1b")
    }
    assert titles == {
        "zb-h1": "zb-h1: 2 ranks, 2 micro-batches",
        "zb-v": "zb-v: 2 ranks x 2 chunks, 2 micro-batches",
        "1f1b": "1f1b: 2 ranks, 2 micro-batches",
    }
