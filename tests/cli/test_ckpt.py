"""`hpctrain ckpt`."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hpctrain.checkpoint.collective import save
from hpctrain.cli.ckpt import ckpt
from hpctrain.errors import CheckpointError
from tests.checkpoint.state import TENSORS, FakeState, alone

EXTRA = {"engine": "deepspeed", "layout": {"pp": 1, "dp": 4, "tp": 2, "sp": True}, "consumed_samples": 1600}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (100, 200):
        save(tmp_path, step, FakeState(seed=step, tiles=1), EXTRA, alone())
    return tmp_path


def invoke(*args: object) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(ckpt, [str(a) for a in args])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_ls(run: Path) -> None:
    lines = json.loads(invoke("ls", run, "--json").stdout)
    assert [(line["step"], line["latest"], line["damage"]) for line in lines] == [(100, False, ""), (200, True, "")]
    step = run / "checkpoints" / "step-00000200"
    size = sum(p.stat().st_size for p in step.iterdir() if p.name != "manifest.json")
    assert lines[1]["path"] == str(step) and lines[1]["bytes"] == size and lines[1]["files"] == 3
    assert lines[1]["engine"] == "deepspeed" and lines[1]["layout"] == EXTRA["layout"]
    shown = invoke("ls", run)
    assert shown.exit_code == 0
    first, second = shown.stdout.splitlines()[1:]
    assert "100" in first and "*" not in first and "200" in second and "*" in second
    assert "dp=4 tp=2 sp" in second and "committed" in second


def test_ls_names_a_manifest_that_cannot_be_read(run: Path) -> None:
    (run / "checkpoints" / "step-00000100" / "manifest.json").write_text("{")
    lines = json.loads(invoke("ls", run, "--json").stdout)
    assert [line["damage"] for line in lines] == ["manifest.json is damaged (not JSON)", ""]
    assert "manifest.json is damaged" in invoke("ls", run).stdout


def test_what_was_set_aside_is_shown_and_judged_only_by_name(run: Path) -> None:
    step = run / "checkpoints" / "step-00000100"
    flip(step / "rank-00000.safetensors")
    aside = step.rename(step.with_name("step-00000100.refused"))
    lines = json.loads(invoke("ls", run, "--json").stdout)
    assert [(line["step"], line["refused"]) for line in lines] == [(100, True), (200, False)]
    assert "refused, set aside" in invoke("ls", run).stdout.splitlines()[1]
    assert [v["valid"] for v in json.loads(invoke("verify", run, "--json").stdout)] == [True]
    result = invoke("verify", aside, "--json")
    assert result.exit_code == 1 and [v["path"] for v in json.loads(result.stdout)] == [str(aside)]
    assert json.loads(invoke("show", run, "--json").stdout)["step"] == 200


@pytest.mark.parametrize("where", ["", "checkpoints", "checkpoints/step-00000200"])
def test_verify_takes_any_of_the_folders(run: Path, where: str) -> None:
    result = invoke("verify", run / where, "--json")
    assert result.exit_code == 0
    assert [v["valid"] for v in json.loads(result.stdout)] == ([True] if "step" in where else [True, True])


def test_verify_fails_on_damage(run: Path) -> None:
    flip(run / "checkpoints" / "step-00000100" / "rank-00000.safetensors")
    result = invoke("verify", run, "--json")
    assert result.exit_code == 1
    bad, good = json.loads(result.stdout)
    assert good["valid"] and good["damage"] == []
    assert not bad["valid"] and [d["file"] for d in bad["damage"]] == ["rank-00000.safetensors"]
    shown = invoke("verify", run)
    assert shown.exit_code == 1 and "rank-00000.safetensors is damaged (checksum" in shown.stdout
    assert invoke("verify", run / "checkpoints" / "step-00000200").exit_code == 0


def test_show(run: Path) -> None:
    about = json.loads(invoke("show", run, "--json").stdout)
    assert about["step"] == 200 and about["extra"] == EXTRA and about["scalars"] == {"step": 200.0, "loss_scale": 200.1}
    assert about["parameters"] == sum(math.prod(shape) for _, kind, _, shape in TENSORS if kind == "weight")
    assert len(about["tensors"]) == len(TENSORS)
    pieces = {(name, kind): 0 for name, kind, _, _ in TENSORS}
    for name, kind, *_ in FakeState(tiles=1).boxes():
        pieces[name, kind] += 1
    for t in about["tensors"]:
        assert t["pieces"] == pieces[t["name"], t["kind"]]
    assert max(pieces.values()) > 1
    shown = invoke("show", run / "checkpoints" / "step-00000100")
    assert shown.exit_code == 0
    text = " ".join(shown.stdout.split())
    assert "step 100" in text and "parameters 107" in text and "embed exp_avg [7, 5] float32" in text


@pytest.mark.parametrize("command", ["ls", "verify", "show"])
def test_nothing_there(tmp_path: Path, command: str) -> None:
    result = invoke(command, tmp_path / "absent")
    assert isinstance(result.exception, CheckpointError)
    assert str(result.exception).startswith(f"No checkpoint in {tmp_path}/absent; give a run folder")


def test_show_of_a_damaged_manifest(run: Path) -> None:
    step = run / "checkpoints" / "step-00000200"
    (step / "manifest.json").unlink()
    result = invoke("show", step)
    assert isinstance(result.exception, CheckpointError)
    assert "step-00000200 is not a usable checkpoint: manifest.json is missing." in str(result.exception)


def test_help_has_examples() -> None:
    for command in ("ls", "verify", "show"):
        assert f"Example: hpctrain ckpt {command} runs/" in invoke(command, "--help").stdout


def test_no_torch(run: Path) -> None:
    code = (
        "import sys\nfrom hpctrain.cli.ckpt import ckpt\n"
        f"ckpt(['show', {str(run)!r}], standalone_mode=False)\nckpt(['verify', {str(run)!r}], standalone_mode=False)\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, timeout=60).returncode == 0
