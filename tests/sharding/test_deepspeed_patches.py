"""Each patch on its own, and the refusal of a DeepSpeed it was not written for.

What the patches are for is held by the tests of the engine; here each is seen to be still needed.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch

from hpctrain.errors import ConfigError
from hpctrain.sharding.deepspeed import patches


def test_another_version_is_refused() -> None:
    patches.require_version("0.19.8")
    with pytest.raises(
        ConfigError, match=r"written for DeepSpeed 0\.19\.8 and found 0\.20\.0; pip install deepspeed==0"
    ):
        patches.require_version("0.20.0")


def test_another_source_is_refused() -> None:
    patches.require_source(test_another_version_is_refused, 'patches.require_version("0.20.0")')
    with pytest.raises(ConfigError, match=r"test_another_version_is_refused is not that of 0\.19\.8"):
        patches.require_source(test_another_version_is_refused, "a line that" + " is not there")


def _refused(attribute: str) -> str:
    """Replace one function that is patched by another, as a new release might."""
    import importlib

    from hpctrain.sharding.deepspeed.engine import load_deepspeed

    module, _, name = attribute.rpartition(".")
    setattr(importlib.import_module(module), name, lambda *_: None)
    try:
        load_deepspeed(torch.device("cpu"))
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "attribute",
    [
        "deepspeed.comm.torch.build_shm_op",
        "deepspeed.runtime.zero.partitioned_param_coordinator.assert_ints_same_as_other_ranks",
    ],
)
def test_a_changed_function_is_refused(ranks: Any, attribute: str) -> None:
    (text,) = ranks(1, _refused, attribute)
    assert "the installed DeepSpeed's" in text and "is not that of 0.19.8" in text


def _while_values_come_later(change: str) -> Any:
    """The three functions before, during and after; or the refusal when one of them is another."""
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero.partition_parameters import Init
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    owners = {
        "_broadcast_model": DeepSpeedEngine,
        "_zero_init_param": Init,
        "flatten_dense_tensors_aligned": DeepSpeedZeroOptimizer,
    }
    if change:
        setattr(owners[change], change, lambda *_: None)

    def look() -> list[int]:
        return [id(getattr(owner, name)) for name, owner in owners.items()]

    before = look()
    try:
        with patches.values_come_later():
            during = look()
    except ConfigError as error:
        return look() == before, str(error)
    return look() == before, sum(a != b for a, b in zip(before, during))


def test_values_come_later_only_while_engines_are_made(ranks: Any) -> None:
    assert ranks(0, _while_values_come_later, "") == [(True, 3)]


@pytest.mark.parametrize("change", ["_broadcast_model", "_zero_init_param", "flatten_dense_tensors_aligned"])
def test_values_come_later_in_no_other_deepspeed(ranks: Any, change: str) -> None:
    ((restored, text),) = ranks(0, _while_values_come_later, change)
    assert restored and "is not that of 0.19.8" in text


def _globals_after_close() -> Any:
    from deepspeed.runtime.zero import parameter_offload
    from deepspeed.utils import groups

    from tests.sharding.deepspeed_case import start, zero_config

    engine, _ = start(zero_config(3))
    during = (groups.mpu is not None, len(parameter_offload.FWD_MODULE_STACK))
    engine.close()
    return during, (groups.mpu is not None, len(parameter_offload.FWD_MODULE_STACK))


def test_nothing_outlives_an_engine(ranks: Any) -> None:
    assert ranks(1, _globals_after_close) == [((True, 1), (False, 0))]


def _single_rank_without_a_group() -> Any:
    import torch.distributed as dist

    from hpctrain.layout.layout import Layout
    from hpctrain.parallel.mesh import build_mesh
    from hpctrain.parallel.parallelize import build_model
    from hpctrain.sharding.build import build_engine
    from tests.sharding.deepspeed_case import zero_config
    from tests.training import train_step

    assert not dist.is_initialized()
    mesh, config = build_mesh(Layout(), torch.device("cpu")), zero_config(2)
    model, records = build_model(config, mesh)
    engine = build_engine([model], records, mesh, config)
    return [train_step(engine, mesh, config, step) for step in range(3)]


def test_one_process_needs_no_process_group(ranks: Any) -> None:
    from tests.sharding.deepspeed_case import zero_config
    from tests.training import reference

    expected = reference(zero_config(0))
    assert ranks(0, _single_rank_without_a_group)[0] == [
        (pytest.approx(loss, rel=1e-5), pytest.approx(norm, rel=1e-5))
        for loss, norm in zip(expected.losses, expected.norms)
    ]


def _programs_started() -> tuple[int, int]:
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    started: list[list[str]] = []
    subprocess.check_output = lambda command: started.append(command) or b"available: 0 nodes\n"
    accelerator = CPU_Accelerator()
    accelerator.device_count()
    before = len(started)
    patches.devices_counted_once(accelerator)
    counts = {accelerator.device_count() for _ in range(3)}
    assert counts == {1}
    return before, len(started) - before


def test_devices_are_counted_once(ranks: Any) -> None:
    """The unpatched one starts a program for each count; the patched one was counted when it was patched."""
    assert ranks(0, _programs_started) == [(1, 1)]


def test_loading_is_quiet_and_leaves_the_compiler_out() -> None:
    code = (
        "import torch, sys; from hpctrain.sharding.deepspeed.engine import load_deepspeed;"
        "load_deepspeed(torch.device('cpu'));"
        "assert 'deepspeed.runtime.zero.muon.muon_optimizer' in sys.modules; print('torch._inductor' in sys.modules)"
    )
    environment = {k: v for k, v in os.environ.items() if k != "DS_ACCELERATOR"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert (done.stdout, done.stderr) == ("False\n", "")


def test_deprecations_are_silenced_and_nothing_else() -> None:
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        patches.no_repeated_warnings()
        warnings.warn("`torch.distributed.reduce_scatter_tensor` is deprecated. Use another.", FutureWarning, 1)
        warnings.warn("`torch.distributed.something` is deprecated.", FutureWarning, 1)
    assert [str(w.message) for w in heard] == ["`torch.distributed.something` is deprecated."]


def test_deepspeed_for_another_device_is_refused() -> None:
    patches.require_accelerator("cpu", torch.device("cpu"))
    with pytest.raises(
        ConfigError, match=r"cluster.device='cuda': DeepSpeed was imported .* to compute on cpu; set DS_A"
    ):
        patches.require_accelerator("cpu", torch.device("cuda", 1))


def test_local_rank_is_the_device_while_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", "3")
    with patches.local_rank(torch.device("cuda", 1)):
        assert os.environ["LOCAL_RANK"] == "1" and "OMPI_COMM_WORLD_LOCAL_RANK" not in os.environ
    assert os.environ["LOCAL_RANK"] == os.environ["OMPI_COMM_WORLD_LOCAL_RANK"] == "3"


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ([], False),
        ([[1.0, -2.0], [3.0]], False),
        ([[1.0, math.inf], [3.0]], True),
        ([[1.0], [math.inf, -math.inf]], True),
        ([[math.nan], [3.0]], True),
        ([[3e38, 3e38], [1.0]], False),  # a sum that is not finite, of values that are
    ],
)
def test_what_is_not_finite_is_found_by_sums(values: list[list[float]], found: bool) -> None:
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    zero = DeepSpeedZeroOptimizer.__new__(DeepSpeedZeroOptimizer)
    zero.bit16_groups, zero.averaged_gradients = [[]], {0: [torch.tensor(v) for v in values] + [None]}
    patches.skip_all_non_finite(zero, 1)
    assert bool(zero.has_overflow_partitioned_grads_serial()) == found
