"""`hpctrain bench` from end to end: real ranks, over gloo and MPI; damage; what is refused."""

from __future__ import annotations

import csv
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from hpctrain.cli import main
from hpctrain.cli.bench import COMMANDS
from hpctrain.comms.beside import Overlap
from hpctrain.comms.environments import NCCL_HAS, sweeps
from hpctrain.comms.formulas import OPERATIONS
from hpctrain.comms.load import load
from hpctrain.comms.profile import read
from hpctrain.comms.rank import placed, rank_main
from hpctrain.config.load import load as load_config
from hpctrain.errors import ConfigError, LaunchError
from hpctrain.launch.life.identity import Identity
from hpctrain.launch.submit.sbatch import sbatch_text
from hpctrain.launch.submit.send import folders
from tests.comms.command import bench, has_mpi, invoke
from tests.comms.made import result, row
from tests.comms.test_output import SCHEMA, conforms

BACKENDS = ["gloo", *(["mpi"] if has_mpi() or os.environ.get("CI") else [])]


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_operation_from_the_command_line(backend: str, tmp_path: Path) -> None:
    """All operations run, are right, and make the JSON of nccl-tests; CSV and store say the same."""
    files = ["--csv", str(tmp_path / "t.csv"), "--store", str(tmp_path / "s.h5"), "--png", str(tmp_path / "p.png")]
    how = ["--ranks", "2", "-n", "2", "-w", "1", "--check", "2", "--folder", str(tmp_path / "b"), "--json", *files]
    done = bench("collectives", "--backend", backend, "--op", "all", "--sizes", "64,4K", *how)
    assert done.returncode == 0, done.stderr
    plain = json.loads(done.stdout)
    conforms(plain, SCHEMA)
    assert {line["experiment_name"] for line in plain["results"]} == set(OPERATIONS)
    assert plain["out_of_bounds"] == {"count": 0, "okay": "true"}
    for line in plain["results"]:
        for measured in filter(None, (line["out_of_place"], line["in_place"])):
            assert measured["time"] > 0 and (measured["nwrong"] == 0.0) == (line["experiment_name"] != "barrier")
    kept = {entry.split("=")[0] for entry in plain["env"]}
    assert not kept & {"PATH", "HOME", "PYTHONPATH"} and "OMP_NUM_THREADS" in kept
    rows = load(str(tmp_path / "s.h5")).rows
    assert len(list(csv.DictReader((tmp_path / "t.csv").open()))) == len(rows) and not any(r.wrong for r in rows)
    assert all(len(r.times) == 2 and len(r.times[0]) == 2 for r in rows)
    assert (tmp_path / "p.png").exists() and {r.backend for r in rows} == {backend}
    assert len(list((tmp_path / "b").glob("*-collectives/result.json"))) == 1


def test_wrong_results_fail_the_command(forked, tmp_path: Path) -> None:
    fault = json.dumps({"kind": "wrong", "rank": 0, "size": 2048, "every": 2})
    how = ["--sizes", "1K,2K", "--ranks", "2", "-n", "1", "--check", "4", "--folder", str(tmp_path)]
    done = forked("collectives", *how, "--inject", fault)
    assert done.exit_code == 1
    assert "wrong results from gloo: all_reduce of 2048 bytes (float32, world, ranks 0-1): 2 of 4 res" in done.stderr
    assert "# Out of bounds values : 2 FAILED" in done.stdout
    assert "#   all_reduce 2048 B in_place: 2 of 4 results wrong" in done.stdout


def test_a_baseline_that_was_faster_fails_the_command(forked, tmp_path: Path) -> None:
    result(row(1024, 1e-9, ranks=2)).write(tmp_path)
    how = ["--sizes", "1K", "--ranks", "2", "--folder", str(tmp_path / "b"), "--baseline", str(tmp_path)]
    done = forked("collectives", *how)
    assert done.exit_code == 1 and "1 of 1 lines are slower than the baseline" in done.stderr
    assert (done.stdout.splitlines()[-1], done.stdout.count("slower")) == ("1 slower", 2)


