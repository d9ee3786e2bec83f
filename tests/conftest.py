"""The warm parent of all multi-rank tests."""

from __future__ import annotations

import importlib.util
import os
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")

from hpctrain.launch.zygote import Zygote

MODULES = (
    "torch._dynamo",
    "torch.distributed",
    "h5py",
    "deepspeed",
    "hpctrain.parallel.parallelize",
    "hpctrain.sharding.none.engine",
    "hpctrain.sharding.deepspeed.engine",
    "hpctrain.train.loop",
)
PARENT = Zygote([name for name in MODULES if importlib.util.find_spec(name.split(".")[0])])
"""Forked here, before anything in this process imports torch or computes."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked `gpu` are left out, not skipped, where there is no CUDA device or nobody asked for them."""
    if "gpu" in (config.option.markexpr or ""):
        return
    left_out = [item for item in items if item.get_closest_marker("gpu")]
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=left_out)


@pytest.fixture
def free_port() -> int:
    """A TCP port that nobody listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """Forks worlds of gloo ranks."""
    yield PARENT
    PARENT.close()


@pytest.fixture
def ranks(zygote: Zygote) -> Callable[..., list[Any]]:
    """`ranks(world, function, *args)`: what `function(*args)` returns on each of `world` gloo ranks.

    The function's module travels by value, so it may use anything defined in the test file.
    """

    def run(world: int, function: Callable[..., Any], *args: Any, timeout_s: float = 120.0) -> list[Any]:
        cloudpickle.register_pickle_by_value(sys.modules[function.__module__])
        return zygote.run(function, world, *args, timeout_s=timeout_s)

    return run
