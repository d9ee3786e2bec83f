"""Every command in the README is one that exists, and the cheap ones are run."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from hpctrain.cli import COMMANDS, main
from hpctrain.config.load import load
from hpctrain.config.validate import validate

ROOT = Path(__file__).parents[1]
BLOCKS = re.findall(r"^```sh\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
LINES = [line for block in BLOCKS for line in block.splitlines() if line and not line.startswith("#")]
OURS = [shlex.split(line, comments=True)[1:] for line in LINES if line.startswith("hpctrain ")]


def test_opens_with_the_two_commands_of_a_newcomer() -> None:
    assert BLOCKS[0].split("\n") == ["make train", "make test", ""]


def test_only_known_programs() -> None:
    assert {line.split()[0] for line in LINES} <= {"make", "hpctrain"}
    assert OURS


@pytest.mark.parametrize("line", [line for line in LINES if line.startswith("make ")])
def test_make_targets(line: str) -> None:
    done = subprocess.run(["make", "-n", *line.split()[1:]], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("arguments", OURS, ids=" ".join)
def test_commands_parse(arguments: list[str]) -> None:
    parse(arguments)


def parse(arguments: list[str]) -> None:
    """Read a command line as the program would, without running it."""
    context = click.Context(main, info_name="hpctrain")
    command: click.Command | None = main
    while isinstance(command, click.Group) and arguments:
        name, command, arguments = command.resolve_command(context, list(arguments))
        assert command is not None, f"no command {name}"
        context = click.Context(command, info_name=name, parent=context)
    assert command is not None
    command.make_context(command.name, list(arguments), parent=context.parent)


@pytest.mark.parametrize("arguments", [a for a in OURS if a[0] == "train"], ids=" ".join)
def test_trainings_could_start(arguments: list[str]) -> None:
    config = load(arguments[1], arguments[2:])
    validate(config, config.cluster.nodes * config.cluster.gpus_per_node)


@pytest.mark.parametrize("arguments", [a for a in OURS if a[0] == "config"], ids=" ".join)
def test_cheap_commands_run(arguments: list[str]) -> None:
    result = CliRunner().invoke(main, arguments)
    assert (result.exit_code, result.stderr) == (0, "")


def test_commands_named_in_the_text_exist() -> None:
    prose = (ROOT / "README.md").read_text()
    assert set(re.findall(r"hpctrain ([a-z]+)", prose)) - {"is"} <= set(COMMANDS)