def test_pairs_and_who_is_slow(forked, tmp_path: Path) -> None:
    where = ["--ranks", "3", "--folder", str(tmp_path), "-n", "2", "--sizes", "16K"]
    done = forked("pairs", *where, "--png", str(tmp_path / "m.png"))
    assert done.exit_code == 0 and "# by rank" in done.stdout and "# 3 pairs in" in done.stdout, done.stderr
    assert (tmp_path / "m.png").exists()
    fault = json.dumps({"kind": "slow", "rank": 1, "every": 1000})
    done = forked("pairs", *where, "--slow", "--inject", fault)
    assert (
        done.exit_code == 1 and done.stderr.startswith("error: slow: rank 1") and "rank 1 is slow: with" in done.stdout
    )


def test_mix_and_overlap(forked, tmp_path: Path) -> None:
    where = ["--folder", str(tmp_path), "-n", "2", "-w", "1"]
    done = forked(
        "mix", "gpt-tiny", "parallel.tp=1", "parallel.cp=2", "--ranks", "2", *where
    )  # cp and dp+cp are the same ranks
    assert done.exit_code == 0 and "reductions of gradients beside the path" in done.stdout, done.stderr
    done = forked("mix", "gpt-tiny", "parallel.tp=2", "--ranks", "4", *where)
    assert done.exit_code == 0, done.stderr
    axes = [line.split()[:3] for line in done.stdout.splitlines() if line[:2] in ("tp", "dp")]
    assert axes == [["tp", "2", "all_reduce"], ["tp", "2", "all_gather"], ["dp+cp", "2", "all_reduce"]]
    assert "reductions of gradients beside the path" in done.stdout
    done = forked("overlap", "--sizes", "64K", "--ranks", "2", *where, "--json")
    (line,) = json.loads(done.stdout)["extra"]["lines"]
    assert 0 <= line["fraction"] <= 1 and line["calls"] == 2 and line["products"] >= 1 and line["wrong"] == 0


def test_wrong_results_beside_products_fail_the_command(monkeypatch, tmp_path: Path) -> None:
    line = dict.fromkeys(("first", "first_beside", "slowdown", "product_slowdown", "fraction"), 1.0)
    line |= {"operation": "all_reduce", "size": 8, "calls": 1, "products": 1, "side": 2, "wrong": 3}
    made = replace(result(), extra={"groups": "world", "ranks": 2, "threads": "", "lines": [line]})
    monkeypatch.setattr("hpctrain.comms.local.run_here", lambda *_: made)
    done = CliRunner().invoke(main, ["bench", "overlap", "--sizes", "8", "--ranks", "2", "--folder", str(tmp_path)])
    assert done.exit_code == 1 and "wrong results: all_reduce of 8 bytes: 3 elements" in done.stderr


def test_wrong_data_of_pairs_fail_the_command(monkeypatch, tmp_path: Path) -> None:
    extra = {"said": ["nobody"], "searches": 1, "named": {}, "lost": [[0, 1, 7]], "bad": False}
    monkeypatch.setattr("hpctrain.comms.local.run_here", lambda *_: replace(result(), extra=extra))
    done = CliRunner().invoke(main, ["bench", "pairs", "--slow", "--ranks", "2", "--folder", str(tmp_path)])
    assert done.exit_code == 1 and "wrong data between ranks 0-1 (7 elements)" in done.stderr


def test_devices_and_disks(tmp_path: Path) -> None:
    def rows(*arguments: str):
        done = CliRunner().invoke(main, ["bench", *arguments, "--json"])
        assert done.exit_code == 0, done.stderr
        return json.loads(done.stdout)

    profile = ["--profile", str(tmp_path / "p.yaml"), "--cluster", "c", "--device", "cpu"]
    products = rows("gemm", "--shapes", "16,8x32x64", "--dtype", "float32,bfloat16", "-n", "2", *profile)
    assert [(r["m"], r["n"], r["k"], r["dtype"]) for r in products[:2]] == [
        (16, 16, 16, "float32"),
        (8, 32, 64, "float32"),
    ]
    assert products[1]["flops"] == pytest.approx(2 * 8 * 32 * 64 / products[1]["seconds"])
    (copy,) = rows("memory", "--sizes", "1M", "-n", "2", *profile)
    assert copy["rate"] == pytest.approx(2 * (1 << 20) / copy["seconds"])
    found = read(tmp_path / "p.yaml")
    assert set(found["matmul"]) == {"float32", "bf16"} and found["memory_bandwidth"] == pytest.approx(
        copy["rate"], rel=1e-3
    )
    disk = rows("nvme", str(tmp_path), "--size", "2M", "--threads", "2", "--rounds", "2")
    assert [(r["what"], r["size"]) for r in disk] == [("write", 2 << 20), ("read", 2 << 20)]
    assert all(r["rate"] == pytest.approx(2 * (2 << 20) / r["seconds"]) for r in disk)
    assert [p.name for p in tmp_path.iterdir()] == ["p.yaml"], "files are removed"


