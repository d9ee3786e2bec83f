"""`hpctrain data`."""

import json
import os
import signal
import subprocess
import sys
import sysconfig
import time

import click
import pytest
from click.testing import CliRunner

from hpctrain.cli import main
from hpctrain.cli.data import data
from hpctrain.data.corpus import Corpus
from hpctrain.errors import DataError


def run(*args):
    result = CliRunner().invoke(data, [str(a) for a in args])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for name, text in {"a.py": "x = 1\n", "b.md": "# b\n", "c.txt": "plain", "d.py": ""}.items():
        (folder / name).write_text(text)
    return folder


def test_build_and_info(texts, tmp_path):
    output = tmp_path / "c.h5"
    said = run("build", output, texts, "--suffix", ".py", "--suffix", ".md", "--order", "path")
    assert "2 documents, 12 tokens, unigram entropy" in said and "1 empty files left out" in said
    assert bytes(Corpus.open(output).tokens[:6].astype("u1")) == b"x = 1\n"
    assert "not verified" in run("info", output)
    said = run("info", output, "--verify")
    assert "verified" in said and "bytes-257" in said and str(texts) in said and ".py, .md" in said
    told = json.loads(run("info", output, "--verify", "--json"))
    assert (told["tokens"], told["documents"], told["dtype"], told["verified"]) == (12, 2, "uint16", True)
    assert told["provenance"]["suffixes"] == [".py", ".md"] and told["sha256"] == Corpus.open(output).header.sha256


def test_force(texts, tmp_path):
    run("build", tmp_path / "c.h5", texts)
    with pytest.raises(DataError, match="--force"):
        run("build", tmp_path / "c.h5", texts)
    run("build", tmp_path / "c.h5", texts, "--force")


def test_info_on_what_is_no_corpus(texts):
    with pytest.raises(DataError, match="not an HDF5 file"):
        run("info", texts / "a.py")


def test_info_finds_damage_only_when_told_to_read_all(texts, tmp_path):
    output = tmp_path / "c.h5"
    run("build", output, texts)
    content = bytearray(output.read_bytes())
    at = content.index("x = 1\n".encode("utf-16-le"))
    content[at] ^= 1
    output.write_bytes(content)
    run("info", output)
    with pytest.raises(DataError, match="checksum"):
        run("info", output, "--verify")


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A standard library of three files."""
    folder = tmp_path / "lib"
    for name in ("os.py", "test/test_os.py", "site-packages/torch.py", "json/__init__.py", "json/x.so"):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {name}\n")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(folder))
    return folder


def test_stdlib(library, tmp_path):
    output = tmp_path / "s.h5"
    assert "Built" in run("stdlib", output) and Corpus.open(output).header.documents == 3
    before = output.stat()
    assert "is up to date" in run("stdlib", output)
    assert "is up to date" in run("stdlib", output, "--force")
    assert output.stat().st_mtime_ns == before.st_mtime_ns and output.stat().st_ino == before.st_ino


def test_stdlib_does_not_reuse_what_is_damaged_or_of_another_library(library, tmp_path):
    output = tmp_path / "s.h5"
    run("stdlib", output)
    (library / "new.py").write_text("new")
    with pytest.raises(DataError, match="--force"):
        run("stdlib", output)
    assert "4 documents" in run("stdlib", output, "--force")
    content = bytearray(output.read_bytes())
    content[content.index("new".encode("utf-16-le"))] ^= 1
    output.write_bytes(content)
    assert "Built" in run("stdlib", output, "--force")
    Corpus.open(output).verify()


@pytest.mark.parametrize("command", ["build", "info", "stdlib"])
def test_help_shows_an_example(command):
    assert f"Example:  hpctrain data {command} " in run(command, "--help")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_build_that_is_stopped_leaves_nothing(tmp_path, number):
    """Stopped by a signal while it writes."""
    (tmp_path / "t.txt").write_text("text")
    out = tmp_path / "out"
    code = f"""
import time
from hpctrain.data import build
build._make = lambda *args: time.sleep(60)
from hpctrain.cli.data import data
data(["build", {str(out / "c.h5")!r}, {str(tmp_path / "t.txt")!r}])
"""
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 30
    while not (out / ".c.h5.parts" / "lock").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.1)
    process.send_signal(number)
    assert process.wait(30) != 0 and os.listdir(out) == []


def test_no_right_to_read_is_said_by_what_reads():
    """In one sentence; click would ask first, and print how the command is used."""
    context = click.Context(main)
    group = main.get_command(context, "data")
    commands = [group.get_command(context, name) for name in group.list_commands(context)]
    commands += commands[-1].commands.values()  # of tokenizer
    paths = [p.type for c in commands for p in c.params if isinstance(p.type, click.Path)]
    assert len(paths) > 10 and not any(path.readable for path in paths)
