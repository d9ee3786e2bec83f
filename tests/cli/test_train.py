"""`hpctrain train` and `generate` as a user meets them: one sentence for each mistake, and a run from end to end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import h5py
import pytest
from click.testing import CliRunner

from hpctrain.cli import main
from hpctrain.config.load import load
from hpctrain.data.build import build
from hpctrain.data.sources import list_sources
from hpctrain.layout.activations import ON_CPU
from hpctrain.layout.budget import Way, ways
from hpctrain.layout.layout import Layout
from hpctrain.layout.memory import held_by
from hpctrain.layout.phases import most_activations
from hpctrain.layout.units import GIB

TINY = [
    *("model.layers=1", "model.hidden=16", "model.heads=2", "model.max_seq=32", "data.seq=32"),
    *("train.steps=4", "train.global_batch=4", "train.micro_batch=2", "train.log_every=1", "train.eval_batches=1"),
    "optimizer.warmup_steps=1",
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    for i in range(8):
        (folder / f"{i}.txt").write_bytes(b"to be or not to be, that is the question " * (i + 3))
    build(folder / "corpus.h5", list_sources([folder]), [folder])
    return folder / "corpus.h5"


def command(*arguments: str) -> subprocess.CompletedProcess:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("RANK", "WORLD_SIZE"))}
    return subprocess.run(
        [sys.executable, "-m", "hpctrain", *arguments], env=env, text=True, capture_output=True, timeout=240
    )


def refused(capsys, *arguments: str) -> str:
    """The one sentence that a mistake gives, from a command that starts no rank."""
    with pytest.raises(SystemExit) as end:
        main(list(arguments))
    out = capsys.readouterr()
    assert end.value.code not in (0, None) and out.out == ""
    said = [line for line in out.err.splitlines(True) if not line.startswith("note: ")]
    assert len(said) == 1 and said[0].startswith("error: ")
    return said[0]


@pytest.mark.parametrize(
    "override,sentence",
    [
        ("paralel.tp=2", "parallel.tp"),
        ("parallel.tp=two", "parallel.tp='two'"),
        ("parallel.tp=4", "must divide the 2 ranks"),
        ("model.heads=3", "model.heads=3"),
        ("sharding.stage=4", "sharding.stage=4"),
        ("train.global_batch=5", "train.global_batch=5"),
        ("parallel.pp=2", "parallel.pp=2"),
        ("cluster.nodes=2", "cluster.nodes=2"),
        ("data.corpus=/nowhere/corpus.h5", "/nowhere/corpus.h5"),
        ("model.vocab=300", "vocabulary of 257"),
        ("data.seq=4096 model.max_seq=4096", "data.seq=4096"),
    ],
)
def test_a_wrong_setting_is_one_sentence(corpus, capsys, tmp_path, override, sentence):
    arguments = [f"data.corpus={corpus}", f"folder={tmp_path}", *TINY, *override.split()]
    assert sentence in refused(capsys, "train", "gpt-tiny", *arguments)
    assert list(tmp_path.iterdir()) == []


def test_files_that_are_no_corpus_are_one_sentence(capsys, tmp_path, corpus):
    foreign, text, cut = tmp_path / "foreign.h5", tmp_path / "text.h5", tmp_path / "cut.h5"
    with h5py.File(foreign, "w") as file:
        file["x"] = [1, 2, 3]
    text.write_text("not HDF5 at all")
    cut.write_bytes(corpus.read_bytes()[:-100])
    for path in (foreign, text, cut, tmp_path):
        assert str(path) in refused(capsys, "train", "gpt-tiny", f"data.corpus={path}", f"folder={tmp_path / 'runs'}")


def test_a_run_folder_that_cannot_be_made(corpus, capsys, tmp_path):
    (tmp_path / "file").touch()
    for folder, said in ((tmp_path / "file", "is a file"), (tmp_path / ("x" * 300), "shorter name")):
        assert said in refused(capsys, "train", "gpt-tiny", f"data.corpus={corpus}", f"folder={folder}", *TINY)


def test_a_folder_that_no_one_can_make(corpus, capsys):
    said = refused(capsys, "train", "gpt-tiny", f"data.corpus={corpus}", "folder=/proc/x", *TINY)
    assert said.startswith("error: folder='/proc/x': the run folder cannot be made there (No such file or directory)")


def test_a_key_given_twice_is_told(capsys):
    with pytest.raises(SystemExit):
        main(["config", "show", "gpt-tiny", "parallel.tp=2", "train.steps=3", "parallel.tp=1"])
    out = capsys.readouterr()
    assert out.err == "note: parallel.tp is given 2 times; the last, parallel.tp=1, counts\n" and "tp: 1" in out.out


def test_a_list_with_a_bad_element_under_show(capsys):
    assert "stage_layers=[1, 'a']: must be a list" in refused(
        capsys, "config", "show", "gpt-tiny", "parallel.stage_layers=[1,a]"
    )


def test_ctrl_c_says_where_it_stopped_and_how_to_go_on(corpus, tmp_path):
    arguments = [f"data.corpus={corpus}", f"folder={tmp_path}", *TINY, "train.steps=100000"]
    command = [
        sys.executable,
        "-m",
        "hpctrain",
        "train",
        "gpt-tiny",
        *arguments,
        "parallel.tp=1",
        "cluster.gpus_per_node=1",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if line.startswith("step 2/"):
                process.send_signal(signal.SIGINT)
                break
        out, err = process.communicate(timeout=120)
    assert process.returncode == 130 and "error" not in err, err
    saved = max(int(p.name[5:]) for p in (tmp_path / "gpt-tiny" / "checkpoints").glob("step-*"))
    assert f"stopped and saved after step {saved}; the same command goes on from there" in out


def test_a_recipe_that_is_not_there(capsys):
    assert "gpt-tiny" in refused(capsys, "train", "gpt-tyni")


def test_generate_needs_a_run_folder(capsys, tmp_path):
    assert "not a run folder" in refused(capsys, "generate", str(tmp_path))


def test_a_run_that_cannot_fit_is_refused_by_its_estimate(corpus, tmp_path):
    size = [
        "model.layers=100",
        "model.hidden=65536",
        "model.heads=64",
        "model.head_dim=1024",
        "model.max_seq=32",
        "data.seq=32",
    ]
    out = command("train", "gpt-tiny", *size, f"data.corpus={corpus}", f"folder={tmp_path}", "checkpoint.resume=never")
    assert out.returncode == 2, out.stderr
    assert "GiB" in out.stderr and "error: " in out.stderr and "Traceback" not in out.stderr


def test_train_resume_generate(corpus, tmp_path):
    """Two ranks, then the same run again, longer, under another layout, and text from it under both."""
    arguments = [f"data.corpus={corpus}", f"folder={tmp_path}", *TINY]
    first = command("train", "gpt-tiny", *arguments, "parallel.sp=true", "train.recompute=full")
    assert first.returncode == 0, first.stderr
    assert (
        "step 4/4" in first.stdout and "validation loss" in first.stdout and str(tmp_path / "gpt-tiny") in first.stdout
    )
    assert "\x1b" not in first.stdout
    longer = ["parallel.tp=1", "cluster.gpus_per_node=1", "train.steps=6"]
    second = command("train", "gpt-tiny", *arguments, *longer)
    assert second.returncode == 0, second.stderr
    assert "resume" in second.stdout and "step 6/6" in second.stdout
    folder = tmp_path / "gpt-tiny"
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records if r["kind"] == "train"] == [1, 2, 3, 4, 5, 6]
    assert {p.name for p in Path(folder).iterdir()} >= {"config.yaml", "environment.json", "checkpoints", "loss.png"}
    texts = [
        command("generate", str(folder), "--prompt", "to be", "--tokens", "20", "--temperature", "0", *how)
        for how in (["parallel.tp=1"], ["parallel.tp=2", "parallel.sp=true"])
    ]
    assert [t.returncode for t in texts] == [0, 0], texts[1].stderr
    assert texts[0].stdout == texts[1].stdout and texts[0].stdout.startswith("to be")


def test_a_budget_is_settled_before_the_run(corpus, tmp_path):
    """It is said in a line, the run's configuration has what was chosen, and goes on as any other."""
    size = ["parallel.tp=1", "cluster.gpus_per_node=1", "cluster.device=cpu", "train.activation_budget=1"]
    arguments = [f"data.corpus={corpus}", f"folder={tmp_path}", *TINY, "model.layers=3", *size]
    config, layout = load("gpt-tiny", arguments), Layout()
    peaks = [
        most_activations(way.of(config), layout, held_by(config, layout)[0], ON_CPU)
        for way in ways(config, layout)
        if way.train.recompute != "full"
    ]
    budget = f"train.activation_budget={(min(peaks) + max(peaks)) / 2 / GIB!r}"
    done = command("train", "gpt-tiny", *arguments, budget)
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stdout.splitlines() if " chose " in line)
    settled = load(tmp_path / "gpt-tiny" / "config.yaml")
    assert settled.train.activation_budget is None and settled.train.recompute == "selective"
    assert Way(settled.train, 0).settings() in line
    again = command("train", str(tmp_path / "gpt-tiny" / "config.yaml"), "train.steps=5")
    assert again.returncode == 0 and "step 5/5" in again.stdout and " chose " not in again.stdout
    refused = command("train", "gpt-tiny", *arguments, "name=other", "train.activation_budget=1e-6")
    assert refused.returncode == 2 and "error: train.activation_budget=1e-06: activations and " in refused.stderr


@pytest.mark.parametrize("setting", ["cluster.health=true", "cluster.spares=1"])
def test_what_only_a_job_can_do_is_refused_here(setting: str) -> None:
    result = CliRunner().invoke(main, ["train", "gpt-tiny", setting])
    assert result.exit_code == 2
    assert result.stderr == f"error: {setting}: this is for jobs of Slurm; leave it out, or use hpctrain submit.\n"