def test_what_two_works_hide() -> None:
    hidden = Overlap(2.0, 1.0, 2.0, 1.5, 2.0)
    assert (hidden.fraction, hidden.slowdowns) == (1.0, (1.0, 1.5))
    assert Overlap(2.0, 1.0, 3.0, 3.0, 3.0).fraction == 0.0
    assert Overlap(2.0, 1.0, 3.0, 2.0, 2.5).fraction == 0.5
    assert Overlap(2.0, 1.0, 4.0, 4.0, 4.0).fraction == 0.0


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example_that_parses(command: str) -> None:
    from tests.test_readme import parse

    text = CliRunner().invoke(main, ["bench", command, "--help"]).stdout
    example = next(line for line in text.splitlines() if line.strip().startswith("Example:"))
    arguments = example.split("hpctrain ", 1)[1].split()
    assert arguments[:2] == ["bench", command]
    parse(arguments)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("collectives --sizes 1X", "--sizes='1X': must be BEGIN:END:FACTOR"),
        ("collectives --op smile", "--op='smile': must be one of all_reduce"),
        ("collectives --submit --nodes x", "--nodes='x': must be a number, or numbers with commas between"),
        ("collectives --env x", "--env='x': must be NAME=VALUE"),
        ("collectives --sweep-env x", "--sweep-env='x': must be NAME=V1,V2"),
        ("collectives --library-algorithms", "--library-algorithms='all_reduce': gloo has no choice of algorithms"),
        ("collectives --nodes 2", "--nodes='2': is of a job of Slurm, and goes with --submit; leave it out."),
        ("collectives --detach", "--detach=true: is of a job of Slurm"),
        ("collectives --profile lab", "--profile='lab': is of a job of Slurm"),
        ("collectives --partition x", "--partition='x': is of a job of Slurm"),
        ("collectives --account x", "--account='x': is of a job of Slurm"),
        ("collectives --time 5", "--time='5': is of a job of Slurm"),
        ("collectives --submit --detach --json", "--json=true: needs a result, and with --detach there is none yet"),
        ("collectives --submit --detach --csv x", "--csv='x': needs a result"),
        ("collectives --submit --detach --baseline x", "--baseline='x': needs a result"),
        ("sweep --store x --submit --detach", "--store='x': needs a result"),
        ("collectives --op barrier --sizes 1K", "--sizes='1K': a barrier has no size"),
        ("collectives --op barrier --check 2", "--check='2': a barrier has no result to check"),
        ("collectives --op broadcast --redop max", "--redop='max': broadcast: nothing is reduced"),
        ("collectives --op all_reduce --root 1", "--root='1': all_reduce: there is no root"),
        ("collectives --matrix setup.cfg", "--matrix='setup.cfg': is for --op all_to_all_v"),
        ("collectives --op all_to_all_v --average min", "--average='min': an uneven all-to-all takes as long as its"),
        ("collectives --layout tp=2", "--layout='tp=2': is for --groups by axis"),
        ("collectives --fabric x", "--fabric='x': is for --groups leaf"),
        ("collectives --alone", "--alone=true: the world is one group"),
        ("collectives --tolerance 0.5", "--tolerance='0.5': is of the comparison, and goes with --baseline"),
        ("pairs --expect 4", "--expect='4.0': goes with --slow"),
        ("pairs --searches 4", "--searches='4': goes with --slow"),
        ("pairs --slow --alone", "--alone=true: --slow measures disjoint pairs at once"),
        ("pairs --slow --png x.png", "--png='x.png': --slow has no matrix to draw"),
        ("pairs --sizes 1K,2K", "--sizes='1K,2K': pairs exchange messages of one size"),
        ("pairs --dtype int8,int32", "--dtype='int8,int32': pairs exchange messages of one dtype"),
        ("overlap --groups node;world", "--groups='node;world': one kind of groups is measured beside products"),
        ("overlap --dtype int8,int32", "--dtype='int8,int32': one dtype is measured beside products"),
        ("overlap --layout tp=2", "--layout='tp=2': is for --groups by axis"),
        ("sweep --store x --cluster c", "--cluster='c': is of a profile, and goes with --profile-out"),
        ("sweep --store x --op all_gather --layout tp=2", "--layout='tp=2': is for --groups by axis"),
        ("fit published:h200 --cluster c", "--cluster='c': is of a profile, and goes with --profile"),
        ("gemm --cluster c", "--cluster='c': is of a profile, and goes with --profile"),
        ("memory --cluster c", "--cluster='c': is of a profile, and goes with --profile"),
        ("gemm --shapes 3x4", "--shapes='3x4': must be sizes N or MxNxK"),
        ("gemm --dtype int8", "--dtype='int8': must be one of bfloat16"),
        ("nvme . --size 1024G", "--size='1024G': . has"),
        ("memory --sizes 1000G", "--sizes='1073741824000 x uint8': cpu has no memory for such a buffer"),
    ],
)
def test_what_is_refused(arguments: str, sentence: str, tmp_path: Path) -> None:
    ranks = arguments.split()[0] in ("collectives", "pairs", "overlap", "sweep")
    where = ["--folder", str(tmp_path / "b")] if ranks else []
    assert invoke(*arguments.split(), *where).startswith(f"error: {sentence}")
    assert not (tmp_path / "b").exists(), "nothing was measured"


