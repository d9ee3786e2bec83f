"""Precision, non-finite gradients, pipeline order, memory and silence of the DeepSpeed engine."""

from __future__ import annotations

import math
import os
import sys
import tempfile
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hpctrain.model.batch import Batch
from hpctrain.parallel.parallelize import build_model
from hpctrain.parallel.ticket import Ticket
from hpctrain.sharding.build import build_engine
from tests.sharding.deepspeed_case import Checkpoint, start, zero_config
from tests.training import LR, global_batch, make_mesh, reference, train_step


def _fit(stage: int, precision: str) -> Any:
    config = zero_config(stage, tp=2, precision=precision)
    engine, mesh = start(config)
    losses = []
    for _ in range(8):
        losses.append(train_step(engine, mesh, config, 0)[0])
    batch = global_batch(config, 0)
    before = engine.evaluate(0, batch)
    engine.begin_step(batch.valid_tokens, 1)
    during = engine.forward(0, batch).output
    return losses, float(before) / batch.valid_tokens, float(during.detach()) / batch.valid_tokens


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_learns(ranks: Any, stage: int, precision: str) -> None:
    expected = ranks(2, _fit, 0, precision)[0]
    for losses, evaluated, forward in ranks(2, _fit, stage, precision):
        assert losses[-1] < 0.8 * losses[0] and evaluated < losses[-1]
        assert evaluated == forward
        assert losses == pytest.approx(expected[0], rel=5e-3)


def _poisoned(stage: int, precision: str) -> Any:
    """One good step, one with a NaN on one rank in a gradient that DeepSpeed's norm leaves out there, one good."""
    config = zero_config(stage, tp=2, precision=precision)
    engine, mesh = start(config)
    results, states = [], []
    for step in range(3):
        batch = global_batch(config, step)
        mine = batch.split(4)[mesh.dp.index].split(2)
        engine.begin_step(batch.valid_tokens, 2)
        for micro_batch in mine:
            ticket = engine.forward(0, micro_batch)
            if step == 1 and mesh.rank == 3:
                victim = engine.chunks[0].get_parameter("layers.0.mlp_norm.weight")
                handle = victim.register_hook(lambda grad: grad * math.nan)
                engine.backward(ticket)
                handle.remove()
            else:
                engine.backward(ticket)
        results.append(engine.step(LR[step]))
        states.append(Checkpoint(config, engine, mesh))
    same = all((states[0].tensors[key] == states[1].tensors[key]).all() for key in states[0].tensors)
    moved = all((states[1].tensors[key] != states[2].tensors[key]).any() for key in states[0].tensors)
    return [r.skipped for r in results], [r.grad_norm for r in results], same, moved, states[1].scalars()["step"]


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_non_finite_gradient_changes_nothing_anywhere(ranks: Any, stage: int, precision: str) -> None:
    outcomes = ranks(4, _poisoned, stage, precision)
    for skipped, norms, same, moved, step in outcomes:
        assert skipped == [False, True, False]
        assert not math.isfinite(norms[1]) and math.isfinite(norms[2])
        assert same and moved and step == 1.0


class Stage(nn.Module):
    """Part of a model, as a pipeline would cut it; parameter names stay those of the whole."""

    def __init__(self, model: Any, first: bool) -> None:
        super().__init__()
        self.first, keep = first, "0" if first else "1"
        self.layers = nn.ModuleDict({keep: model.layers[keep]})
        self.rope = model.model
        if first:
            self.embedding = model.embedding
        else:
            self.norm, self.head, self.loss = model.norm, model.head, model.loss

    def forward(self, batch: Batch, hidden: Tensor | None = None, tied: Tensor | None = None) -> Any:
        from hpctrain.model.rope import rotation
        from hpctrain.model.transformer import document_mask

        x = self.embedding(batch.tokens) if self.first else hidden
        rope = rotation(self.rope, torch.arange(x.shape[1]), x.dtype)
        mask = None if batch.documents is None else document_mask(batch.documents, x.dtype)
        for layer in self.layers.values():
            x, _ = layer(x, rope, mask, batch.samples, None)
        return (x if self.first else self.loss(self.head(self.norm(x), None), batch.labels)), None


def _gpipe(stage: int, backward_first: str, precision: str) -> Any:
    """Both halves of the model as chunks of one rank, all forwards before all backwards."""
    config = zero_config(stage, precision=precision)
    mesh = make_mesh(config, 2)
    model, records = build_model(config, mesh)
    engine = build_engine([Stage(model, True), Stage(model, False)], records, mesh, config)
    losses, norms = [], []
    for step in range(3):
        batch = global_batch(config, step)
        mine = batch.split(4)[mesh.rank].split(1)
        engine.begin_step(batch.valid_tokens, len(mine))
        tickets: list[tuple[Ticket, Tensor, Ticket]] = []
        for micro_batch in mine:
            front = engine.forward(0, micro_batch)
            received = front.output.detach().requires_grad_()
            back = engine.forward(1, micro_batch, received)
            assert back.hidden is received
            tickets.append((front, received, back))
        if backward_first == "each":
            for front, received, back in tickets:
                engine.backward(back)
                engine.backward(front, received.grad)
        else:
            for _, _, back in tickets:
                engine.backward(back)
            for front, received, _ in tickets:
                engine.backward(front, received.grad)
        total = sum(back.output.detach().double() for *_, back in tickets)
        torch.distributed.all_reduce(total)
        losses.append(float(total) / batch.valid_tokens)
        norms.append(engine.step(LR[step]).grad_norm)
    return losses, norms


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("order", ["each", "last stage first"])
def test_several_chunks_and_forwards_in_flight(ranks: Any, stage: int, order: str) -> None:
    expected = reference(zero_config(0))
    for losses, norms in ranks(2, _gpipe, stage, order, "float32"):
        assert losses == pytest.approx(expected.losses, rel=1e-5)
        assert norms == pytest.approx(expected.norms, rel=1e-5)


