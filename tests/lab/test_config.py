"""The files of three labs, word for word; regenerate with `python -m tests.lab.test_config` and read the difference."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hpctrain.lab import config
from hpctrain.lab.spec import LabSpec

GOLDEN = Path(__file__).parent / "golden"
SMALL = LabSpec(Path("/srv/lab"), nodes=2, gpus=1, cpus=3, memory_mb=2000, first_port=21000, first_job=42)
SPECS = {
    "small": SMALL,
    "accounting": replace(SMALL, nodes=5, gpus=4, cpus=8, accounting=True, cgroup=2),
    "bare": replace(SMALL, nodes=1, gpus=0),
}


def golden(name: str) -> dict[str, str]:
    return {path.name: path.read_text() for path in (GOLDEN / name).iterdir()}


@pytest.mark.parametrize("name", SPECS)
def test_files(name: str) -> None:
    assert config.files(SPECS[name]) == golden(name)


def test_nothing_outside_of_the_folder_is_named() -> None:
    system = ("/etc/hosts", "/dev/shm", "/bin/true")
    for spec in SPECS.values():
        for name, text in config.files(spec).items():
            for word in text.replace("=", " ").replace('"', " ").replace(",", " ").split():
                if word.startswith("/") and len(word) > 1:
                    assert word.startswith(str(spec.folder)) or word in system, f"{name}: {word}"


def test_all_nodes_hang_on_exactly_one_leaf() -> None:
    for nodes in range(1, 10):
        lines = config.topology_conf(replace(SMALL, nodes=nodes)).splitlines()
        leaves = [line.partition("Nodes=")[2].split(",") for line in lines if "Nodes=" in line]
        assert sorted(name for leaf in leaves for name in leaf) == sorted(f"n{i}" for i in range(nodes))
        assert [len(leaf) for leaf in leaves] == [n for n in ((nodes + 1) // 2, nodes // 2) if n]


if __name__ == "__main__":
    for folder, spec in SPECS.items():
        (GOLDEN / folder).mkdir(parents=True, exist_ok=True)
        for file, text in config.files(spec).items():
            (GOLDEN / folder / file).write_text(text)
