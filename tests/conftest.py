"""The warm parent of all multi-rank tests."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # of a run in the background; its children would not hear it
    signal.signal(signal.SIGINT, signal.default_int_handler)

from hpctrain import lab
from hpctrain.lab import requirements
from hpctrain.launch.local.zygote import Zygote
from tests.user import user_of

settings.register_profile("any machine", deadline=None)  # how long an example takes says nothing here
settings.load_profile("any machine")

MODULES = (
    "torch._dynamo",
    "torch._subclasses.schema_check_mode",
    "torch.distributed",
    "torch.profiler._cupti_monitor",
    "h5py",
    "deepspeed",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "hpctrain.parallel.parallelize",
    "hpctrain.sharding.none.engine",
    "hpctrain.sharding.deepspeed.engine",
    "hpctrain.sharding.fsdp.engine",
    "hpctrain.train.loop",
)
"""What ranks import; libraries import some of it when it is first used."""
PARENT = pytest.StashKey[Zygote]()

NO_LAB = requirements.obstacle(accounting=True)
"""Why no private Slurm can be brought up on this machine; None if one can."""

NO_RAILS = NO_LAB or requirements.obstacle_to_rails()
"""The same for one with rails."""


def pytest_configure(config: pytest.Config) -> None:
    """The warm parent is forked here, before anything in this process computes; not of a process that only hands tests
    to others."""
    if getattr(config.option, "dist", "no") == "no" or hasattr(config, "workerinput"):
        there = [name for name in MODULES if importlib.util.find_spec(name.split(".")[0])]
        config.stash[PARENT] = Zygote(there)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that this machine cannot run are left out, not skipped.

    Those marked `gpu` where nobody asked for them; those marked `slurm` where no lab can be brought up, and `rails`
    where it has no rails. In CI the latter stay, and fail.
    """
    marks = set()
    if "gpu" not in (config.option.markexpr or ""):
        marks.add("gpu")
    if NO_LAB and not os.environ.get("CI"):
        marks.add("slurm")
    if NO_RAILS and not os.environ.get("CI"):
        marks.add("rails")
    left_out = [item for item in items if any(item.get_closest_marker(mark) for mark in marks)]
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=left_out)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if NO_LAB and not os.environ.get("CI"):
        terminalreporter.write_line(f"Tests marked slurm were left out: {NO_LAB}")
    elif NO_RAILS and not os.environ.get("CI"):
        terminalreporter.write_line(f"Tests marked rails were left out: {NO_RAILS}")


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """`programs(name, script)` puts a program on PATH, before those of the system, that runs a line of bash."""
    folder = tmp_path / "programs"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    def put(name: str, script: str) -> None:
        (folder / name).write_text(f"#!/bin/bash\n{script}\n")
        (folder / name).chmod(0o755)

    return put


@pytest.fixture
def free_port() -> int:
    """A TCP port that nobody listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def zygote(pytestconfig: pytest.Config) -> Iterator[Zygote]:
    """Forks worlds of gloo ranks."""
    yield pytestconfig.stash[PARENT]
    pytestconfig.stash[PARENT].close()


@pytest.fixture
def ranks(zygote: Zygote) -> Callable[..., list[Any]]:
    """`ranks(world, function, *args)`: what `function(*args)` returns on each of `world` gloo ranks.

    The function's module travels by value, so it may use anything defined in the test file.
    """

    def run(world: int, function: Callable[..., Any], *args: Any, timeout_s: float = 120.0) -> list[Any]:
        cloudpickle.register_pickle_by_value(sys.modules[function.__module__])
        return zygote.run(function, world, *args, timeout_s=timeout_s)

    return run


@pytest.fixture(scope="session")
def slurm_lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[lab.Cluster]:
    """A private Slurm of 4 nodes with 4 GPUs each, shared by all tests marked `slurm`."""
    with lab.cluster(lab.LabSpec(tmp_path_factory.mktemp("lab"), grace_s=2)) as cluster:
        yield cluster


@pytest.fixture
def on_the_lab(slurm: lab.Cluster) -> Iterator[None]:
    """This process is a user of it."""
    with user_of(slurm):
        yield


@pytest.fixture
def slurm(slurm_lab: lab.Cluster) -> Iterator[lab.Cluster]:
    """The same with no job on it, before and after."""
    yield slurm_lab
    lab.up(slurm_lab.spec)  # whatever a test that failed has left dead
    slurm_lab.run(["scancel", "--user=root"])
    deadline = time.monotonic() + 30
    while set(slurm_lab.node_states().values()) != {"idle"}:
        assert time.monotonic() < deadline, slurm_lab.node_states()
        time.sleep(0.1)


@pytest.fixture(scope="session")
def rails_lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[lab.Cluster]:
    """A private Slurm of 4 nodes with 4 GPUs and 4 rails each, shared by all tests marked `rails`."""
    with lab.cluster(lab.LabSpec(tmp_path_factory.mktemp("lab"), rails=4)) as cluster:
        yield cluster


@pytest.fixture
def rails(rails_lab: lab.Cluster) -> Iterator[lab.Cluster]:
    """The same with nothing amiss, before and after."""
    yield rails_lab
    rails_lab.run(["scancel", "--user=root"])
    lab.heal(rails_lab)
