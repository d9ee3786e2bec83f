"""The command: good layouts pass, a broken one is found and named, whatever is wrong gives status 1."""

from __future__ import annotations

import json

import pytest
import torch

from hpctrain.cli import main
from hpctrain.config.schema import RunConfig
from hpctrain.launch.local.zygote import RankFailure
from hpctrain.verify.cases import base, cases
from hpctrain.verify.judge import Judge, Verdict
from hpctrain.verify.rank import run
from hpctrain.verify.reference import reference
from hpctrain.verify.samples import global_batch
from hpctrain.verify.trace import Share, Trace
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
    layouts += "dp=2,sharding.stage=3;tp=2,pp=2,sharding.stage=1;cp=2,dp=2,cp_method=ulysses,data.seq=14;"
    layouts += "dp=2,tp=2,sharding.engine=fsdp"
    status, out, err = verify(capsys, "--layouts", layouts, "--json")
    found = json.loads(out)
    assert status == 0, (found, err)
    assert [(v["layout"], v["ok"]) for v in found] == [(layout, True) for layout in layouts.split(";")]
    assert [v["precision"] for v in found] == ["float64"] * 3 + ["float32"] * 2 + ["float64"] * 2
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
    """An embedding whose parts are not summed: the ranks inherit the breakage. Trap D9: samples of dp count alike."""
    from hpctrain.parallel import tensor

    monkeypatch.setattr(tensor, "reduce_from", lambda x, axis: x)
    status, out, err = verify(capsys, "--layouts", "tp=2;dp=2,data.seq=9;tp=3")
    assert status == 1
    assert "error: 2 of 3 layouts did not pass: tp=2; tp=3." in err
    lines = out.splitlines()
    assert lines[1].startswith("tp=2 ") and lines[1].endswith("DIFFERS")
    assert lines[2].split()[:4] == ["dp=2,data.seq=9", "2", "none", "float64"] and lines[2].endswith("ok")
    assert "did not run" in lines[3] and "tp=3: parallel.tp=3: must divide model.heads=4" in out
    assert "float64: only the order of sums may differ, so 1e-09" in out
    assert out.count("held against has") == 1
    assert "dp=2,data.seq=9: the process it is held against has data.seq=9 too" in out


def test_rounding_hides_nothing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Good layouts pass. Row-parallel sums that are not made, and a stage of which nothing is updated, do not."""
    from hpctrain.parallel import tensor
    from hpctrain.sharding.none.engine import PlainEngine

    layouts = "tp=2;pp=2,schedule=1f1b"
    status, out, err = verify(capsys, "--layouts", layouts, "--json", "--dtype", "bf16")
    found = json.loads(out)
    assert status == 0 and [v["precision"] for v in found] == ["bf16"] * 2, (found, err)
    assert all(v[kind]["limit"] <= 0.45 for v in found for kind in ("loss", "norm", "gradient", "weight"))

    monkeypatch.setattr(tensor, "reduce_from", lambda x, axis: x)
    update = PlainEngine.update
    monkeypatch.setattr(PlainEngine, "update", lambda self, g, lr: update(self, g, lr * (self.mesh.pp.index == 0)))
    status, out, err = verify(capsys, "--layouts", layouts, "--json", "--dtype", "bf16")
    assert status == 1 and "2 of 2 layouts did not pass" in err
    tp, pp = json.loads(out)
    assert tp["gradient"]["difference"] > tp["gradient"]["limit"]
    assert pp["weight"]["difference"] == pytest.approx(1.0, abs=0.2) and pp["weight"]["limit"] <= 0.45
    assert pp["gradient"]["difference"] <= pp["gradient"]["limit"]


class Here:
    """One process, this one, in the place of those that are forked; its runs change `train.loss_scale` where asked."""

    def __init__(self, loss_scale: float | None = None) -> None:
        self.loss_scale = loss_scale

    def reference(self, config: RunConfig, steps: int) -> Trace:
        return reference(config, steps)

    def __call__(self, config: RunConfig, world: int, steps: int) -> list[Share]:
        settings = config.model_dump(mode="json")
        settings["train"]["loss_scale"] = self.loss_scale or config.train.loss_scale
        return [run(settings, steps)]


def judged(local: Here, layout: Here, *overrides: str) -> Verdict:
    (case,) = cases("dp=1", "llama-tiny", [*SMALL, *overrides], 2, "fp16")
    return Judge(local, 2).verdict(case, layout)  # type: ignore[arg-type]


def test_a_precision_that_overflows_cannot_be_judged() -> None:
    """Where the one process that measures it skips steps, a layout that skips them too would be as good."""
    verdict = judged(Here(), Here(), "train.loss_scale=1e20")
    assert not verdict.good and not verdict.found
    assert verdict.word == "cannot be judged" == verdict.plain()["verdict"]
    assert verdict.error.startswith("fp16 cannot be judged: one process in it skipped step 1, 2, in which something")
    assert verdict.error.endswith("lower train.loss_scale=1e+20.")


class Refusing(Here):
    """Ranks that end with an error."""

    def __init__(self, said: str) -> None:
        super().__init__()
        self.said = said

    def __call__(self, config: RunConfig, world: int, steps: int) -> list[Share]:
        raise RankFailure(f"rank 0 failed:\nTraceback (most recent call last):\n  File x\n{self.said}\n")


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        (
            "hpctrain.errors.ConfigError: memory='9 GiB': more than the 1 GiB that a rank has; use more ranks.",
            "memory='9 GiB': more than the 1 GiB that a rank has; use more ranks; "
            "or verify a smaller model, for example with model.layers=2.",
        ),
        ("hpctrain.checkpoint.lock.RunFolderInUse: it is in use.", "it is in use."),
        ("ZeroDivisionError: division by zero", "ZeroDivisionError: division by zero"),
    ],
)
def test_what_a_rank_refuses_is_a_sentence(said: str, sentence: str) -> None:
    verdict = judged(Here(), Refusing(said))
    assert (verdict.word, verdict.error) == ("did not run", sentence)


def test_a_layout_that_skips_a_step_does_not_pass() -> None:
    assert judged(Here(), Here(1024.0)).good
    verdict = judged(Here(), Here(1e20))
    assert verdict.error == "skipped step 1, 2, in which something was not finite" and not verdict.good
    plain = json.loads(json.dumps(verdict.plain(), allow_nan=False))
    assert (plain["ok"], plain["norm"]["difference"], plain["gradient"]["difference"]) == (False, None, 1.0)


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
