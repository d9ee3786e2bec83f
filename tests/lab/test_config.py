"""The files of four labs, word for word; regenerate with `python -m tests.lab.test_config` and read the difference."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from hpctrain.lab import config, requirements
from hpctrain.lab.spec import LabSpec

GOLDEN = Path(__file__).parent / "golden"
SMALL = LabSpec(Path("/srv/lab"), nodes=2, gpus=1, cpus=3, memory_mb=2000, first_port=21000, first_job=42)
SPECS = {
    "small": SMALL,
    "accounting": replace(SMALL, nodes=5, gpus=4, cpus=8, accounting=True),
    "rails": replace(SMALL, rails=2),
    "bare": replace(SMALL, nodes=1, gpus=0),
    "rootless": replace(SMALL, user="kim"),
}


def golden(name: str) -> dict[str, str]:
    return {path.name: path.read_text() for path in (GOLDEN / name).iterdir()}


@pytest.mark.parametrize("name", SPECS)
def test_files(name: str) -> None:
    assert config.files(SPECS[name]) == golden(name)


def test_nothing_outside_of_the_folder_is_named() -> None:
    system = {"/etc/hosts", "/dev/shm", "/bin/true", "/dev/null"}
    own_network = {"/sys", "/sys/fs/cgroup", "/etc/resolv.conf", "/proc/sys/net", "/proc/$pid/ns/net"}
    for spec in SPECS.values():
        if spec.rails:
            system |= own_network | {requirements.PATH, "/bin/sh"}
        for name, text in config.files(spec).items():
            for word in re.split(r'[\s=",;]|#!', text):
                if word.startswith("/") and len(word) > 1:
                    assert word.startswith(str(spec.folder)) or word in system, f"{name}: {word}"


@pytest.mark.parametrize(
    ("nodes", "leaves"),
    [(1, ["n0"]), (2, ["n0", "n1"]), (3, ["n[0-1]", "n2"]), (4, ["n[0-1]", "n[2-3]"]), (9, ["n[0-4]", "n[5-8]"])],
)
def test_leaves(nodes: int, leaves: list[str]) -> None:
    lines = config.topology_conf(replace(SMALL, nodes=nodes)).splitlines()
    assert [line.partition("Nodes=")[2] for line in lines[:-1]] == leaves
    assert lines[-1] == f"SwitchName=spine Switches={'leaf[0-1]' if nodes > 1 else 'leaf0'}"
    one = "n0" if nodes == 1 else f"n[0-{nodes - 1}]"
    assert config.topology_conf(replace(SMALL, nodes=nodes, rails=1)) == f"SwitchName=rails Nodes={one}\n"


if __name__ == "__main__":
    for folder, spec in SPECS.items():
        (GOLDEN / folder).mkdir(parents=True, exist_ok=True)
        for file, text in config.files(spec).items():
            (GOLDEN / folder / file).write_text(text)
