"""Commands whose process a launcher has started as a rank."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from hpctrain.cli import main
from hpctrain.comms import store
from hpctrain.launch.life.identity import Identity
from hpctrain.launch.life.process import reporting
from hpctrain.launch.local.zygote import RankFailure
from tests.comms.command import ABSENT, invoke, names_the_absent


def reported(folder: Path, port: int, *arguments: str) -> None:
    """What a rank that leaves says, in a file of its own."""
    name = folder / f"said-{os.getpid()}"
    with reporting(lambda error: name.write_text(f"{type(error).__name__}: {error}") and None):
        as_ranks(folder, port, *arguments)


def test_a_rank_that_never_arrives_is_named_over_gloo(ranks, tmp_path: Path, free_port: int) -> None:
    with pytest.raises(RankFailure):
        ranks(2, reported, tmp_path, free_port, "collectives", "--backend", "gloo", *ABSENT)
    said = [path.read_text() for path in tmp_path.glob("said-*")]
    assert said and all(names_the_absent(text) for text in said)


def asks_for_gpus(folder: Path) -> None:
    from hpctrain.comms.torchbackend import torch_party

    with torch_party(Identity(0, 2, 0, 2, "env", "k"), folder, "nccl", 1.0, 1):
        pass


def test_nccl_needs_a_gpu_a_rank(ranks, tmp_path: Path) -> None:
    with pytest.raises(
        RankFailure, match=r"--backend='nccl': needs a GPU a rank, and \w+ has 0 for 2 ranks; use --bac"
    ):
        ranks(1, asks_for_gpus, tmp_path)


def as_ranks(folder: Path, port: int, *arguments: str) -> tuple[int, str, str]:
    """A command whose process a launcher has started as a rank, as torchrun does."""
    import torch.distributed as dist

    rank, world = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    place = dict(RANK=rank, WORLD_SIZE=world, LOCAL_RANK=rank, LOCAL_WORLD_SIZE=world)
    os.environ.update({key: str(value) for key, value in place.items()}, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    done = CliRunner().invoke(main, ["bench", *arguments, "--folder", str(folder)])
    return done.exit_code, done.stdout, done.stderr


def test_a_night_of_ranks_that_a_launcher_started(ranks, tmp_path: Path, free_port: int) -> None:
    """All measurements of a command are of the same ranks, and only the first rank has something to say."""
    how = ["--store", str(tmp_path / "n.h5"), "--op", "all_reduce", "--sizes", "64,1K,64K", "-n", "3", "--json"]
    found = ranks(3, as_ranks, tmp_path, free_port, "sweep", *how)
    assert [code for code, _, _ in found[1:]] == [0, 0] and [out for _, out, _ in found[1:]] == ["", ""]
    (run_,) = json.loads(found[0][1])["runs"]
    assert len(run_["slow"]) == 1 and found[0][0] in (0, 1), found[0]
    assert [row.size for row in store.read(tmp_path / "n.h5").rows] == [64, 1024, 65536]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("collectives --submit --nodes 2", "--submit=true: this process is rank 0 of 2 that env has started;"),
        (
            "pairs --ranks 3",
            "--ranks=3: this process is rank 0 of 2 that env has started, 2 on this node; leave it out",
        ),
        (
            "collectives --sweep-env A=1,2",
            "--sweep-env='A=1': 2 measurements need new ranks each, and a launcher has started these; have it start",
        ),
        (
            "collectives --backend nccl --library-algorithms",
            "--library-algorithms='NCCL_ALGO=Ring NCCL_PROTO=LL': 18 m",
        ),
    ],
)
def test_what_a_rank_of_a_launcher_cannot_do(arguments: str, sentence: str, monkeypatch, tmp_path: Path) -> None:
    place = dict(RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", LOCAL_WORLD_SIZE="2", MASTER_ADDR="x", MASTER_PORT="1")
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    assert invoke(*arguments.split(), "--folder", str(tmp_path)).startswith(f"error: {sentence}")
