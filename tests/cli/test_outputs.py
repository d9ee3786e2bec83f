"""Files that commands write are looked at before they do anything."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from hpctrain.cli import main

BENCH = "bench collectives --sizes 1K"


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ("plan schedule --stages 2 --micro-batches 2 --schedule 1f1b --png", "png"),
        ("plan sweep llama-8b --over gpus=8 --png", "png"),
        ("topo show --picture", "--picture"),
        ("topo map gpt-tiny --picture", "--picture"),
        ("topo capture -o", "--output"),
        ("data stats x.h5 --plot", "--plot"),
        (f"{BENCH} --png", "--png"),
        ("bench pairs --png", "--png"),
        ("bench fit published:a100 --png", "--png"),
        ("bench fit published:a100 --profile", "--profile"),
        ("bench gemm --profile", "--profile"),
    ],
)
def test_a_folder_that_is_not_there(tmp_path: Path, line: str, key: str) -> None:
    result = CliRunner().invoke(main, [*line.split(), str(tmp_path / "nowhere" / "a.png")])
    assert result.exit_code == 2 and result.stderr.count("\n") == 1
    assert result.stderr.startswith(f"error: {key}=") and "its folder must be there; make " in result.stderr


@pytest.mark.parametrize(
    "line", [f"{BENCH} --png", "bench pairs --png", "topo show --picture", "data stats x.h5 --plot"]
)
def test_a_picture_of_no_known_kind(line: str) -> None:
    result = CliRunner().invoke(main, [*line.split(), "a.foo"])
    assert result.exit_code == 2 and "ends in .png, .svg or .pdf; for example a.png." in result.stderr
