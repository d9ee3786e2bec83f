"""The command line: quick help, and one sentence with the right exit code for what the user can mend."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import click
import pytest
from click.testing import CliRunner, Result

import hpctrain
from hpctrain.cli import COMMANDS, Lazy, main
from hpctrain.cli.groups import Group
from hpctrain.errors import CheckpointError, ConfigError

HEAVY = ("torch", "numpy", "pydantic", "yaml", "rich", "submitit", "h5py", "deepspeed", "hpctrain.config")


def run_failing(monkeypatch: pytest.MonkeyPatch, action: Callable[[], object]) -> Result:
    """Run a command whose body is `action`."""
    module = type(sys)("hpctrain_test_command")
    module.fail = click.Command("fail", callback=action)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(COMMANDS, "fail", Lazy("hpctrain_test_command:fail", "Fails."))
    return CliRunner().invoke(main, ["fail"])


def raising(error: BaseException) -> Callable[[], object]:
    def action() -> object:
        raise error

    return action


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys, hpctrain.cli\n"
        "try:\n    hpctrain.cli.main(['--help'])\n"
        "except SystemExit as end:\n    assert end.code == 0\n"
        f"print([m for m in {HEAVY} if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.splitlines()[-1] == "[]"
    for name, lazy in COMMANDS.items():
        assert any(line.split() == [name, *lazy.help.split()] for line in out.splitlines())


def test_help_answers_at_once() -> None:
    """What takes long to import is not imported for it."""
    code = "import sys\nfrom hpctrain.cli import main\ntry:\n    main(['--help'])\nfinally:\n    print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.split(".")[0] for name in done.stdout.splitlines()[-1].split()}
    assert "click" in loaded
    assert not loaded & {"torch", "numpy", "pydantic", "h5py", "submitit", "deepspeed", "matplotlib", "rich"}


def test_version() -> None:
    result = CliRunner().invoke(main, ["--version"])
    assert (result.exit_code, result.output) == (0, f"hpctrain, version {hpctrain.__version__}\n")


def test_module_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "hpctrain", "nonsense"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error: hpctrain has no command 'nonsense': choose from train, finetune, submit,")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("tran gpt-tiny", "main has no command 'tran': the nearest is train."),
        ("bench colectives --ranks 2", "main bench has no command 'colectives': the nearest is collectives."),
        ("data bulid x", "main data has no command 'bulid': the nearest is build."),
        ("ckpt lst x", "main ckpt has no command 'lst': the nearest is ls."),
        ("config shwo gpt-tiny", "main config has no command 'shwo': the nearest is show."),
        ("lab statsu", "main lab has no command 'statsu': the nearest is status."),
        ("topo sohw", "main topo has no command 'sohw': the nearest is show."),
        ("topo xxxxxxx", "main topo has no command 'xxxxxxx': choose from "),
    ],
)
def test_a_name_that_is_none_is_told_the_nearest(words: str, sentence: str) -> None:
    done = CliRunner().invoke(main, words.split())
    assert done.exit_code == 2 and done.stderr.startswith(f"error: {sentence}")


def groups(command: click.Command, name: str = "main") -> Iterator[tuple[str, click.Group]]:
    """All groups, by name."""
    if isinstance(command, click.Group):
        yield name, command
        context = click.Context(command)
        for inner in command.list_commands(context):
            found = command.get_command(context, inner)
            assert found is not None
            yield from groups(found, f"{name} {inner}")


def test_every_group_does() -> None:
    found = dict(groups(main))
    assert len(found) >= 8 and all(isinstance(group, Group) for group in found.values()), found


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_there_and_has_help(name: str) -> None:
    result = CliRunner().invoke(main, [name, "--help"], catch_exceptions=False)
    assert result.exit_code == 0
    assert result.output.startswith(f"Usage: main {name} ")


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (ConfigError("parallel.tp", 3, "must divide 4", "use 2"), 2, "parallel.tp=3: must divide 4; use 2."),
        (CheckpointError("no valid checkpoint in x."), 1, "no valid checkpoint in x."),
        (
            OSError(errno.ENOSPC, "", "/data/x.h5"),
            1,
            "/data/x.h5: No space left on device; free some space there, or write elsewhere.",
        ),
        (PermissionError(errno.EACCES, "", b"/root/x"), 1, "/root/x: Permission denied; give yourself access"),
        (OSError(errno.EROFS, ""), 1, "Read-only file system; use a path"),
        (KeyboardInterrupt(), 130, "interrupted."),
    ],
)
def test_one_sentence_and_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, sentence: str
) -> None:
    result = run_failing(monkeypatch, raising(error))
    assert result.exit_code == code
    assert result.stdout == ""
    assert result.stderr.startswith(f"error: {sentence}")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("error", [ZeroDivisionError("bug"), OSError(errno.ENOENT, "", "x"), OSError("no number")])
def test_bugs_keep_their_traceback(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    assert run_failing(monkeypatch, raising(error)).exception is error


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_for_real(monkeypatch: pytest.MonkeyPatch) -> None:
    def write() -> None:
        with open("/dev/full", "w") as file:
            file.write("x")

    result = run_failing(monkeypatch, write)
    assert result.exit_code == 1
    assert "No space left on device" in result.stderr
