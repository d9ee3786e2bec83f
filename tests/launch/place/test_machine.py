"""Which GPUs of a machine a process may use, where NVML does not tell: by device nodes, and by what torch sees."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hpctrain.cluster.node import Distance, Gpu, Nic, Node, Numa
from hpctrain.launch.life.identity import Identity
from hpctrain.launch.place import bind as binding
from hpctrain.launch.place import machine
from hpctrain.launch.place.bind import bind, settled
from hpctrain.launch.place.machine import may_open, this_machine
from tests.cluster.test_sysfs import Tree, put, switch
from tests.launch.machines import config, job

NOBODY = 65534


@pytest.fixture
def tree() -> Iterator[Path]:
    """A machine with two GPUs, in a folder that everybody may enter."""
    with tempfile.TemporaryDirectory(prefix="hpctrain-tree-") as made:
        root = Path(made)
        root.chmod(0o755)
        built = Tree(root)
        for numa, minor in ((0, 1), (1, 0)):  # numbers of device nodes do not follow addresses
            device = built.gpu(switch(numa, "3"), numa)
            put(root / f"proc/driver/nvidia/gpus/{device.name}/information", f"Model: A100\nDevice Minor: \t {minor}")
            put(root / f"dev/nvidia{minor}", "")
        yield root


def as_nobody(root: str) -> list[tuple[str, int]]:
    """What a process finds that may not open everything, as under control groups."""
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        os.setuid(NOBODY)
        os.write(writing, json.dumps([(gpu.pci, gpu.index) for gpu in this_machine(Path(root)).gpus]).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    return [tuple(row) for row in json.loads(os.read(reading, 9999))]


def test_gpus_of_other_jobs_are_left_out(ranks, tree: Path) -> None:
    """A job that has the second GPU: its device node is open, that of the first is closed though it is there."""
    first, second = "0000:13:00.0", "0000:93:00.0"
    for number in (0, 1):
        (tree / f"dev/nvidia{number}").chmod(0o666)
    assert ranks(0, as_nobody, str(tree)) == [[(first, 0), (second, 1)]]
    (tree / "dev/nvidia1").chmod(0o600)
    assert ranks(0, as_nobody, str(tree)) == [[(second, 0)]]
    (tree / "dev/nvidia0").chmod(0o600)
    assert ranks(0, as_nobody, str(tree)) == [[(first, 0), (second, 1)]], "a job without GPUs: nothing is known"
    assert may_open("0000:77:00.0", tree), "of a device whose number nobody tells nothing is known"


def half(index: int) -> str:
    return f"0000:{index:02x}:00.0"


CPUS = tuple(range(16))
EIGHT = Node(
    gpus=tuple(Gpu(i, pci=half(i), numa=i // 4, cpus=CPUS[8 * (i // 4) : 8 * (i // 4) + 8]) for i in range(8)),
    nics=tuple(Nic(f"mlx5_{i}", pci=f"0000:a{i}:00.0", numa=i // 4, role="rail", state="active") for i in range(8)),
    numas=(Numa(0, CPUS[:8]), Numa(1, CPUS[8:])),
    distances={(f"gpu{i}", f"mlx5_{j}"): Distance.PIX if i == j else Distance.SYS for i in range(8) for j in range(8)},
)


def bound_then_settled(path: str, seen: list[str]) -> tuple[object, ...]:
    """A rank whose machine shows eight GPUs; torch shows those that its job has."""
    binding.this_machine = lambda: EIGHT  # type: ignore[assignment]
    binding.allowed_cpus = lambda: CPUS  # type: ignore[assignment]
    masks: list[tuple[int, ...]] = []
    binding.set_affinity = masks.append  # type: ignore[assignment]
    os.environ.update(HPCTRAIN_RANK_TABLE=path, SLURMD_NODENAME="n0", CUDA_VISIBLE_DEVICES="0,1,2,3")
    for name in [*os.environ]:
        if name.startswith(("NCCL_", "UCX_", "GLOO_", "SLURM_JOB_ID")):
            del os.environ[name]
    me = Identity(1, 8, 1, 4, "srun", "k")
    first = bind(me)
    assert first is not None
    _, last = settled(first, me, seen)
    return first[1].pci, last.pci, last.nic, last.gpu, masks, os.environ["UCX_NET_DEVICES"], last.kept


def test_what_torch_sees_decides_where_nothing_else_does(ranks, tmp_path: Path) -> None:
    """GPUs 4 to 7 under control groups: Slurm numbers them 0 to 3, and /sys shows all eight. The place that was taken
    before torch was there is that of GPU 1; the right one is that of GPU 5, its CPUs and its NIC."""
    path = tmp_path / "table.json"
    path.write_text(job(EIGHT, ["n0", "n1"], config(2, 4, tp=4)).dump())
    found = ranks(0, bound_then_settled, str(path), [half(i) for i in range(4, 8)])[0]
    wrong, right, nic, gpu, masks, ucx, kept = found
    assert (wrong, right, nic, gpu) == (half(1), half(5), "mlx5_5", 1)
    assert masks == [(2, 3), (10, 11)], "CPUs are those near the right one, and not cut from those of the wrong one"
    assert ucx == "mlx5_5:1" and kept == {}, "variables too, and none counts as set by hand"
    same = ranks(0, bound_then_settled, str(path), [half(i) for i in range(8)])[0]
    assert same[0] == same[1] == half(1) and len(same[4]) == 1, "nothing is done twice where the plan was right"
    elsewhere = ranks(0, bound_then_settled, str(path), ["0000:ff:00.0"])[0]
    assert elsewhere[0] == elsewhere[1], "of devices that the machine does not show nothing can be planned"


def test_nvml_tells_which_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = replace(EIGHT, gpus=EIGHT.gpus[4:], nics=(), numas=(), sources=("NVML",))
    monkeypatch.setattr(machine.sysfs, "read", lambda *_: EIGHT)
    monkeypatch.setattr(machine.nvml, "read", lambda: shown)
    assert [gpu.pci for gpu in this_machine().gpus] == [half(i) for i in range(4, 8)]
