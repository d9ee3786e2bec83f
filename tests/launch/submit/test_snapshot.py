"""The copy of the code that a job runs."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

import hpctrain
from hpctrain.errors import LaunchError
from hpctrain.launch.submit import snapshot


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    top = tmp_path / "repository"
    (top / "hpctrain").mkdir(parents=True)
    for name in ("hpctrain/__init__.py", "hpctrain/gone.py", "set up.cfg", "data.txt"):
        (top / name).write_text("old")
    (top / "link").symlink_to("data.txt")
    (top / ".gitignore").write_text("data/\n")
    subprocess.run("git init -q && git add -A", shell=True, cwd=top, check=True)
    (top / "hpctrain" / "gone.py").unlink()
    (top / "hpctrain" / "__init__.py").write_text("edited")
    (top / "hpctrain" / "loose.py").write_text("new")
    (top / "data").mkdir()
    (top / "data" / "large").write_text("x")
    return top


def test_tracked_files_as_they_are_now(repository: Path, tmp_path: Path) -> None:
    loose = snapshot.take(repository, tmp_path / "copy")
    copied = sorted(str(p.relative_to(tmp_path / "copy")) for p in (tmp_path / "copy").rglob("*") if not p.is_dir())
    assert copied == [".gitignore", "data.txt", "hpctrain/__init__.py", "link", "set up.cfg"]
    assert (tmp_path / "copy" / "hpctrain" / "__init__.py").read_text() == "edited"
    assert os.readlink(tmp_path / "copy" / "link") == "data.txt"
    assert loose == ["hpctrain/loose.py"]


def test_this_package_is_in_a_checkout_and_its_templates_go_along(tmp_path: Path) -> None:
    top = snapshot.checkout()
    assert top is not None and top / "hpctrain" / "__init__.py" == Path(hpctrain.__file__)
    snapshot.take(top, tmp_path / "copy")
    assert (tmp_path / "copy" / "hpctrain" / "launch" / "templates" / "generic.yaml").is_file()


def test_an_installed_package_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repository: Path) -> None:
    inside = repository / "data" / "site-packages" / "hpctrain"
    inside.mkdir(parents=True)
    (inside / "__init__.py").write_text("")
    monkeypatch.setattr(hpctrain, "__file__", str(inside / "__init__.py"))
    assert snapshot.checkout() is None, "a repository around it does not track it"


def test_failures_are_sentences(repository: Path, tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="git cannot list the files of"):
        snapshot.take(tmp_path, tmp_path / "copy")
    (tmp_path / "file").write_text("")
    with pytest.raises(LaunchError, match=r"the code cannot be copied to .*: Not a directory"):
        snapshot.take(repository, tmp_path / "file" / "copy")
