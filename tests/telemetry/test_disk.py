"""Rates of a disk, as offloading uses it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpctrain.errors import ConfigError
from hpctrain.layout.offload import DiskRates
from hpctrain.layout.units import MIB
from hpctrain.telemetry import disk


def test_every_byte_is_moved_in_every_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a file that is larger than the memory it is written from; and no name is left."""
    moved: list[tuple[str, int, int]] = []
    monkeypatch.setattr(disk, "PIECE", 2 * MIB)
    for name in ("write_from", "read_into"):
        real = getattr(disk.ScratchFile, name)

        def seen(file: disk.ScratchFile, data: memoryview, offset: int, name: str = name, real=real) -> None:  # type: ignore[no-untyped-def]
            moved.append((name, offset, len(data)))
            real(file, data, offset)

        monkeypatch.setattr(disk.ScratchFile, name, seen)
    found = disk.transfers(tmp_path, 5 * MIB, MIB, 2, 3)
    whole = [(at * MIB, MIB) for at in range(5)]
    assert sorted(m[1:] for m in moved if m[0] == "write_from") == sorted(whole * 4)
    assert sorted(m[1:] for m in moved if m[0] == "read_into") == sorted(whole * 3)
    assert len(found.write) == len(found.read) == 3 and min(*found.write, *found.read) > 0
    assert os.listdir(tmp_path) == []


def test_the_one_that_asks_least_of_the_disk_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {(MIB, 2): 1.0, (MIB, 4): 1.96, (MIB, 8): 2.0, (4 * MIB, 2): 1.97, (4 * MIB, 4): 2.0, (4 * MIB, 8): 1.9}
    monkeypatch.setattr(disk, "_rates", lambda _, size, block, n: DiskRates(rates[block, n], rates[block, n], block, n))
    found = disk.measure_disk(tmp_path)
    assert (found.block, found.threads) == (MIB, 4)


def test_a_disk_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "measure_disk", lambda folder: disk._rates(folder, MIB, MIB, 1))
    found = disk.disk_rates(tmp_path)
    monkeypatch.setattr(disk, "measure_disk", None)
    assert disk.disk_rates(tmp_path) == found == disk.kept_rates(tmp_path)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"sharding.offload.path=.*no file can be made there"):
        disk.disk_rates(tmp_path / "absent")
