"""Damage of every kind is found, named, refused and stepped over."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hpctrain.checkpoint.catalog import ls
from hpctrain.checkpoint.collective import find, save
from hpctrain.checkpoint.manifest import (
    FileRecord,
    _checksum_of,
    checksum,
    checksum_text,
    dump_manifest,
    load_manifest,
)
from hpctrain.checkpoint.read import CheckpointReader
from hpctrain.checkpoint.tensorfile import LENGTH, TensorFile
from hpctrain.checkpoint.verify import Share, verify
from hpctrain.errors import CheckpointError
from tests.checkpoint.state import FakeState, alone

VALUES, INDEX, MANIFEST = "rank-00000.safetensors", "rank-00000.json", "manifest.json"


def flip(path: Path, at: int, mask: int = 1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= mask
    path.write_bytes(data)


def edit_manifest(step: Path, change: Callable[[dict], None], sign: bool = True) -> None:
    """Change the manifest; with `sign` its own checksum is made to fit, as another program might have."""
    text = json.loads((step / MANIFEST).read_text())
    change(text["body"])
    if sign:
        text["checksum"] = _checksum_of(text["body"])
    (step / MANIFEST).write_text(json.dumps(text))


def drop_checksum(step: Path) -> None:
    def change(body: dict) -> None:
        for record in body["files"]:
            if record["name"] == VALUES:
                del record["checksum"]

    edit_manifest(step, change)


def drop_own_checksum(step: Path) -> None:
    text = json.loads((step / MANIFEST).read_text())
    del text["checksum"]
    (step / MANIFEST).write_text(json.dumps(text))


def cut_last_byte(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "payload bit": (lambda s: flip(s / VALUES, -3, 0x10), f"{VALUES} is damaged"),
    "payload eight bits": (lambda s: flip(s / VALUES, -9, 0xFF), f"{VALUES} is damaged"),
    "header bit": (lambda s: flip(s / VALUES, LENGTH + 2), f"{VALUES} is damaged"),
    "header length": (lambda s: flip(s / VALUES, 1), f"{VALUES} is damaged"),
    "index bit": (lambda s: flip(s / INDEX, 60), f"{INDEX} is damaged"),
    "truncated": (lambda s: cut_last_byte(s / VALUES), f"{VALUES} has .* bytes, .* were written"),
    "empty": (lambda s: (s / VALUES).write_bytes(b""), f"{VALUES} has 0 bytes"),
    "longer": (lambda s: (s / VALUES).write_bytes((s / VALUES).read_bytes() + b"x"), f"{VALUES} has .* bytes"),
    "values deleted": (lambda s: (s / VALUES).unlink(), f"{VALUES} is missing"),
    "index deleted": (lambda s: (s / INDEX).unlink(), f"{INDEX} is missing"),
    "manifest deleted": (lambda s: (s / MANIFEST).unlink(), f"{MANIFEST} is missing"),
    "manifest truncated": (lambda s: cut_last_byte(s / MANIFEST), f"{MANIFEST} is damaged"),
    "manifest changed": (lambda s: edit_manifest(s, lambda b: b.update(step=9), sign=False), f"{MANIFEST} is damaged"),
    "manifest empty": (lambda s: (s / MANIFEST).write_text("{}"), f"{MANIFEST} is not of an hpctrain checkpoint"),
    "manifest lists nothing": (lambda s: edit_manifest(s, lambda b: b.update(files=[])), f"{MANIFEST} lists no files"),
    "manifest lacks a field": (lambda s: edit_manifest(s, lambda b: b.pop("scalars")), f"{MANIFEST} lacks 'scalars'"),
    "no checksum of a file": (drop_checksum, f"{VALUES} has no checksum"),
    "no checksum of the manifest": (drop_own_checksum, f"{MANIFEST} has no checksum"),
    "a folder for a file": (
        lambda s: ((s / VALUES).unlink(), (s / VALUES).mkdir()),
        f"{VALUES} (has .* bytes|cannot be read)",
    ),
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with steps 100 and 200."""
    for step in (100, 200):
        save(tmp_path, step, FakeState(seed=step), {"consumed_samples": step * 8}, alone())
    return tmp_path


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_named_and_stepped_over(run: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    newest = run / "checkpoints" / "step-00000200"
    assert verify(newest).valid
    damage, text = DAMAGES[name]
    damage(newest)
    assert not verify(newest).valid
    with caplog.at_level(logging.WARNING):
        found = find(run, alone())
    assert found is not None and found.step == 100 and found.extra == {"consumed_samples": 800}
    FakeState(seed=100).load(found.reader)
    assert [v.path for v in found.refused] == [newest]
    assert re.search(f"step-00000200: .*{text}", caplog.text), caplog.text


def test_every_damaged_file_is_named(run: Path) -> None:
    newest = run / "checkpoints" / "step-00000200"
    flip(newest / VALUES, -1)
    (newest / INDEX).unlink()
    assert [d.file for d in verify(newest).damage] == [INDEX, VALUES]


def test_every_single_byte_counts(run: Path) -> None:
    newest = run / "checkpoints" / "step-00000200"
    for file in sorted(newest.iterdir()):
        sound = file.read_bytes()
        body = json.loads(sound) if file.name == MANIFEST else None
        for at in range(0, len(sound), 7):
            flip(file, at)
            if body is not None and verify(newest).valid:
                # White space of the manifest is the only byte that may change: the content is what counts.
                assert json.loads(file.read_bytes()) == body, at
            elif body is None:
                assert not verify(newest).valid, (file.name, at)
            file.write_bytes(sound)
    assert verify(newest).valid


def test_nothing_valid_is_an_error_that_lists_all(run: Path) -> None:
    (run / "checkpoints" / "step-00000200" / VALUES).unlink()
    flip(run / "checkpoints" / "step-00000100" / VALUES, -1)
    with pytest.raises(CheckpointError) as caught:
        find(run, alone())
    text = str(caught.value)
    assert f"step-00000200: {VALUES} is missing" in text and f"step-00000100: {VALUES} is damaged" in text


@pytest.mark.parametrize("content", [b"", b"garbage\xff", b"step-99999999\n", b"step-00000100\n", None])
def test_the_pointer_is_not_trusted(run: Path, content: bytes | None) -> None:
    pointer = run / "checkpoints" / "latest"
    pointer.unlink()
    if content is not None:
        pointer.write_bytes(content)
    found = find(run, alone())
    assert found is not None and found.step == 200


def test_pointer_without_checkpoints_is_an_error(run: Path) -> None:
    for step in (100, 200):
        shutil.rmtree(run / "checkpoints" / f"step-{step:08d}")
    with pytest.raises(CheckpointError, match="no checkpoint although its pointer names 'step-00000200'"):
        find(run, alone())


def test_nothing_there_is_none(tmp_path: Path) -> None:
    assert find(tmp_path / "absent", alone()) is None
    (tmp_path / "checkpoints" / "step-00000100.partial").mkdir(parents=True)
    assert find(tmp_path, alone()) is None


def test_a_foreign_folder_is_not_a_checkpoint(run: Path) -> None:
    for name in ("step-300", "step-00000300.bak", "other"):
        shutil.copytree(run / "checkpoints" / "step-00000200", run / "checkpoints" / name)
    found = find(run, alone())
    assert found is not None and found.path.name == "step-00000200" and len(ls(run)) == 2


def test_a_run_its_checkpoints_or_one_of_them(run: Path) -> None:
    for path, step in ((run, 200), (run / "checkpoints", 200), (run / "checkpoints" / "step-00000100", 100)):
        assert find(path, alone()).step == step


def test_later_version_is_refused(run: Path) -> None:
    newest = run / "checkpoints" / "step-00000200"
    text = json.loads((newest / MANIFEST).read_text())
    (newest / MANIFEST).write_text(json.dumps({**text, "version": 2}))
    with pytest.raises(CheckpointError, match="format version 2, this program reads 1"):
        CheckpointReader(newest)


def test_manifest_over_an_incomplete_state(tmp_path: Path) -> None:
    """All files are as the manifest says, but a piece was never written."""
    step = save(tmp_path, 100, FakeState(tiles=3), {}, alone()).path
    index = json.loads((step / INDEX).read_text())
    gone = next(p for p in index["pieces"] if p["shape"] != p["global_shape"])
    index["pieces"].remove(gone)
    data = json.dumps(index).encode()
    (step / INDEX).write_bytes(data)
    record = FileRecord(INDEX, len(data), checksum_text(checksum(data)))
    manifest = load_manifest(step)
    files = tuple(record if f.name == INDEX else f for f in manifest.files)
    (step / MANIFEST).write_bytes(dump_manifest(replace(manifest, files=files)))
    assert re.search(f"not of a whole state .{gone['kind']} of {gone['name']}: its pieces hold", str(verify(step)))


@pytest.mark.parametrize(
    "change",
    [
        {"step": "100"}, {"step": None}, {"serial": True}, {"created": 5}, {"scalars": []}, {"scalars": {"a": "x"}},
        {"extra": []}, {"files": {"a": 1}}, {"files": [[1]]}, {"files": ["name"]}, {"files": None},
        {"files": [{"name": 5, "bytes": 1}]}, {"files": [{"name": "../x", "bytes": 1}]},
        {"files": [{"name": "x", "bytes": float("inf")}]}, {"files": [{"name": "x", "bytes": 1, "checksum": 4}]},
    ],
)  # fmt: skip
def test_manifest_with_odd_content(tmp_path: Path, change: dict) -> None:
    """Signed by whoever wrote it, so no checksum tells: it is told what is odd, and never followed by a traceback."""
    step = save(tmp_path, 100, FakeState(), {}, alone()).path
    edit_manifest(step, lambda body: body.update(change))
    verdict = verify(step)
    assert not verdict.valid and [damage.file for damage in verdict.damage] == [MANIFEST], verdict
    with pytest.raises(CheckpointError, match=re.escape(MANIFEST)):
        load_manifest(step)


def test_index_that_is_none(tmp_path: Path) -> None:
    """Intact, as the checksum says, but not what its name says."""
    step = save(tmp_path, 100, FakeState(), {}, alone()).path
    (step / INDEX).write_bytes(b"[]")
    record = FileRecord(INDEX, 2, checksum_text(checksum(b"[]")))
    manifest = load_manifest(step)
    files = tuple(record if f.name == INDEX else f for f in manifest.files)
    (step / MANIFEST).write_bytes(dump_manifest(replace(manifest, files=files)))
    assert str(verify(step)) == f"step-00000100: {INDEX} is not an index"


def test_shares_together_look_at_every_file(run: Path) -> None:
    """And only one of them reports a file, also where the damaged one is an index."""
    newest = run / "checkpoints" / "step-00000200"
    for name, at in ((VALUES, -1), (INDEX, 12), (INDEX, -1)):
        sound = (newest / name).read_bytes()
        flip(newest / name, at)
        judged = [verify(newest, Share(i, 3)).valid for i in range(3)]
        assert judged.count(False) == 1
        (newest / name).write_bytes(sound)


def test_a_short_file_is_an_error_not_a_signal(run: Path) -> None:
    """Reading past the end of a map kills the process; it must not come to that."""
    newest = run / "checkpoints" / "step-00000200"
    data = (newest / VALUES).read_bytes()
    (newest / VALUES).write_bytes(data[:-8])
    with pytest.raises(CheckpointError, match="does not hold tensor"):
        FakeState(seed=200).load(CheckpointReader(newest))
    (newest / VALUES).write_bytes(data[:5])
    with pytest.raises(CheckpointError, match="cannot be read as a safetensors file"):
        TensorFile(newest / VALUES)
