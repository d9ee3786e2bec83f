"""Limits of control groups, from pictures of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpctrain.layout.units import GIB
from hpctrain.telemetry import memory
from hpctrain.telemetry.memory import cgroup_available


class Device:
    type = "cpu"


def group(folder: Path, limit: str, used: int, cache: int, version: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    key = "inactive_file" if version == 2 else "total_inactive_file"
    (folder / "memory.stat").write_text(f"anon 17\n{key} {cache}\n")


def available(tmp_path: Path, proc: str) -> int | None:
    (tmp_path / "cgroup").write_text(proc)
    return cgroup_available(tmp_path / "cgroup", tmp_path)


def test_version_2_the_limit_of_an_ancestor_binds(tmp_path: Path) -> None:
    group(tmp_path / "job_7", str(8 * GIB), 6 * GIB, GIB, 2)
    group(tmp_path / "job_7/step_0", "max", 5 * GIB, 0, 2)
    group(tmp_path / "job_7/step_0/task_1", str(4 * GIB), GIB // 2, 0, 2)
    assert available(tmp_path, "0::/job_7/step_0/task_1\n") == 3 * GIB
    assert available(tmp_path, "0::/job_7/step_0\n") == 3 * GIB
    group(tmp_path / "job_7/step_0/task_1", str(2 * GIB), GIB // 2, 0, 2)
    assert available(tmp_path, "0::/job_7/step_0/task_1\n") == GIB + GIB // 2


def test_version_1_and_its_way_to_say_none(tmp_path: Path) -> None:
    group(tmp_path / "memory", "9223372036854771712", GIB, 0, 1)
    proc = "9:cpu,cpuacct:/other\n4:memory:/slurm/uid_1/job_2\n0::/\n"
    assert available(tmp_path, proc) is None
    group(tmp_path / "memory/slurm/uid_1", str(3 * GIB), GIB, 0, 1)
    assert available(tmp_path, proc) == 2 * GIB


def test_in_a_container_the_mount_is_the_group(tmp_path: Path) -> None:
    group(tmp_path, str(2 * GIB), GIB, 0, 2)
    assert available(tmp_path, "0::/docker/0123abcd\n") == GIB


def test_more_used_than_allowed_is_nothing_left(tmp_path: Path) -> None:
    group(tmp_path, str(GIB), 2 * GIB, 0, 2)
    assert available(tmp_path, "0::/\n") == 0


@pytest.mark.parametrize("stat", [None, "", "inactive_file\n", "inactive_file much\n", "a b c\n", "\n\n", b"\xff 1\n"])
def test_a_limit_holds_whatever_its_statistics_say(tmp_path: Path, stat: str | bytes | None) -> None:
    """Then no cache is known that would give way."""
    group(tmp_path, str(2 * GIB), GIB, 17, 2)
    (tmp_path / "memory.stat").unlink()
    if stat is not None:
        (tmp_path / "memory.stat").write_bytes(stat if isinstance(stat, bytes) else stat.encode())
    assert available(tmp_path, "0::/\n") == GIB


@pytest.mark.parametrize("limit", ["max", "", "nonsense", "1.5", "-1", "9223372036854771712", "9" * 5000])
def test_a_limit_that_is_no_number_of_bytes_is_none(tmp_path: Path, limit: str) -> None:
    group(tmp_path, limit, GIB, 0, 2)
    assert available(tmp_path, "0::/\n") is None


def test_names_of_groups_need_not_be_text(tmp_path: Path) -> None:
    name = b"job_\xff"
    group(Path(os.fsdecode(bytes(tmp_path) + b"/" + name)), str(2 * GIB), GIB, 0, 2)
    (tmp_path / "cgroup").write_bytes(b"0::/" + name + b"\n")
    assert cgroup_available(tmp_path / "cgroup", tmp_path) == GIB


@pytest.mark.parametrize("proc", ["", "nonsense\n", "0::/nowhere\n", "4:cpu:/\n"])
def test_without_control_groups(tmp_path: Path, proc: str) -> None:
    assert available(tmp_path, proc) is None
    assert cgroup_available(tmp_path / "missing", tmp_path) is None


def test_the_smaller_of_machine_and_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "cgroup_available", lambda: 5)
    assert memory.available_memory(Device()) == memory.Memory(5, "cgroup")  # type: ignore[arg-type]
    monkeypatch.setattr(memory, "cgroup_available", lambda: 1 << 61)
    found = memory.available_memory(Device())  # type: ignore[arg-type]
    assert found.kind == "machine" and 1 << 20 < found.bytes < 1 << 61


def test_peak_holds_what_was_let_go() -> None:
    before = memory.peak_memory(Device())  # type: ignore[arg-type]
    assert before.kind == "rss" and 10 << 20 < before.bytes < 1 << 40
    size = before.bytes + (32 << 20)
    block = bytearray(size)
    block[::4096] = b"x" * len(block[::4096])
    del block
    assert memory.peak_memory(Device()).bytes >= size  # type: ignore[arg-type]
