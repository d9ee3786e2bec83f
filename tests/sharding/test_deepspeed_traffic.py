"""What DeepSpeed sends is counted: by formula, against torch's own view of it, and for one engine only."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hpctrain.config.schema import RunConfig
from hpctrain.errors import ConfigError
from hpctrain.layout.layout import Layout
from hpctrain.layout.parameters import parameter_specs
from hpctrain.layout.traffic import data_bytes
from hpctrain.parallel.mesh import Mesh
from hpctrain.sharding.deepspeed.traffic import CountedBackend, CountedWork
from hpctrain.sharding.engine import Engine
from hpctrain.telemetry.meter import Traffic
from tests.sharding.deepspeed_case import Checkpoint, start, zero_config
from tests.training import LR, global_batch, make_mesh, train_step

NAMES = {
    "allreduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "reduce_": "reduce",
    "broadcast_": "broadcast",
    "barrier": "barrier",
}


class Overheard(TorchDispatchMode):
    """Collectives that reach torch, by our names, whoever starts them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func._schema.name.removeprefix("c10d::")
            self.calls[NAMES.get(name, name)] += 1
        return func(*args, **(kwargs or {}))


def steps_of(stage: int, micro_batches: int, precision: str = "float32", tp: int = 1, keep: bool = False) -> RunConfig:
    """Four samples a rank in so many micro-batches."""
    config = zero_config(stage, tp, precision=precision, micro_batch=4 // micro_batches)
    sharding = config.sharding.model_copy(update={"reshard_after_forward": not keep})
    return config.model_copy(update={"sharding": sharding})


def one_step(engine: Engine, mesh: Mesh, config: RunConfig, step: int) -> dict[tuple[str, str], Traffic]:
    """The engine's part of `train_step`, counted alone."""
    batch = global_batch(config, step)
    mine = batch.split(4)[mesh.dp.index].split(config.train.micro_batch)
    mesh.meter.reset()
    engine.begin_step(batch.valid_tokens, len(mine))
    for micro_batch in mine:
        engine.backward(engine.forward(0, micro_batch))
    engine.step(LR[0])
    return {key: traffic for key, traffic in mesh.meter.traffic.items() if traffic.calls}


def _bytes(stage: int, micro_batches: int, precision: str, prefetch: bool = True, keep: bool = False) -> Any:
    """Bytes of each of three steps, and whether all were waited for."""
    from hpctrain.sharding.deepspeed import config as settings

    if not prefetch:
        ours = settings.zero_section
        settings.zero_section = lambda config: {**ours(config), "stage3_prefetch_bucket_size": 0}
    config = steps_of(stage, micro_batches, precision, keep=keep)
    engine, mesh = start(config)
    steps = [one_step(engine, mesh, config, step) for step in range(3)]
    engine.close()
    return [{k: t.bytes for k, t in step.items()} for step in steps], all(t.seconds > 0 for t in steps[2].values())


def up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_bytes_of_stages_one_and_two(ranks: Any, stage: int, micro_batches: int, precision: str) -> None:
    """Gradients, float32: all-reduced whole, by stage 1 once a step, by stage 2 at every micro-batch. Then the flag
    of non-finite values, a byte, and the norm of each of two groups (with and without decay), a float. Weights:
    each rank sends its half of both groups, which are padded to twice the number of ranks."""
    sent = data_bytes(steps_of(stage, micro_batches, precision), Layout(dp=2))
    expected = {(operation, "dp+cp"): size for operation, size in sent.items()}
    expected["all_reduce", "dp+cp"] += 1 + 2 * 4
    for steps, waited in ranks(2, _bytes, stage, micro_batches, precision):
        assert steps == [expected] * 3 and waited


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("prefetch", [True, False])
def test_bytes_of_stage_three(ranks: Any, micro_batches: int, precision: str, prefetch: bool) -> None:
    """Every parameter is cut in halves, of odd ones the second is padded.

    Gradients, float32: both halves of all, reduce-scattered at every micro-batch; the flag and the two norms, in
    float64. Weights: a rank sends its half of each matrix for a forward and again for its backward, and its half of
    each vector once, at the end of a step. The very first micro-batch, from which DeepSpeed learns what is needed
    when, lets vectors go like matrices, and gathers them again for its backward and for the second. What prefetching
    has met before it was let go is kept for backward: with it there is a range, from the second micro-batch on."""
    specs = parameter_specs(steps_of(3, 1).model)
    width = 2 if precision == "bf16" else 4
    vectors = sum(up(spec.numel, 2) // 2 for spec in specs if len(spec.shape) == 1)
    matrices = sum(up(spec.numel, 2) // 2 for spec in specs if len(spec.shape) > 1)
    reduced = {
        ("reduce_scatter", "dp+cp"): data_bytes(steps_of(3, micro_batches), Layout(dp=2))["reduce_scatter"],
        ("all_reduce", "dp+cp"): 1 + 2 * 8,
    }
    for steps, waited in ranks(2, _bytes, 3, micro_batches, precision, prefetch):
        assert waited
        gathered = [step.pop(("all_gather", "dp+cp")) / width - vectors for step in steps]
        assert steps == [reduced] * 3
        gathered[0] -= 2 * matrices + vectors + vectors * (micro_batches > 1)
        for step, values in enumerate(gathered):
            usual = micro_batches - (step == 0)
            if prefetch and usual:
                assert matrices * usual < values < 2 * matrices * usual
            else:
                assert values == 2 * matrices * usual
                most = data_bytes(steps_of(3, micro_batches, precision), Layout(dp=2))
                assert step == 0 or width * (values + vectors) == most["all_gather"]
        assert gathered[1] == gathered[2]


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_bytes_of_stage_three_that_keeps_weights_for_backward(ranks: Any, micro_batches: int) -> None:
    """Each matrix is gathered once a micro-batch, vectors once a step."""
    specs = parameter_specs(steps_of(3, 1).model)
    vectors = sum(up(spec.numel, 2) // 2 for spec in specs if len(spec.shape) == 1)
    matrices = sum(up(spec.numel, 2) // 2 for spec in specs if len(spec.shape) > 1)
    want = 4 * (matrices * micro_batches + vectors)
    assert data_bytes(steps_of(3, micro_batches, keep=True), Layout(dp=2))["all_gather"] == want
    for steps, _ in ranks(2, _bytes, 3, micro_batches, "float32", True, True):
        assert [step["all_gather", "dp+cp"] for step in steps[1:]] == [want] * 2


def _calls(stage: int, tp: int) -> Any:
    config = steps_of(stage, 2, tp=tp)
    engine, mesh = start(config)
    one_step(engine, mesh, config, 0)
    with Overheard() as overheard:
        counted = one_step(engine, mesh, config, 1)
    engine.close()
    return overheard.calls, [(*key, traffic.calls, traffic.bytes) for key, traffic in counted.items()]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_nothing_goes_past_the_count(ranks: Any, stage: int) -> None:
    for overheard, counted in ranks(2, _calls, stage, 1):
        calls: Counter[str] = Counter()
        for operation, _, number, _ in counted:
            calls[operation] += number
        assert calls == overheard


@pytest.mark.parametrize(("stage", "size"), [(1, 1 + 2 * 4), (3, 1 + 2 * 8)])
def test_the_model_axis_is_told_from_the_others(ranks: Any, stage: int, size: int) -> None:
    """Over pp x tp go the flag and the norms. The traffic of the layers over tp, ours, keeps its name."""
    for _, counted in ranks(4, _calls, stage, 2):
        axes = {axis for _, axis, *_ in counted}
        assert axes == {"dp+cp", "pp+tp", "tp"}
        assert sum(n for _, axis, _, n in counted if axis == "pp+tp") == size


def _result(stage: int, counted: bool) -> Any:
    config = zero_config(stage, precision="bf16")
    engine, mesh = start(config)
    if not counted:
        engine._counted.close()
    steps = [train_step(engine, mesh, config, step) for step in range(3)]
    weights = {key: values.numpy() for key, values in Checkpoint(config, engine, mesh).tensors.items()}
    sent = {axis for _, axis in mesh.meter.traffic}
    engine.close()
    return steps, weights, sent


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_counting_changes_no_bit(ranks: Any, stage: int) -> None:
    """Without the count the meter has only ours: the sum of the losses."""
    for (steps, weights, sent), (plain_steps, plain_weights, ours) in zip(
        ranks(2, _result, stage, True), ranks(2, _result, stage, False)
    ):
        assert steps == plain_steps
        assert all((weights[key] == plain_weights[key]).all() for key in weights)
        assert (ours, sent - ours) == ({"pp+dp+cp"}, {"dp+cp"})


def _in_turn() -> Any:
    """Two engines, one after the other; the second is closed last, the first twice. Collectives after each."""
    from deepspeed import comm

    backend, sent = None, []
    for stage in (2, 3):
        config = zero_config(stage)
        engine, mesh = start(config)
        backend = backend or engine._counted._backend
        train_step(engine, mesh, config, 0)
        engine.close()
        engine.close()
        mesh.meter.reset()
        comm.all_reduce(torch.ones(3))
        sent.append(dict(mesh.meter.traffic))
        assert comm.comm.cdb is backend
    return sent


def test_nothing_is_counted_after_close(ranks: Any) -> None:
    assert ranks(2, _in_turn) == [[{}, {}]] * 2


def _two_at_a_time() -> Any:
    from deepspeed import comm

    config = zero_config(2)
    (_, first), (second, mesh) = start(config), start(config)
    for m in (first, mesh):
        m.meter.reset()
    comm.all_reduce(torch.ones(3))
    counted = [sum(t.bytes for t in m.meter.traffic.values()) for m in (first, mesh)]
    second.close()
    return counted, type(comm.comm.cdb).__name__


def test_the_engine_made_last_counts(ranks: Any) -> None:
    assert ranks(2, _two_at_a_time) == [([0, 12], "TorchBackend")] * 2


def _handles(folder: Path) -> Any:
    """Every operation, blocking and not, with its result; rank 1 begins when rank 0 has begun to wait."""
    from deepspeed import comm

    from hpctrain.sharding.deepspeed.engine import load_deepspeed

    config = zero_config(1)
    mesh = make_mesh(config, 2)
    load_deepspeed(mesh.device)
    counted, group, rank = CountedBackend(mesh), mesh.loss.group, mesh.rank
    mine, both = torch.full((3,), rank + 1.0), torch.tensor([1.0, 1, 1, 2, 2, 2])
    total, gathered = mine.clone(), torch.zeros(6)
    turn = folder / "turn"
    if rank:
        while not turn.exists():
            time.sleep(0.01)
        time.sleep(0.5)
    work = comm.all_reduce(total, group=group, async_op=True)
    assert isinstance(work, CountedWork)
    turn.touch()
    work.wait()
    work.wait()
    assert comm.all_gather_into_tensor(gathered, mine, group=group) is None
    assert work.is_completed() and total.tolist() == [3.0] * 3 and gathered.equal(both)

    parts = [torch.zeros(3), torch.zeros(3)]
    comm.all_gather(parts, mine, group=group)
    assert torch.cat(parts).equal(both)
    out = torch.zeros(3)
    comm.reduce_scatter_tensor(out, both.clone(), group=group)
    assert out.equal(2 * mine)
    comm.reduce_scatter(out, [both[:3].clone(), both[3:].clone()], group=group)
    assert out.equal(2 * mine)
    comm.broadcast(sent := mine.clone(), 1, group=group)
    assert sent.tolist() == [2.0] * 3
    comm.reduce(reduced := mine.clone(), 0, group=group)
    assert rank or reduced.tolist() == [3.0] * 3
    comm.barrier()
    comm.all_reduce(torch.ones(5), group=torch.distributed.new_group([rank], use_local_synchronization=True))
    assert comm.get_world_size(group) == 2 and comm.has_all_reduce_coalesced() in (True, False)
    counted.close()
    traffic = mesh.meter.traffic
    return {k: (t.calls, t.bytes) for k, t in traffic.items()}, traffic["all_reduce", "dp+cp"].seconds


def test_every_operation_and_its_handle(ranks: Any, tmp_path: Path) -> None:
    (counted, waited), (same, _) = ranks(2, _handles, tmp_path)
    assert (
        counted
        == same
        == {
            ("all_reduce", "dp+cp"): (1, 12),
            ("all_gather", "dp+cp"): (2, 24),
            ("reduce_scatter", "dp+cp"): (2, 48),
            ("broadcast", "dp+cp"): (1, 12),
            ("reduce", "dp+cp"): (1, 12),
            ("barrier", "dp+cp"): (1, 0),
        }
    )
    assert waited > 0.1, "rank 0 was in its wait when rank 1 had yet to begin"


def _changed() -> str:
    from deepspeed.comm import comm

    comm.all_reduce = lambda *_: None
    try:
        start(zero_config(1))
    except ConfigError as error:
        return str(error)
    return ""


def test_another_deepspeed_is_refused(ranks: Any) -> None:
    (text,) = ranks(1, _changed)
    assert "the installed DeepSpeed's" in text and "is not that of 0.19.8" in text
