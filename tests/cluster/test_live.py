"""This machine, and NVML and nvidia-smi as stand-ins that answer as the real ones do."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpctrain.cluster import nvml, read, sysfs
from hpctrain.cluster.cpus import format_list
from hpctrain.cluster.node import Distance
from hpctrain.errors import ConfigError
from tests.cluster.machines import Machine
from tests.cluster.test_sysfs import node_tree


class NoNvml(Exception):
    pass


def stand_in(gpus: list[tuple[str, int]], peers: dict[tuple[int, int], int]) -> SimpleNamespace:
    """A pynvml: address and MIG mode of each GPU; links between pairs, to -1 for a switch."""

    def ends(index: int) -> list[str]:
        found = []
        for (a, b), count in peers.items():
            if index in (a, b):
                other = b if index == a else a
                found += [gpus[other][0] if other >= 0 else "00000000:C0:00.0"] * count
        return found

    def state(handle: int, link: int) -> int:
        if link >= len(ends(handle)):
            raise NoNvml("no such link")
        return 1

    return SimpleNamespace(
        NVMLError=NoNvml,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: len(gpus),
        nvmlDeviceGetHandleByIndex=lambda i: i,
        nvmlDeviceGetPciInfo=lambda h: SimpleNamespace(busId=gpus[h][0].encode()),
        nvmlDeviceGetName=lambda h: "NVIDIA A100-SXM4-80GB",
        nvmlDeviceGetUUID=lambda h: f"GPU-{h}",
        nvmlDeviceGetCpuAffinity=lambda h, words: [0b1111, 1, *[0] * (words - 2)],
        nvmlDeviceGetMigMode=lambda h: [gpus[h][1], 0],
        nvmlDeviceGetNvLinkState=state,
        nvmlDeviceGetNvLinkRemotePciInfo=lambda h, link: SimpleNamespace(busId=ends(h)[link]),
    )


def test_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [("00000000:9B:00.0", 0), ("00000000:1B:00.0", 1)]
    monkeypatch.setitem(sys.modules, "pynvml", stand_in(gpus, {(0, 1): 4}))
    node = nvml.read()
    assert [(g.index, g.pci, g.uuid, g.mig, format_list(g.cpus)) for g in node.gpus] == [
        (0, "0000:1b:00.0", "GPU-1", True, "0-3,64"),
        (1, "0000:9b:00.0", "GPU-0", False, "0-3,64"),
    ]
    assert node.nvlinks == {("gpu0", "gpu1"): 4} and node.distance("gpu0", "gpu1") is Distance.NVLINK
    assert node.problems == ("NVML does not list GPUs in the order of their addresses",)


def test_nvml_over_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [(f"00000000:{i}B:00.0", 0) for i in range(1, 4)]
    monkeypatch.setitem(sys.modules, "pynvml", stand_in(gpus, {(0, -1): 12, (1, -1): 12, (2, -1): 11}))
    assert nvml.read().nvlinks == {("gpu0", "gpu1"): 12, ("gpu0", "gpu2"): 11, ("gpu1", "gpu2"): 11}


def test_no_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(ConfigError, match="pynvml is not installed"):
        nvml.read()
    broken = stand_in([], {})

    def fails() -> None:
        raise NoNvml("driver not loaded")

    broken.nvmlInit = fails
    monkeypatch.setitem(sys.modules, "pynvml", broken)
    with pytest.raises(ConfigError, match="driver not loaded"):
        nvml.read()


def live(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str) -> Any:
    """`read_live` on a made tree with a made nvidia-smi and no NVML."""
    node_tree(tmp_path / "root")
    program = tmp_path / "bin/nvidia-smi"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(read.sysfs, "read", lambda root, environ, real=sysfs.read: real(tmp_path / "root", environ))
    return read.read_live({})


def test_live_with_nvidia_smi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine = Machine(
        2,
        3,
        link=lambda a, b: "NV12",
        reach=lambda g, n: "PIX" if n == 1 - g else "NODE" if g == 0 and n == 2 else "SYS",
        beside=lambda a, b: "NODE" if (a, b) == (1, 2) else "SYS",
        affinity=lambda g: (("0-3,8-11", "0", "N/A"), ("4-7,12-15", "1", "N/A"))[g],
        legend=["mlx5_0", "mlx5_1", "mlx5_2"],
    )
    (tmp_path / "topo").write_text(machine.tabbed())
    node = live(monkeypatch, tmp_path, f'[ "$1" = topo ] && cat {tmp_path}/topo || exit 9')
    assert node.nvlinks == {("gpu0", "gpu1"): 12} and node.gpus[1].pci == "0000:93:00.0"
    assert node.problems == ("`nvidia-smi -q -x` fails with exit code 9",)
    assert {nic.name for nic in node.nics} == {"mlx5_0", "mlx5_1", "mlx5_2", "eno1"}


def test_live_when_the_matrix_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:  # NVSentinel#1485
    node = live(monkeypatch, tmp_path, "exit 255")
    assert len(node.gpus) == 2 and "`nvidia-smi topo -m` fails with exit code 255" in node.problems


def test_here() -> None:
    node = read.read_live({})
    assert node.numas or node.name
