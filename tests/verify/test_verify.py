"""The command: good layouts pass, a broken one is found and named, whatever is wrong gives status 1."""

from __future__ import annotations

import json

import pytest
import torch

from hpctrain.cli import main
from hpctrain.verify.cases import base
from hpctrain.verify.reference import reference
from hpctrain.verify.samples import global_batch
from tests import training

SMALL = [
    *("model.layers=2", "model.hidden=24", "model.heads=4", "model.kv_heads=2", "model.ffn=40", "model.vocab=53"),
    *("model.max_seq=32", "data.seq=13", "train.global_batch=4", "train.micro_batch=1", "optimizer.clip=0.05"),
]


def verify(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main(["verify", "llama-tiny", *SMALL, *arguments])
    out, err = capsys.readouterr()
    return int(end.value.code or 0), out, err


def test_layouts_pass_each_with_its_own_tolerance(capsys: pytest.CaptureFixture[str]) -> None:
    layouts = "tp=2,sp=true,data.seq=14;pp=2,schedule=1f1b;pp=2,schedule=zb-h1;"
    layouts += "dp=2,sharding.stage=3;tp=2,pp=2,sharding.stage=1;cp=2,dp=2,cp_method=ulysses,data.seq=14"
    status, out, err = verify(capsys, "--layouts", layouts, "--json")
    found = json.loads(out)
    assert status == 0, (found, err)
    assert [(v["layout"], v["ok"]) for v in found] == [(layout, True) for layout in layouts.split(";")]
    assert [v["precision"] for v in found] == ["float64"] * 3 + ["float32"] * 2 + ["float64"]
    for verdict in found:
        for kind in ("loss", "norm", "gradient", "weight"):
            assert 0 <= verdict[kind]["difference"] <= verdict[kind]["limit"]
        if verdict["precision"] == "float64":
            assert verdict["weight"]["limit"] == 1e-9
        else:
            assert 1e-7 < verdict["loss"]["limit"] < 1e-4 and verdict["gradient"]["limit"] < 1e-1


def test_a_layout_that_computes_something_else_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An embedding whose parts are not summed: the ranks inherit the breakage."""
    from hpctrain.parallel import tensor

    monkeypatch.setattr(tensor, "reduce_from", lambda x, axis: x)
    status, out, err = verify(capsys, "--layouts", "tp=2;dp=2;tp=3")
    assert status == 1
    assert "error: 2 of 3 layouts did not pass: tp=2; tp=3." in err
    lines = out.splitlines()
    assert lines[1].startswith("tp=2 ") and lines[1].endswith("DIFFERS")
    assert lines[2].split()[:4] == ["dp=2", "2", "none", "float64"] and lines[2].endswith("ok")
    assert "did not run" in lines[3] and "tp=3: parallel.tp=3: must divide model.heads=4" in out
    assert "float64: only the order of sums may differ, so 1e-09" in out


def test_the_reference_is_that_of_the_equivalence_tests() -> None:
    """Two that were written apart, one over micro-batches and one over the whole batch."""
    config = base("llama-tiny", [*SMALL, "train.micro_batch=2"], 3, "float64")
    mine = reference(config, 1)
    batch = global_batch(config, 0)
    assert batch.labels[0].unique().tolist() == [-100], "the first sample counts nowhere"
    assert -100 not in batch.labels[-1]
    theirs = training.reference(config, 1, [batch], [config.optimizer.lr])
    assert mine.losses == pytest.approx(theirs.losses, rel=1e-12)
    assert mine.norms == pytest.approx(theirs.norms, rel=1e-12)
    for name, values in theirs.weights.items():
        torch.testing.assert_close(mine.weights[name], values, rtol=1e-10, atol=1e-13)


def test_jobs_need_a_slurm(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    status, _, err = verify(capsys, "--layouts", "tp=2", "--slurm")
    assert status == 2
    assert err == "error: --slurm=true: there is no Slurm here: no sbatch on PATH; leave it out.\n"
