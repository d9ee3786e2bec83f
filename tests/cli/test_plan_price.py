"""`hpctrain plan RECIPE`, `plan explain`, `plan sweep`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hpctrain.cli import main
from hpctrain.config.load import load
from hpctrain.config.validate import validate
from hpctrain.plan import hardware as plan_hardware


def invoke(line: str) -> Result:
    return CliRunner().invoke(main, ["plan", *line.split()], env={"COLUMNS": "100"})


def run(line: str) -> str:
    result = invoke(line)
    assert result.exit_code == 0, result.stderr
    return result.stdout


def test_adapters_fit_where_all_weights_do_not(tmp_path: Path) -> None:
    """70 billion weights in 4 bits on one host, by layouts that run adapters; all of them need more."""
    recipe = tmp_path / "best.yaml"
    line = "llama-70b --gpus 8 --top 1 --json train.global_batch=8"
    best = json.loads(run(f"{line} model.adapter.kind=qlora --write {recipe}"))[0]
    assert 35e9 < best["memory_bytes"] * best["axes"]["tp"] * best["axes"]["pp"] < 8 * 80e9  # half a byte a weight
    validate(load(recipe), 8)
    assert invoke(line).exit_code == 2


def test_the_best_layouts_with_reasons(tmp_path: Path) -> None:
    recipe = tmp_path / "new" / "best.yaml"
    out = run(f"llama-8b --cluster dgx-h100 --gpus 32 --top 3 --write {recipe}")
    assert "32 x NVIDIA H100 80GB HBM3 (dgx-h100)" in out and "against the best" in out and "goodput" in out
    written = load(recipe)
    validate(written, 32)
    best = json.loads(run("llama-8b --gpus 32 --top 1 --json"))[0]
    assert written.parallel.tp == best["axes"]["tp"] and written.cluster.nodes == 4
    assert f"{best['seconds']:.3f}" in out and sum(best["parts"].values()) == pytest.approx(best["seconds"])


def test_a_written_recipe_is_explained_as_it_was_planned(tmp_path: Path) -> None:
    recipe = tmp_path / "best.yaml"
    planned = json.loads(run(f"llama-8b --gpus 16 --top 1 --json --write {recipe}"))[0]
    explained = json.loads(run(f"explain {recipe} --gpus 16 --json"))
    assert explained["layout"] == planned["layout"] and explained["seconds"] == pytest.approx(planned["seconds"])


def test_fsdp_is_explained_as_zero_3() -> None:
    line = "explain llama-8b --gpus 16 parallel.tp=1 parallel.pp=1 train.micro_batch=1 sharding.stage=3"
    zero, fsdp = (json.loads(run(f"{line} {more} --json")) for more in ("", "sharding.engine=fsdp"))
    assert 0.95 * zero["seconds"] < fsdp["seconds"] < zero["seconds"]  # a layer is gathered at once, not in four parts
    assert "zero=3" in fsdp["layout"]
    refused = invoke(f"{line} sharding.engine=fsdp sharding.replicas=2")
    assert refused.exit_code == 2 and "sharding.replicas=2: has no price here" in refused.stderr


@pytest.mark.parametrize("command", ["", "explain "])
def test_recomputing_some_layers_is_refused(command: str) -> None:
    refused = invoke(f"{command}llama-8b --gpus 16 train.recompute=full train.recompute_every=2")
    assert refused.exit_code == 2 and "train.recompute_every=2: has no price here" in refused.stderr


@pytest.mark.parametrize("command", ["", "explain "])
@pytest.mark.parametrize(
    "setting", ["train.recompute=selective train.recompute_ops=[mlp]", "train.activation_budget=20.0"]
)
def test_recomputing_operations_is_refused(command: str, setting: str) -> None:
    refused = invoke(f"{command}llama-8b --gpus 16 {setting}")
    assert refused.exit_code == 2 and "has no price here" in refused.stderr and refused.stderr.count("\n") <= 2


def test_explain_says_what_bounds_and_how_collectives_go() -> None:
    out = run("explain gpt-175b --cluster dgx-a100 train.recompute=full")
    assert "gpt-175b on 1536 x NVIDIA A100-SXM4-80GB: tp=8 pp=8 dp=24 1f1b mb=1 recompute=full zero=1" in out
    assert (
        "most of it in matmul" in out and "pp bubble" in out and "reduce_scatter of 48.0 MiB by in-domain ring" in out
    )


def test_explain_says_when_it_does_not_fit() -> None:
    assert "does not fit: a device has" in run("explain llama-70b --gpus 128 parallel.tp=1 train.global_batch=128")


def test_fp8_is_faster() -> None:
    slow, fast = (json.loads(run(f"explain llama-8b --gpus 8 {flag} --json"))["seconds"] for flag in ("", "--fp8"))
    assert 0.5 < fast / slow < 0.95


def test_a_sweep_over_devices_as_table_and_picture(tmp_path: Path) -> None:
    png = tmp_path / "curve.png"
    rows = json.loads(run(f"sweep llama-8b --over gpus=8,16 --png {png} --json"))
    assert [row["gpus"] for row in rows] == ["8", "16"] and rows[1]["tokens/s"] > 1.8 * rows[0]["tokens/s"]
    assert png.read_bytes().startswith(b"\x89PNG")


def test_what_a_search_chooses_itself_is_said() -> None:
    given = "parallel.tp=4 sharding.engine=fsdp parallel.cp_method=ulysses data.seq=4096"
    said = invoke(f"llama-8b --gpus 8 --top 1 {given}").stderr
    assert "searched for, and not held: parallel.tp, sharding.engine (plan explain prices what is said)" in said
    assert "not held" not in invoke("llama-8b --gpus 8 --top 1 data.seq=4096").stderr


def test_a_sweep_holds_its_setting() -> None:
    out = run("sweep llama-8b --gpus 16 --over parallel.tp=1,2,3")
    lines = out.splitlines()
    assert "tp=2" in lines[2] and "tp=" not in lines[1].replace("parallel.tp", "") and "none: " in lines[3]


@pytest.mark.parametrize(
    ("over", "layouts"),
    [
        ("sharding.offload.optimizer=none,cpu", (("", "offload="), ("offload=cpu", "nvme"))),
        ("sharding.reshard_after_forward=true,false", (("", "kept"), ("zero=3 kept", "none: "))),
        ("sharding.stage=1,2", (("zero=1", "zero=2"), ("zero=2", "zero=1"))),
        ("parallel.schedule=1f1b,gpipe", (("", "zb-"), ("none: no layout has these", "1f1b"))),
    ],
)
def test_a_sweep_holds_each_value_of_what_is_searched(over: str, layouts: tuple[tuple[str, str], ...]) -> None:
    rows = json.loads(run(f"sweep llama-8b --gpus 16 --json --over {over}"))
    for row, (has, lacks) in zip(rows, layouts, strict=True):
        assert has in row["layout"] and lacks not in row["layout"]


@pytest.mark.parametrize("over", ["model.moe.experts=4,8", "data.seq=2048,4096", "train.precision=bf16,float32"])
def test_a_sweep_follows_what_the_search_starts_from(over: str) -> None:
    rows = json.loads(run(f"sweep llama-8b --gpus 16 --json --over {over}"))
    assert len({row["step s"] for row in rows}) == 2


def test_a_sweep_over_hosts_needs_no_devices() -> None:
    rows = json.loads(run("sweep llama-8b --json cluster.gpus_per_node=8 --over cluster.nodes=1,2"))
    assert rows[1]["tokens/s"] > 1.8 * rows[0]["tokens/s"]
    said = invoke("sweep llama-8b --gpus 16 --over cluster.nodes=1,2")
    assert said.exit_code == 2 and "over='cluster.nodes': devices are those of --gpus" in said.stderr


@pytest.mark.parametrize("key", ["engine", "replicas", "bucket_mib", "offload", "offload.params", "offload.path"])
def test_a_sweep_over_what_has_no_price_is_refused(key: str) -> None:
    said = invoke(f"sweep llama-8b --gpus 16 --over sharding.{key}=none,cpu")
    assert said.exit_code == 2 and f"over='sharding.{key}': has no price in a search" in said.stderr


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("llama-70b --cluster h1000", "cluster='h1000'"),
        ("llama-7b", "the nearest recipe is"),
        ("llama-8b --gpus 12", "must be whole hosts of 8 devices; use 8 or 16"),
        ("llama-8b --cluster v100 --gpus 8", "multiplies in fp16"),
        ("llama-405b --gpus 16", "devices are enough"),
        ("llama-8b --gpus 1024 train.global_batch=7", "must be a multiple of dp"),
        ("sweep llama-8b --over gpus", "must be written key=value,value"),
        ("sweep llama-8b --over parallel.sp=true,false", "over='parallel.sp': has no price in a search"),
        ("sweep llama-8b --over parallel.etp=1,2", "must be one of gpus, model.*, data.seq"),
        ("sweep llama-8b --over optimizer.lr=1,2", "has no price in a search"),
        ("sweep llama-8b --over parallel.tq=1,2", "the nearest is parallel.tp"),
        ("sweep llama-8b --over gpus=8 --png nowhere/x.png", "its folder must be there"),
        ("explain llama-8b --profile nowhere.json", "there is no such file; make one with hpctrain bench"),
    ],
)
def test_bad_input_names_the_reason_and_what_works(line: str, words: str) -> None:
    result = invoke(line)
    assert result.exit_code != 0 and words in result.stderr and "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read: Is a directory"),
        ("a: [1", "must be YAML, but line 1"),
        ("- 1", "the file: input should be an object"),
        ("cluster: dgx-h100\nmatmul: {bf16: 0}", "matmul.bf16 is 0: must be a number of FLOP/s, 1 to"),
        (
            "cluster: dgx-h100\nmemory_bandwidth: 1e-300",
            "memory_bandwidth is 1e-300: must be a number of bytes/s, 1 to",
        ),
        (
            "cluster: dgx-h100\ncollectives:\n"
            "  - {operation: send, backend: nccl, devices: 0, hosts: 1, lines: [{latency: 0, rate: 1e9}]}",
            "collectives.0.devices: input should be greater than or equal to 1",
        ),
        (
            "cluster: dgx-h100\ncollectives:\n  - {operation: send, backend: nccl, devices: 2, hosts: 1, lines: []}",
            "collectives.0.lines",
        ),
        (
            "cluster: dgx-h100\ncollectives:\n"
            "  - {operation: send, backend: nccl, devices: 2, hosts: 1, lines: [{latency: 0, rate: 1e-300}]}",
            "collectives.0.lines.0.rate is 1e-300: must be a number of bytes/s, 1 to",
        ),
    ],
    ids=["folder", "broken", "list", "rate-0", "bandwidth-tiny", "devices-0", "no-lines", "rate-tiny"],
)
def test_a_profile_that_is_none_says_why(tmp_path: Path, content: str | None, words: str) -> None:
    path = tmp_path / "profile.yaml"
    path.mkdir() if content is None else path.write_text(content)
    for command in ("explain llama-8b --profile", "explain llama-8b --cluster"):
        said = invoke(f"{command} {path}").stderr
        assert "Traceback" not in said and (words in said or "--cluster" in command), said
        assert "profile" in said if "--profile" in command else "cluster" in said


def test_a_cluster_of_unknown_links_says_the_nearest(tmp_path: Path) -> None:
    whole = (Path(plan_hardware.__file__).parent / "hardware" / "dgx-h100.yaml").read_text()
    path = tmp_path / "mine.yaml"
    for wrong, right in (("link: nvlink44", "link: nvlink4"), ("network: infiband", "network: infiniband-ndr")):
        path.write_text(whole.replace(right, wrong))
        result = invoke(f"explain llama-8b --cluster {path}")
        assert result.exit_code == 2 and "the nearest is" in result.stderr


def test_a_run_that_fails_all_the_time_never_gets_there(tmp_path: Path) -> None:
    whole = (Path(plan_hardware.__file__).parent / "hardware" / "dgx-h100.yaml").read_text()
    path = tmp_path / "mine.yaml"
    path.write_text(whole.replace("device_mtbf_hours: {value: 50674", "device_mtbf_hours: {value: 5.8"))
    out = run(f"explain llama-8b --cluster {path} --gpus 16384 train.global_batch=65536")
    said = "with failures every 1.3 s it never gets there: failures come faster than it restarts"
    assert said in out and len(out.splitlines()[-1]) < 150


def test_slips_of_the_finger_are_answered_at_once(tmp_path: Path) -> None:
    for line, words in (
        ("llama-8b --gpus 99999999999999992", "gpus=99999999999999992: plans are for 16,777,216 at most"),
        (f"llama-8b --gpus 8 train.global_batch={10**11}", "plans are for 1,073,741,824 at most"),
        ("llama-8b --gpus 8 --write /proc/nothing/x.yaml", "--write='/proc/nothing': cannot be made"),
    ):
        assert words in invoke(line).stderr


def test_a_very_long_step_is_priced_by_its_middle() -> None:
    """The memory model goes through the schedule of as many micro-batches as matter."""
    line = "explain llama-8b --gpus 8 parallel.tp=1 parallel.pp=4 train.micro_batch=1 --json train.global_batch="
    few, many = (json.loads(run(f"{line}{batch}")) for batch in (2**7, 2**27))
    assert many["memory_bytes"] == few["memory_bytes"]
    assert many["tokens_per_second"] == pytest.approx(few["tokens_per_second"], rel=0.2)


def test_a_profile_of_another_cluster_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text('{"cluster": "dgx-a100", "matmul": {"bf16": 3e14}}')
    assert "was measured on dgx-a100; use --cluster dgx-a100" in invoke(f"explain llama-8b --profile {path}").stderr
    path.write_text('{"cluster": "dgx-h100", "matmul": {"bf16": 3e14}}')
    slow = json.loads(run(f"explain llama-8b --profile {path} --json"))["seconds"]
    assert slow > 1.5 * json.loads(run("explain llama-8b --json"))["seconds"]


def test_the_group_still_has_its_commands() -> None:
    out = run("--help")
    assert all(name in out for name in ("schedule", "search", "explain", "sweep")) and "RECIPE|COMMAND" in out
