"""States by chunks: wherever they are, reading, writing and updating them is what one flat AdamW does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hpctrain.layout.slots import UNIT, Row
from hpctrain.parallel.pages import Buffers
from hpctrain.scratch import Disk, ScratchFile
from hpctrain.sharding.offload.gradients import Gradients
from hpctrain.sharding.offload.home import is_short
from hpctrain.sharding.offload.states import Far, States
from hpctrain.sharding.offload.update import Updater
from hpctrain.sharding.state import KINDS, WEIGHT
from hpctrain.telemetry.live import LiveBytes

CPU = torch.device("cpu")
FRAGMENTS = [("a", 0, 3 * UNIT + 17), ("b", 0, 5), ("empty", 0, 0), ("c", 0, UNIT), ("d", 1, 2 * UNIT + 1)]
SETTINGS = [
    {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1},
    {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.0},
]


def make(folder: Path, share: float, on_disk: bool, gradients: bool, chunk: int = UNIT) -> tuple[States, Gradients]:
    row, far = Row(FRAGMENTS, chunk, share), None
    if on_disk:
        sections = 3 + gradients
        size = sections * row.far * 4
        buffers = Buffers(2, sections * row.largest * 4, False)
        far = Far(ScratchFile(folder, size), Disk(4096, 2), buffers, gradients)
    states = States(row, CPU, far, False)
    return states, Gradients(row, CPU, far, lambda name: name != "c", False)


def test_memory_is_short_below_three_times_the_state() -> None:
    held = [1000, 24, 0]
    assert is_short(3 * 16 * 1024 - 1, held) and not is_short(3 * 16 * 1024, held)


PLACES = pytest.mark.parametrize(
    ("share", "on_disk", "gradients"),
    [(0.0, False, False), (1.0, False, False), (1.0, True, False), (1.0, True, True), (0.4, True, True)],
)


@PLACES
@pytest.mark.parametrize("chunk", [UNIT, 2 * UNIT])
def test_what_is_written_is_read(tmp_path: Path, share: float, on_disk: bool, gradients: bool, chunk: int) -> None:
    states, _ = make(tmp_path, share, on_disk, gradients, chunk)
    torch.manual_seed(0)
    values = {(name, kind): torch.randn(numel) for name, _, numel in FRAGMENTS for kind in KINDS}
    for (name, kind), whole in values.items():
        assert not states.read(name, kind, 0, whole.numel()).any(), "zeros at first"
        for start in range(0, whole.numel(), chunk):
            states.write(name, kind, start, whole[start : start + chunk])
    for (name, kind), whole in values.items():
        assert torch.equal(states.read(name, kind, 0, whole.numel()), whole)
        if whole.numel() > UNIT:
            assert torch.equal(states.read(name, kind, UNIT, 9), whole[UNIT : UNIT + 9])


@PLACES
def test_updates_are_those_of_adamw(tmp_path: Path, share: float, on_disk: bool, gradients: bool) -> None:
    """Three steps of two micro-batches, the learning rate another one each time, beside torch's optimizer."""
    states, grads = make(tmp_path, share, on_disk, gradients)
    torch.manual_seed(0)
    weights = {name: torch.randn(numel) for name, _, numel in FRAGMENTS if numel}
    for name, values in weights.items():
        states.write(name, WEIGHT, 0, values)
    plain = {name: torch.nn.Parameter(values.clone()) for name, values in weights.items()}
    optimizer = torch.optim.AdamW(
        [{"params": [plain[n] for n, g, _ in FRAGMENTS if n in plain and g == group]} | SETTINGS[group]
         for group in (0, 1)]
    )  # fmt: skip
    published: dict[str, torch.Tensor] = {name: torch.empty_like(values) for name, values in weights.items()}

    def publish(chunk: Any, weight: torch.Tensor) -> None:
        for span in states.row.of_chunk(chunk):
            published[span.slot.name][span.in_slot :][: span.numel] = weight[span.in_chunk :][: span.numel]

    updater = Updater(states, publish)
    for step, factor in enumerate((1.0, 0.5, 2.0)):
        grads.begin_step(2)
        parts = {name: torch.randn(2, values.numel()) for name, values in weights.items()}
        for number in range(2):
            for name in reversed(parts):
                grads.add(name, parts[name][number].clone())
        squares, finite = grads.finish()
        whole = {name: part.sum(0) for name, part in parts.items()}
        counted = sum(float(w.double().square().sum()) for name, w in whole.items() if name != "c")
        assert finite and squares == pytest.approx(counted, rel=1e-9)
        for group, settings in enumerate(SETTINGS):
            settings = settings | {"lr": settings["lr"] * factor}
            optimizer.param_groups[group]["lr"] = settings["lr"]
            updater.step(group, settings, lambda c, v: grads.of(c, v).mul_(0.25), step)
        for name, parameter in plain.items():
            parameter.grad = whole[name] * 0.25
        optimizer.step()
        for name, parameter in plain.items():
            assert torch.allclose(published[name], parameter, rtol=1e-5, atol=1e-6), (step, name)
            assert torch.equal(states.read(name, WEIGHT, 0, parameter.numel()), published[name])
            for kind in KINDS[1:]:
                mine = states.read(name, kind, 0, parameter.numel())
                assert torch.allclose(mine, optimizer.state[parameter][kind], rtol=1e-5, atol=1e-9), (step, name, kind)


@PLACES
def test_a_gradient_that_is_not_finite_is_seen_wherever_it_counts(
    tmp_path: Path, share: float, on_disk: bool, gradients: bool
) -> None:
    _, grads = make(tmp_path, share, on_disk, gradients)
    for bad in ("a", "c"):
        for value in (float("nan"), float("inf")):
            grads.begin_step(1)
            for name, _, numel in FRAGMENTS:
                values = torch.ones(numel)
                if name == bad:
                    values[-1] = value
                if numel:
                    grads.add(name, values)
            assert grads.finish()[1] is False
    grads.begin_step(1)
    for name, _, numel in FRAGMENTS:
        if numel:
            grads.add(name, torch.ones(numel))
    squares, finite = grads.finish()
    counted = sum(numel for name, _, numel in FRAGMENTS if name != "c")
    assert finite and squares == pytest.approx(counted, rel=1e-12), "nothing of before is left"


def test_a_gradient_that_has_not_come_is_no_zero(tmp_path: Path) -> None:
    _, grads = make(tmp_path, 1.0, True, True)
    grads.begin_step(2)
    for name, _, numel in FRAGMENTS:
        if numel:
            grads.add(name, torch.ones(numel))
    with pytest.raises(AssertionError):
        grads.finish()


def test_an_update_holds_some_chunks_however_large_the_state_is(tmp_path: Path) -> None:
    """64 chunks, of which never more are in memory than there are buffers."""
    row = Row([("p", 0, 64 * UNIT)], UNIT, 1.0)
    buffers = Buffers(3, 4 * UNIT * 4, False)
    far = Far(ScratchFile(tmp_path, 4 * row.far * 4), Disk(4096, 2), buffers, True)
    states = States(row, CPU, far, False)
    grads = Gradients(row, CPU, far, lambda name: True, False)
    with LiveBytes() as live:
        grads.begin_step(1)
        grads.add("p", torch.ones(64 * UNIT))
        before = live.peak
        grads.finish()
        Updater(states, lambda chunk, weight: None).step(0, SETTINGS[0], grads.of, 0)
        assert live.peak - before < 3 * UNIT * 4, "the buffers were there before; an update adds next to nothing"
    assert far.disk.moved.read == 16 * row.far and far.disk.moved.written == (12 + 4) * row.far
