"""What a machine lacks is said in one sentence that mends it, before anything is touched."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from hpctrain.errors import LabError
from hpctrain.lab import Cluster, LabSpec, lifecycle, requirements, up


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


def test_neither_root_nor_user_namespaces(machine: pytest.MonkeyPatch, home: Path) -> None:
    machine.setattr(os, "geteuid", lambda: 1000)
    refused = subprocess.CompletedProcess([], 1, stdout="", stderr="unshare: unshare failed: Operation not permitted\n")
    machine.setattr(subprocess, "run", lambda *_, **__: refused)
    said = (
        r"everybody, and this one does not: it said 'unshare: unshare failed: Operation not permitted'; run the command"
    )
    with pytest.raises(LabError, match=f"a lab needs root, or a system that gives user namespaces to {said}"):
        up(LabSpec(home))
    assert not home.exists()


def test_without_root_there_are_no_rails(machine: pytest.MonkeyPatch, home: Path) -> None:
    machine.setattr(os, "geteuid", lambda: 1000)
    machine.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, stdout="", stderr=""))
    machine.setattr(lifecycle, "_make", Cluster)
    machine.setattr(lifecycle.folder, "check_owner", lambda folder: None)
    machine.setattr(requirements, "user", lambda: "kim")
    raised = up(LabSpec(home, rails=4))
    assert raised.lacks == "rails need root, for networks and their rates; run the command with sudo."
    assert (raised.cluster.spec.rails, raised.cluster.spec.rootless) == (0, True)


def test_rails_need_ip_and_tc(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(shutil, "which", without("tc"))
    assert requirements.obstacle_to_rails() == "rails need iproute2; on Debian or Ubuntu: apt-get install iproute2."


def test_rails_need_a_kernel_that_has_their_parts(machine: pytest.MonkeyPatch) -> None:
    for code, said in ((0, ""), (2, "warning: x\nRTNETLINK answers: Operation not supported.\n")):
        made = subprocess.CompletedProcess([], code, stdout="", stderr=said)
        machine.setattr(subprocess, "run", lambda *_, made=made, **__: made)
        assert (requirements.obstacle_to_rails() is None) == (code == 0)
    assert str(requirements.obstacle_to_rails()).endswith("it said 'RTNETLINK answers: Operation not supported'.")


def test_without_what_rails_need_the_lab_is_plain(machine: pytest.MonkeyPatch, home: Path) -> None:
    machine.setattr(shutil, "which", without("ip"))
    machine.setattr(lifecycle, "_make", Cluster)
    raised = up(LabSpec(home, rails=4))
    assert raised.cluster.spec.rails == 0 and raised.lacks.startswith("rails need iproute2")
    machine.setattr(requirements, "obstacle_to_rails", lambda: None)
    raised = up(LabSpec(home, rails=4))
    assert raised.cluster.spec.rails == 4 and raised.lacks == ""
