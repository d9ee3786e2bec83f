"""A folder that is not a lab's is never touched."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from hpctrain import lab
from hpctrain.errors import LabError
from hpctrain.lab import folder


@pytest.fixture
def spec(home: Path) -> lab.LabSpec:
    return lab.LabSpec(home, nodes=2, first_port=21000)


def test_written_over_what_was_there(spec: lab.LabSpec) -> None:
    folder.claim(spec.folder)
    folder.write(spec)
    (spec.folder / "db" / "data").mkdir()
    (spec.folder / "run" / "old").touch()
    again = replace(spec, nodes=1, accounting=True)
    folder.write(again)
    assert folder.load(spec.folder) == again
    assert not (spec.folder / "db" / "data").exists() and not (spec.folder / "run" / "old").exists()
    modes = {name: (spec.folder / name).stat().st_mode & 0o777 for name in ("etc/munge.key", "etc/slurmdbd.conf", "db")}
    assert modes == {"etc/munge.key": 0o600, "etc/slurmdbd.conf": 0o600, "db": 0o700}


def test_keys_are_not_shared(spec: lab.LabSpec) -> None:
    keys = set()
    for _ in range(2):
        folder.claim(spec.folder)
        folder.write(spec)
        keys.add((spec.etc / "munge.key").read_bytes())
    assert len(keys) == 2


def test_foreign_folders_are_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(LabError, match="is not empty and holds no lab"):
        folder.claim(tmp_path)
    with pytest.raises(LabError, match="holds no lab, so it is left as it is"):
        lab.down(tmp_path)
    assert (tmp_path / "thesis.tex").exists()


def test_labs_of_others_are_refused_and_kept(spec: lab.LabSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.claim(spec.folder)
    folder.write(spec)
    me = os.geteuid()
    for act in (folder.claim, lab.attach, lab.down):
        monkeypatch.setattr(os, "geteuid", lambda: me + 1)
        with pytest.raises(LabError, match="belongs to another user; name another with --folder, or use sudo"):
            act(spec.folder)
        monkeypatch.undo()
    assert folder.load(spec.folder) == spec


def test_damaged_record(spec: lab.LabSpec) -> None:
    spec.folder.mkdir()
    for text in ("", "{}", "[1]", '{"folder": "/x", "colour": 1}'):
        (spec.folder / folder.RECORD).write_text(text)
        with pytest.raises(LabError, match=r"lab\.json is damaged; delete"):
            folder.load(spec.folder)
    (spec.folder / folder.RECORD).unlink()


def test_no_lab(tmp_path: Path) -> None:
    assert lab.down(tmp_path / "none") is False
    with pytest.raises(LabError, match=r"no lab runs in .*; bring one up with hpctrain lab up"):
        lab.attach(tmp_path / "none")


def test_one_at_a_time(spec: lab.LabSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    spec.folder.mkdir()
    order = []

    def second() -> None:
        with folder.locked(spec.folder):
            order.append("second")

    with folder.locked(spec.folder):
        thread = threading.Thread(target=second)
        thread.start()
        time.sleep(0.3)
        order.append("first")
        monkeypatch.setattr(folder, "LOCK_TIMEOUT_S", 0.0)
        with pytest.raises(LabError, match="is being brought up or down elsewhere"), folder.locked(spec.folder):
            pass
    thread.join()
    assert order == ["first", "second"]


def test_taken_down_while_waiting(spec: lab.LabSpec) -> None:
    spec.folder.mkdir()
    said = []

    def second() -> None:
        try:
            with folder.locked(spec.folder):
                said.append("held")
        except LabError as error:
            said.append(str(error))

    with folder.locked(spec.folder):
        thread = threading.Thread(target=second)
        thread.start()
        time.sleep(0.2)
        spec.folder.rmdir()
        spec.folder.mkdir()
    thread.join()
    assert said == [f"the lab in {spec.folder} was taken down just now; try again."]
