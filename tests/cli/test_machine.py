"""What the doctor says of a machine, from pictures of machines."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import psutil
import pytest

from hpctrain.cli import machine
from hpctrain.layout.offload import DiskRates
from hpctrain.layout.units import GIB, MIB

FAST = DiskRates(3e9, 1.5e9)


def disk(kind: str = "ext4", direct: bool | None = True, rates: DiskRates | None = FAST) -> machine.Fact:
    return machine.of_disk(machine.Disk(Path("/scratch"), kind, 3 * GIB, direct, rates))


def test_a_disk_that_is_fit() -> None:
    assert disk() == machine.Fact("disk of /scratch", "ext4, 3.0 GiB free, reads 3 and writes 1.5 GB/s")


@pytest.mark.parametrize(
    ("picture", "costs"),
    [
        ({"rates": None}, "hpctrain bench nvme /scratch --keep"),
        ({"kind": "tmpfs", "direct": False}, "it is in memory"),
        ({"kind": "tmpfs"}, "it is in memory"),
        ({"kind": "lustre"}, "it is on the network"),
        ({"direct": False}, "through the page cache"),
        ({"direct": None}, "nothing can be offloaded there; name another with sharding.offload.path"),
    ],
)
def test_what_a_disk_costs(picture: dict[str, Any], costs: str) -> None:
    assert costs in disk(**picture).costs


def test_this_disk(tmp_path: Path) -> None:
    found = machine.look_at(tmp_path)
    assert found.kind and found.direct is not None and found.rates is None
    assert abs(found.free - psutil.disk_usage(str(tmp_path)).free) < GIB
    assert machine.look_at(tmp_path / "nowhere").direct is None


def test_limits() -> None:
    def costs(memlock: int, files: int, shm: int | None) -> list[bool]:
        return [bool(f.costs) for f in machine.of_limits({"memlock": memlock, "nofile": files, "stack": -1}, shm)]

    assert costs(-1, -1, GIB) == [False, False, False]
    assert costs(64 << 10, 256, 64 * MIB) == [True, True, True]
    assert costs(-1, 65536, None) == [False, False, True]
    low, few, _ = machine.of_limits({"memlock": 8 << 20, "nofile": 256, "stack": -1}, GIB)
    assert (low.found, few.found) == ("8192 KiB", "256 files")
    assert "connections fail" in low.costs and "ulimit -n" in few.costs


def test_a_limit_of_a_control_group() -> None:
    assert list(machine.memory(None))[1] == machine.Fact("control group", "no limit of memory")
    tight = list(machine.memory(MIB << 9))[1]
    assert tight.found == "0.5 GiB left under its limit" and "--mem" in tight.costs
    assert list(machine.memory(1 << 60))[1].costs == ""


def test_devices(tmp_path: Path) -> None:
    for name in ("mlx5_1", "mlx5_0"):
        (tmp_path / name).mkdir()
    assert list(machine.fabric(tmp_path)) == [machine.Fact("RDMA devices", "mlx5_0, mlx5_1")]
    (none,) = machine.fabric(tmp_path / "nowhere")
    assert none.found == "none" and "TCP" in none.costs


def test_another_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.deepspeed().costs == ""
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.20.0")
    assert machine.deepspeed().costs == "ZeRO is refused: pip install deepspeed==0.19.8"


def test_all_are_named_once() -> None:
    names = [fact.name for fact in machine.machine()]
    assert len(names) == len(set(names))
    assert {"torch", "DeepSpeed", "NCCL", "MPI", "Slurm", "libaio", "RDMA devices", "memory", "/dev/shm"} <= {*names}
