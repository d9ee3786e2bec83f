"""What a run folder shows before a rank is started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpctrain.checkpoint.lock import RunFolderInUse, hold, refuse_held
from hpctrain.checkpoint.manifest import FOLDER, MANIFEST, Manifest, dump_manifest, step_name
from hpctrain.config.load import load
from hpctrain.config.schema import RunConfig
from hpctrain.errors import CheckpointError, ConfigError
from hpctrain.layout.fits import Room
from hpctrain.telemetry.memory import Memory
from hpctrain.train import preflight
from hpctrain.train.preflight import PROCESS, check_folder, check_here, check_node, disk_here, room_here


def made(tmp_path: Path, *overrides: str) -> RunConfig:
    return load("gpt-tiny", [f"folder={tmp_path}", *overrides])


def saved(config: RunConfig, step: int = 3) -> None:
    """A checkpoint with nothing but its manifest."""
    path = config.run_folder / FOLDER / step_name(step)
    path.mkdir(parents=True)
    extra = {"config": config.model_dump(mode="json")}
    (path / MANIFEST).write_bytes(dump_manifest(Manifest(step, 1, "", {}, extra, ())))


def refused(config: RunConfig) -> str:
    with pytest.raises((ConfigError, CheckpointError, RunFolderInUse)) as caught:
        check_folder(config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """8 processes' worth of memory, and 100 bytes of disk."""
    monkeypatch.setattr(preflight, "host_memory", lambda: Memory(8 * PROCESS, "cgroup"))
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda folder: SimpleNamespace(free=100))
    monkeypatch.setenv("TMPDIR", str(tmp_path))


@pytest.mark.usefixtures("machine")
def test_a_rank_has_its_share_of_this_machine_less_what_a_process_takes(tmp_path: Path) -> None:
    cpu, gpu = (made(tmp_path, f"cluster.device={device}") for device in ("cpu", "cuda"))
    assert room_here(cpu, 4) == Room(PROCESS, None, 25)
    assert room_here(gpu, 4) == Room(1 << 62, PROCESS, 25)
    assert room_here(cpu, 16).device == 0


@pytest.mark.usefixtures("machine")
def test_a_disk_is_known_before_anything_goes_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would be offered to a run that does not fit there either."""
    settings = "parallel.tp=1", "cluster.device=cpu", "model.hidden=2048", "model.ffn=8192"
    with pytest.raises(ConfigError, match=r"; use more ranks or a smaller model\.$"):
        check_here(made(tmp_path, *settings), 2)
    monkeypatch.setenv("TMPDIR", "/nowhere")
    assert disk_here(made(tmp_path), 2) is None
    with pytest.raises(ConfigError, match=r"sharding\.offload\.path='/nowhere': is no folder; make it"):
        disk_here(made(tmp_path, "sharding.stage=1", "sharding.offload.optimizer=nvme"), 2)


def test_a_node_with_too_little_memory_is_refused(tmp_path: Path) -> None:
    """Where it gets GPUs, what they have is not known, and what is offloaded is."""
    away = "sharding.stage=1", "sharding.offload.optimizer=cpu", "cluster.gpus_per_node=2"
    for settings, gpus in (((), False), (away, True), (("cluster.device=cpu",), True)):
        config = made(tmp_path, "parallel.tp=1", "cluster.gpus_per_node=2", *settings)
        check_node(config, 1 << 40, gpus)
        with pytest.raises(ConfigError, match=r"^memory="):
            check_node(config, 2 * PROCESS, gpus)
    check_node(made(tmp_path, "cluster.gpus_per_node=2"), 2 * PROCESS, True)


def test_nothing_is_refused_and_nothing_made_in_an_empty_place(tmp_path: Path) -> None:
    check_folder(made(tmp_path))
    check_folder(made(tmp_path, "checkpoint.resume=never"))
    assert list(tmp_path.iterdir()) == []


def test_what_a_folder_refuses(tmp_path: Path) -> None:
    assert "holds no checkpoint to start from" in refused(made(tmp_path, "checkpoint.resume=must"))
    assert "nowhere does not exist" in refused(made(tmp_path, f"checkpoint.continue_from={tmp_path}/nowhere"))
    saved(made(tmp_path))
    check_folder(made(tmp_path))
    check_folder(made(tmp_path, "parallel.tp=1", "optimizer.lr=1", "model.dropout=0.1"))
    assert "already holds checkpoints" in refused(made(tmp_path, "checkpoint.resume=never"))
    said = refused(made(tmp_path, "model.layers=2"))
    assert "is of another model: model.layers was 4 and is 2; set it back, or choose another name=..." in said
    experts = refused(made(tmp_path, "model.moe={}", "model.bias=true"))
    assert "model.moe was null and is set" in experts
    other = made(tmp_path, "name=other", f"checkpoint.continue_from={tmp_path}/gpt-tiny", "model.tied=false")
    assert "model.tied was true and is false" in refused(other)


def test_a_folder_in_use(tmp_path: Path) -> None:
    """By another process; to look does not take, make or free the lock."""
    refuse_held(tmp_path)
    assert list(tmp_path.iterdir()) == []
    program = f"""
import sys
from pathlib import Path
from hpctrain.checkpoint.lock import hold
with hold(Path({str(tmp_path / "gpt-tiny")!r})):
    print("held", flush=True)
    sys.stdin.read()
"""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", program], stdin=pipe, stdout=pipe, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        for _ in range(2):
            assert f"is in use by process {holder.pid} on " in refused(made(tmp_path))
        with pytest.raises(RunFolderInUse), hold(tmp_path / "gpt-tiny"):
            pass
        holder.communicate("")
    check_folder(made(tmp_path))


def told(then: RunConfig, now: RunConfig) -> list[str]:
    from hpctrain.train.progress import differences

    session: Any = SimpleNamespace(config=now, data=SimpleNamespace(sha256="x"))
    found: Any = SimpleNamespace(extra={"config": then.model_dump(mode="json"), "corpus": {"sha256": "x"}})
    return list(differences(session, found))


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("optimizer.lr=1e-4", "optimizer.lr was 0.002 and is 0.0001"),
        ("optimizer.clip=0", "optimizer.clip was 1.0 and is 0.0"),
        ("optimizer.beta2=0.9", "optimizer.beta2 was 0.95 and is 0.9"),
        ("optimizer.warmup_steps=1", "optimizer.warmup_steps was 40 and is 1"),
        ("train.global_batch=32", "train.global_batch was 16 and is 32"),
        ("train.precision=bf16", "train.precision was float32 and is bf16"),
        ("train.label_smoothing=0.1", "train.label_smoothing was 0.0 and is 0.1"),
        ("data.document_mask=false", "data.document_mask was true and is false"),
        ("model.dropout=0.1", "model.dropout was 0.0 and is 0.1"),
        ("data.seq=128", "data.seq was 256 and is 128, so the order of samples is new"),
    ],
)
def test_what_changes_the_numbers_is_told(tmp_path: Path, override: str, said: str) -> None:
    assert told(made(tmp_path), made(tmp_path, override)) == [said]


@pytest.mark.parametrize("override", ["parallel.tp=1", "train.micro_batch=2", "train.log_every=1", "sharding.stage=1"])
def test_what_changes_the_order_of_sums_alone_is_not(tmp_path: Path, override: str) -> None:
    assert told(made(tmp_path), made(tmp_path, override)) == []