def test_options_that_are_used_are_not_refused(monkeypatch, tmp_path: Path) -> None:
    """Beside others of which nothing comes."""
    found = []
    monkeypatch.setattr("hpctrain.comms.local.run_here", lambda spec, *_: found.append(spec) or result(row(1024)))
    where = ["--ranks", "2", "--folder", str(tmp_path)]
    for arguments in (
        "--op all --root 1 --redop max --average min --sizes 1K",
        "--op all_reduce --groups tp;world --layout tp=2 --alone",
        "--op barrier --average max",
    ):
        done = CliRunner().invoke(main, ["bench", "collectives", *arguments.split(), *where])
        assert done.exit_code == 0, done.output
    assert [(s.root, s.reductions, s.layout, s.alone) for s in found] == [
        (1, ("max",), "", False),
        (0, ("sum",), "tp=2", True),
        (0, ("sum",), "", False),
    ]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("collectives --csv {}/no/t.csv", "--csv='{}/no/t.csv': its folder must be there"),
        ("collectives --store {}", "--store='{}': it is a folder"),
        ("collectives --store {}/text", "{}/text is no HDF5 file: name another one"),
        ("collectives --csv /proc/self/t.csv", "--csv='/proc/self/t.csv': it cannot be written ("),
        ("sweep --store {}/no/s.h5", "--store='{}/no/s.h5': its folder must be there"),
        ("sweep --store {}/text", "{}/text is no HDF5 file"),
        ("sweep --store {}/s.h5 --profile-out {}/p.yaml --cluster b", "{}/p.yaml is of cluster 'a', not of 'b'"),
        ("gemm --profile {}/p.yaml --cluster b", "{}/p.yaml is of cluster 'a', not of 'b'"),
        ("memory --profile {}/text", "{}/text is no profile"),
    ],
)
def test_what_cannot_be_written_is_refused_before_anything_is_measured(
    arguments: str, sentence: str, monkeypatch, tmp_path: Path
) -> None:
    def measured(*_):
        raise AssertionError("measured")

    for name in ("comms.local.run_here", "comms.device.gemm", "comms.device.memory"):
        monkeypatch.setattr(f"hpctrain.{name}", measured)
    (tmp_path / "text").write_text("no")
    (tmp_path / "p.yaml").write_text("cluster: a\n")
    ranks = arguments.split()[0] in ("collectives", "sweep")
    where = ["--folder", str(tmp_path / "b"), "--ranks", "2"] if ranks else []
    said = invoke(*arguments.replace("{}", str(tmp_path)).split(), *where)
    assert said.startswith(f"error: {sentence.replace('{}', str(tmp_path))}"), said
    assert sorted(p.name for p in tmp_path.iterdir() if p.name != "b") == ["p.yaml", "text"]