def test_the_loss_scale_is_applied_once_in_a_pipeline(ranks: Any) -> None:
    expected = reference(zero_config(0))
    for _, norms in ranks(2, _gpipe, 1, "each", "fp16"):
        assert norms == pytest.approx(expected.norms, rel=2e-2)


def _memory(tp: int) -> Any:
    """Largest share of gathered elements with one and with two forwards in flight, views of weights kept for
    backward, and parameters that DeepSpeed saw used outside of the module it had fetched."""
    config = zero_config(
        3, tp, model={"layers": 6, "hidden": 24, "heads": 4, "kv_heads": 2, "head_dim": 6, "ffn": 40, "vocab": 53}
    )
    engine, mesh = start(config)
    named = dict(engine.chunks[0].named_parameters())
    total = sum(p.ds_numel for p in named.values())
    peaks, kept = {1: 0, 2: 0}, 0

    def sample(*_: Any) -> None:
        peaks[len(micro_batches)] = max(peaks[len(micro_batches)], sum(p.data.numel() for p in named.values()))

    def pack(t: Tensor) -> Tensor:
        nonlocal kept
        kept += isinstance(t._base, nn.Parameter)
        return t

    for module in engine.chunks[0].modules():
        module.register_forward_pre_hook(sample)
        module.register_forward_hook(sample)
    for p in named.values():
        p.register_hook(sample)
    batch = global_batch(config, 0)
    mine = batch.split(4)[mesh.dp.index]
    for micro_batches in ([mine], [mine], [mine], mine.split(2), mine.split(2)):
        engine.begin_step(batch.valid_tokens, len(micro_batches))
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            tickets = [engine.forward(0, b) for b in micro_batches]
        for ticket in tickets:
            engine.backward(ticket)
        engine.step(LR[0])
    registered = sum(len(m._external_params) for m in engine.chunks[0].modules())
    return peaks[1] / total, peaks[2] / total, kept, registered


@pytest.mark.parametrize("tp", [1, 2])
def test_stage_three_gathers_a_few_modules_at_a_time(ranks: Any, tp: int) -> None:
    """Two layers of six; a second forward starts while some of the first's are still waiting for its backward."""
    for one, two, kept, registered in ranks(2 * tp, _memory, tp):
        assert 0 < one < 0.4 and 0 < two < 0.6
        assert kept == 0 and registered == 0


def _quiet_run() -> None:
    for stage, precision in ((1, "bf16"), (2, "fp16"), (3, "float32")):
        config = zero_config(stage, precision=precision)
        engine, mesh = start(config)
        for step in range(2):
            train_step(engine, mesh, config, step)
        engine.evaluate(0, global_batch(config, 0))
        engine.load(Checkpoint(config, engine, mesh))
        engine.close()


def _overheard() -> Any:
    """What a run writes to the descriptors, to Python's streams and to DeepSpeed's logger, and what it warns of."""
    from deepspeed.utils import logger

    with tempfile.TemporaryFile("w+") as heard:
        saved = os.dup(1), os.dup(2), sys.stdout, sys.stderr
        os.dup2(heard.fileno(), 1), os.dup2(heard.fileno(), 2)
        sys.stdout = sys.stderr = heard
        for handler in logger.handlers:
            handler.setStream(heard)
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("default")
                _quiet_run()
        finally:
            heard.flush()
            os.dup2(saved[0], 1), os.dup2(saved[1], 2)
            sys.stdout, sys.stderr = saved[2:]
        heard.seek(0)
        return heard.read(), [str(warning.message) for warning in caught]


def test_nothing_is_printed(ranks: Any) -> None:
    assert ranks(2, _overheard) == [("", [])] * 2


def _with_dropout(stage: int, evaluate: bool) -> Any:
    config = zero_config(stage, model={"dropout": 0.3})
    engine, mesh = start(config)
    out = []
    for step in range(2):
        if evaluate:
            batch = global_batch(config, step)
            first, second = (float(engine.evaluate(0, batch)) / batch.valid_tokens for _ in range(2))
            assert first == second
        out.append(train_step(engine, mesh, config, step))
    return out


@pytest.mark.parametrize("stage", [1, 3])
def test_evaluation_leaves_training_as_it_was(ranks: Any, stage: int) -> None:
    assert ranks(2, _with_dropout, stage, True) == ranks(2, _with_dropout, stage, False)
