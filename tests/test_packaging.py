"""What is installed is pinned, and `make install` says in one sentence what it lacks."""

from __future__ import annotations

import configparser
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]


def requirements() -> list[Requirement]:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    text = setup["options"]["install_requires"] + setup["options.extras_require"]["dev"]
    return [Requirement(line) for line in text.splitlines() if line]


def pins() -> dict[str, str]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}


@pytest.mark.parametrize("requirement", requirements(), ids=str)
def test_every_requirement_is_pinned_within_its_range(requirement: Requirement) -> None:
    assert requirement.specifier.contains(pins()[canonicalize_name(requirement.name)])


def test_torch_is_the_one_that_was_tested() -> None:
    assert pins()["torch"] == "2.13.0"
    assert pins()["deepspeed"] == "0.19.8"


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A make that does not know it runs inside another one."""
    env = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    return subprocess.run(["make", *arguments], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)


def install(venv: Path, python: str) -> subprocess.CompletedProcess[str]:
    return make("install", f"VENV={venv}", f"PYTHON={python}")


def fake_python(folder: Path, body: str) -> str:
    """A program that answers like an interpreter in the one respect that matters."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (None, "is not there; on Debian or Ubuntu: apt-get install python3 python3-venv"),
        ('if [ "$1" = -V ]; then echo Python 3.9.2; else exit 1; fi', "is Python 3.9.2, and hpctrain needs 3.10"),
        ('case "$2" in *ensurepip*) exit 1;; esac', "apt-get install python3-venv"),
    ],
)
def test_what_is_missing_is_named(tmp_path: Path, body: str | None, sentence: str) -> None:
    python = "python-that-is-not-there" if body is None else fake_python(tmp_path, body)
    done = install(tmp_path / "venv", python)
    assert done.returncode != 0
    assert sentence in done.stderr
    assert not (tmp_path / "venv").exists()


def test_installed_once_is_enough(tmp_path: Path) -> None:
    stamp = tmp_path / "venv" / "installed"
    stamp.parent.mkdir()
    stamp.touch()
    done = install(tmp_path / "venv", "python-that-is-not-there")
    assert (done.returncode, done.stderr) == (0, "")


def test_make_alone_lists_the_targets() -> None:
    assert {line.split()[1] for line in make().stdout.splitlines()} == {
        *("help", "install", "train", "test", "bench", "reproduce", "lab", "lab-down", "lint", "test-gpu", "clean")
    }


def test_a_wheel_brings_recipes_and_site_profiles(tmp_path: Path) -> None:
    """Built from a copy of what git tracks, unpacked, and used from elsewhere, as an installed package is."""
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, tracked.split("\0")):
        (tmp_path / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / "source" / name, follow_symlinks=False)
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    subprocess.run([*pip, "--wheel-dir", str(tmp_path), str(tmp_path / "source")], check=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    shutil.rmtree(tmp_path / "source")
    code = """if True:
        import hpctrain
        from hpctrain.config.load import recipes
        from hpctrain.launch.submit import snapshot
        from hpctrain.launch.slurm.profile import profiles, site
        from hpctrain.plan.constants import constants
        from hpctrain.plan.hardware import hardware
        assert hardware("h100").domain.link in constants().links
        print(hpctrain.__file__, len(recipes()), *profiles(), len(site("generic").prologue), snapshot.checkout())
    """
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "installed")}
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=tmp_path, capture_output=True, text=True)
    file, count, *names, prologue, checkout = done.stdout.split()
    assert file == str(tmp_path / "installed" / "hpctrain" / "__init__.py"), done.stderr
    assert int(count) > 5 and names == sorted(path.stem for path in (ROOT / "slurm_templates").glob("*.yaml"))
    assert int(prologue) == (ROOT / "slurm_templates" / "generic.sh").stat().st_size
    assert checkout == "None", "what is installed is not copied for a job"