def test_files_may_lie_in_the_folder_that_the_measurement_makes(forked, tmp_path: Path) -> None:
    where = ["--ranks", "2", "--folder", str(tmp_path / "b"), "--csv", str(tmp_path / "b" / "t.csv")]
    done = forked("collectives", "--sizes", "1K", "-n", "1", *where)
    assert done.exit_code == 0 and (tmp_path / "b" / "t.csv").exists(), done.stderr


def test_what_the_library_refuses_is_said_and_the_others_are_measured(monkeypatch, tmp_path: Path) -> None:
    """A library need not have all that it might have; what somebody names has to be there."""

    def run_here(spec, *_):
        if spec.environ["NCCL_ALGO"] in ("NVLS", "CollnetChain"):
            raise LaunchError("rank 0 failed: no algorithm/protocol available")
        return result(row(1024))

    monkeypatch.setattr("hpctrain.comms.local.run_here", run_here)
    what = ["bench", "collectives", "--backend", "nccl", "--ranks", "2", "--folder", str(tmp_path)]
    done = CliRunner().invoke(main, [*what, "--library-algorithms"])
    assert done.exit_code == 0, done.output
    assert done.stdout.count("## NCCL_ALGO=") == 3 * 4 and "## NCCL_ALGO=NVLSTree NCCL_PROTO=Simple" in done.stdout
    assert done.stderr.count("was refused, or failed: rank 0 failed: no algorithm/protocol available") == 3 * 2
    assert "warning: NCCL_ALGO=NVLS NCCL_PROTO=LL128 was refused" in done.stderr
    done = CliRunner().invoke(main, [*what, "--sweep-env", "NCCL_ALGO=Ring,NVLS,Tree"])
    assert done.exit_code == 1 and done.stdout.count("## NCCL_ALGO=") == 2
    assert "error: 1 of 3 measurements failed; the first: rank 0 failed" in done.stderr
    done = CliRunner().invoke(main, [*what, "--sweep-env", "NCCL_ALGO=NVLS"])
    assert done.exit_code == 1 and not done.stdout


def test_a_folder_that_cannot_be_made_and_a_matrix_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    said = invoke("collectives", "--ranks", "2", "--folder", str(tmp_path / "file" / "x"))
    assert said.startswith(f"error: --folder='{tmp_path}/file/x") and "cannot be made (Not a directory)" in said
    assert "does not exist" in invoke("collectives", "--op", "all_to_all_v", "--matrix", str(tmp_path / "absent"))


def test_there_has_to_be_a_slurm_for_jobs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "there is no Slurm here" in invoke("collectives", "--backend", "gloo", "--submit", "--folder", str(tmp_path))


def test_a_job_is_of_its_profile_and_not_of_the_machine_that_submits(tmp_path: Path, monkeypatch) -> None:
    """Which may have no GPUs, as here; CPUs would be measured, a rank on each node."""
    (tmp_path / "cpus.yaml").write_text("about: whole nodes\ngpus: none\n")
    (tmp_path / "mute.yaml").write_text("about: says nothing\n")
    said = invoke("collectives", "--submit", "--profile", f"{tmp_path}/mute.yaml", "--folder", str(tmp_path))
    assert said.startswith("error: --backend='auto': the profile ") and "mute.yaml does not say that its" in said
    where = ["--submit", "--nodes", "2", "--profile", "dgx-h100", "--folder", str(tmp_path)]
    assert invoke("pairs", *where).startswith("error: --ranks=0: a profile does not say how many GPUs a node has;")
    found = []
    monkeypatch.setattr("hpctrain.comms.jobs.run_jobs", lambda *given: found.append(given[:3]) or [])
    for arguments in (
        ["--ranks", "8"],
        ["--backend", "gloo"],
        ["--profile", "lab"],
        ["--profile", f"{tmp_path}/cpus.yaml", "--ranks", "4"],
    ):
        done = CliRunner().invoke(main, ["bench", "collectives", *where, *arguments])
        assert done.exit_code == 0, done.stderr
    assert [(spec.backend, nodes, ranks) for spec, nodes, ranks in found] == [
        *(("nccl", (2,), 8), ("gloo", (2,), 1), ("gloo", (2,), 1), ("gloo", (2,), 4)),
    ]


