"""What a machine lacks is said in one sentence that mends it, before anything is touched."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from hpctrain.errors import LabError
from hpctrain.lab import LabSpec, requirements, up


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine that has everything, whatever this one has."""
    monkeypatch.setattr(shutil, "which", lambda name, path=None: f"/usr/bin/{name}")
    monkeypatch.setattr(requirements, "slurm_version", lambda: (22, 5))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    return monkeypatch


def without(*programs: str) -> object:
    return lambda name, path=None: None if name in programs else f"/usr/bin/{name}"


def test_all_there(machine: pytest.MonkeyPatch) -> None:
    assert requirements.obstacle() is None
    assert requirements.obstacle(accounting=True) is None


@pytest.mark.parametrize(
    ("programs", "packages"),
    [
        (("slurmd",), "slurmd"),
        (("srun", "sbatch"), "slurm-client"),
        (("munged", "slurmctld"), "munge slurmctld"),
        (("nsenter", "unshare"), "util-linux"),
    ],
)
def test_missing_packages(machine: pytest.MonkeyPatch, programs: tuple[str, ...], packages: str) -> None:
    machine.setattr(shutil, "which", without(*programs))
    assert requirements.obstacle() == (
        "a lab needs programs that are not here; on Debian or Ubuntu: "
        f"apt-get install --no-install-recommends {packages}."
    )


def test_packages_of_accounting_are_needed_only_for_it(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(shutil, "which", without("slurmdbd", "mariadbd"))
    assert requirements.obstacle() is None
    assert "mariadb-server slurmdbd." in str(requirements.obstacle(accounting=True))


@pytest.mark.parametrize(("version", "said"), [((21, 8), "21.08"), ((0, 0), "0.00"), ((22, 4), "22.04")])
def test_old_slurm(machine: pytest.MonkeyPatch, version: tuple[int, int], said: str) -> None:
    machine.setattr(requirements, "slurm_version", lambda: version)
    assert requirements.obstacle() == f"this machine has Slurm {said}, and a lab needs 22.05 or later."


@pytest.mark.parametrize(
    ("text", "version"), [("slurm-wlm 22.05.8", (22, 5)), ("slurm 24.11.0-rc1", (24, 11)), ("", (0, 0))]
)
def test_version(monkeypatch: pytest.MonkeyPatch, text: str, version: tuple[int, int]) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, stdout=text))
    assert requirements.slurm_version() == version


def test_not_root(machine: pytest.MonkeyPatch, home: Path) -> None:
    machine.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(LabError, match="a lab needs root, for namespaces and device nodes; run the command with sudo"):
        up(LabSpec(home))
    assert not home.exists()
