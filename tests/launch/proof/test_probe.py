"""What a rank sees of its machine, where it may not see all of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hpctrain.cluster.node import Gpu, Node
from hpctrain.cluster.wiring import with_gpus
from hpctrain.launch.place.bind import Binding
from hpctrain.launch.proof.compare import Rank, of_rank
from hpctrain.launch.proof.probe import Found, machine_cpus, machine_faults, probe
from tests.cluster.test_sysfs import put
from tests.launch.machines import DATA, captured

XML = "nccl_xml/azure_ndv4-topo.xml"


def on_bus(root: Path, node: Node) -> Path:
    for gpu in node.gpus:
        (root / "sys/bus/pci/devices" / gpu.pci).mkdir(parents=True)
    return root


def test_a_job_with_half_of_the_gpus_is_not_on_another_machine(tmp_path: Path) -> None:
    """NCCL's file names all eight, the job sees four, and the other four are on the bus all the same."""
    whole = replace(captured(XML), sources=("sysfs",))
    half = with_gpus(whole, whole.gpus[4:])
    assert machine_faults(half, str(DATA / XML), on_bus(tmp_path / "a", whole)) == ()
    gone = machine_faults(half, str(DATA / XML), on_bus(tmp_path / "b", half))
    assert gone == (
        "NCCL_TOPO_FILE: GPU 0001:00:00.0, 0002:00:00.0, 0003:00:00.0, 0004:00:00.0 is in NCCL XML "
        "(azure_ndv4-topo.xml), not in sysfs",
    ), "these are not"
    other = replace(half, gpus=(*half.gpus[:3], Gpu(3, pci="00aa:00:00.0")))
    said = " ".join(machine_faults(other, str(DATA / XML), on_bus(tmp_path / "c", whole)))
    assert "GPU 00aa:00:00.0 is in sysfs, not in NCCL XML" in said


@pytest.mark.parametrize(
    ("files", "count"),
    [
        ({"sys/devices/system/cpu/online": "0-95"}, 96),
        # a container that was given four CPUs, by either version of control groups
        ({"sys/devices/system/cpu/online": "0-95", "sys/fs/cgroup/cpuset.cpus.effective": "8-11"}, 4),
        ({"sys/devices/system/cpu/online": "0-95", "sys/fs/cgroup/cpuset/cpuset.effective_cpus": "0,48"}, 2),
        ({"sys/devices/system/cpu/online": "0-95", "sys/fs/cgroup/cpuset.cpus.effective": ""}, 96),
    ],
)
def test_cpus_that_a_job_could_have(tmp_path: Path, files: dict[str, str], count: int) -> None:
    for name, text in files.items():
        put(tmp_path / name, text)
    assert machine_cpus(tmp_path) == count


def test_the_first_process_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A site that keeps its system on two CPUs (CPUAffinity= of systemd) has not two CPUs for jobs: a task with one of
    the twelve that it was to have would pass."""
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1} if pid else {5})
    monkeypatch.setattr("hpctrain.launch.proof.probe._read", lambda path: "0-95" if path.name == "online" else "")
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "12")
    found = probe(None)
    assert (found.cpu_count, found.cpus) == (96, "5")
    assert [one.what for one in of_rank(Rank(0, None, replace(found, shm_bytes=1 << 40)))] == ["number of CPUs"]


def test_what_is_hidden_is_a_warning() -> None:
    """A container without /sys: whether the rail is up cannot be told, and does not stop the job."""
    binding = Binding("n0", nic="mlx5_0", unseen=("no NIC can be seen on this machine",))
    found = probe(binding)
    assert (found.nic, found.rate_gbit) == ("", None)
    (said,) = of_rank(Rank(0, binding, Found(cpus="0", shm_bytes=1 << 40, nic=found.nic)))
    assert not said.stops and said.what == "device" and "no NIC can be seen" in said.found