@pytest.mark.parametrize(("profile", "backend"), [("lab", "gloo"), ("generic", "nccl")])
def test_the_text_of_a_job(profile: str, backend: str, tmp_path: Path, monkeypatch) -> None:
    """Of the practice cluster, whose GPUs Slurm alone knows: ranks compute on CPUs, and nobody has to say so."""
    sent = []
    monkeypatch.setattr("hpctrain.launch.slurm.client.has_slurm", lambda: True)
    monkeypatch.setattr("hpctrain.comms.jobs.queue", lambda made, warn: sent.extend(made) or [])
    where = ["--submit", "--nodes", "2,4", "--ranks", "4", "--profile", profile, "--folder", str(tmp_path)]
    done = CliRunner().invoke(main, ["bench", "collectives", "--detach", *where])
    assert done.exit_code == 0, done.output
    for request, nodes in zip(sent, (2, 4), strict=True):
        (config,), ((function, (spec, folder)),) = request.configs, request.entries
        text = sbatch_text(config, request.site, request.options, folders(request, "s", False), "python")
        lines = text.splitlines()
        assert {f"#SBATCH --nodes={nodes}", "#SBATCH --ntasks-per-node=4", "#SBATCH --gres=gpu:4"} <= set(lines), text
        assert (function, spec["backend"], folder) == (rank_main, backend, str(config.run_folder))
        assert config.cluster.device == ("cpu" if backend == "gloo" else "cuda")
        assert f"profile {profile}" in lines[1]


def test_a_baseline_that_is_not_there_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    said = invoke("collectives", "--baseline", str(tmp_path / "no.json"), "--folder", str(tmp_path / "b"))
    assert "no.json is not there" in said and not (tmp_path / "b").exists()


def test_variables_of_libraries() -> None:
    found = dict(sweeps("nccl", ["all_reduce"], [], True))
    assert len(found) == 3 * len(NCCL_HAS["all_reduce"])
    assert found["NCCL_ALGO=Tree NCCL_PROTO=LL128"] == {"NCCL_ALGO": "Tree", "NCCL_PROTO": "LL128"}
    product = list(sweeps("gloo", ["barrier"], ["A=1,2", "B=x"], False))
    assert product == [("A=1 B=x", {"A": "1", "B": "x"}), ("A=2 B=x", {"A": "2", "B": "x"})]
    assert list(sweeps("gloo", ["barrier"], [], False)) == [("", {})]
    with pytest.raises(ConfigError, match="mpi has no choice of algorithms"):
        list(sweeps("mpi", ["gather"], [], True))


def test_variables_of_a_rank() -> None:
    identity = Identity(5, 8, 1, 4, "srun", "k")
    given = {"GLOO_SOCKET_IFNAME": "rail{local_rank}", "X": "{rank}-{address:lo}", "Y": "{other}"}
    assert placed(given, identity) == {"GLOO_SOCKET_IFNAME": "rail1", "X": "5-127.0.0.1", "Y": "{other}"}
    with pytest.raises(ConfigError, match="has no such interface"):
        placed({"X": "{address:rail{local_rank}}"}, identity)


def test_a_step_of_a_recipe_is_what_its_traffic_says() -> None:
    from hpctrain.comms.mix import parts
    from hpctrain.layout.layout import Layout
    from hpctrain.layout.traffic import data_bytes, pipeline_sends, tensor_traffic

    config = load_config("gpt-tiny", ("parallel.tp=2", "parallel.pp=2", "train.micro_batch=2"))
    layout = Layout.of(config.parallel, 8)
    found = {(part.axis, part.operation): part for part in parts(config, layout)}
    assert set(found) == {("tp", "all_reduce"), ("tp", "all_gather"), ("dp+cp", "all_reduce"), ("pp", "sendrecv")}
    sums = max((tensor_traffic(config, layout, rank)["all_reduce"] for rank in (0, 4)), key=lambda p: p.bytes)
    assert (found["tp", "all_reduce"].calls, found["tp", "all_reduce"].size) == (sums.calls, sums.bytes // sums.calls)
    gather = max((tensor_traffic(config, layout, r).get("all_gather") for r in (4,)), key=lambda p: p.bytes)
    assert found["tp", "all_gather"].size == 2 * (gather.bytes // gather.calls), "S of an all-gather is its output"
    assert found["dp+cp", "all_reduce"].size == max(data_bytes(config, layout, r)["all_reduce"] for r in (0, 4))
    assert found["pp", "sendrecv"].size * 4 == max(sum(pipeline_sends(config, layout, r).values()) for r in (0, 4)) // 1
