"""Vocab-parallel cross-entropy against torch's own on the whole logits, in float64."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist

from hpctrain.layout.layout import split
from hpctrain.model.batch import IGNORED
from hpctrain.model.loss import CrossEntropy
from hpctrain.parallel.comm import Axis
from hpctrain.parallel.loss import VocabParallelCrossEntropy
from hpctrain.telemetry.meter import Meter
from tests.training import LossOfTorch

VOCAB = 53
CASES = list(itertools.product((0.0, 0.1), (0.0, 1e-3), (1.0, 1000.0), (torch.float64, torch.float32)))


def data(scale, dtype):
    generator = torch.Generator().manual_seed(0)
    logits = scale * torch.randn(2, 7, VOCAB, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, VOCAB, (2, 7), generator=generator)
    labels[0, 2] = labels[1, 6] = IGNORED
    labels[1, 0], labels[1, 1] = 0, VOCAB - 1
    return logits.to(dtype), labels


def sharded(cases):
    """Loss and local gradient of every case on a group of all ranks but the last."""
    size = dist.get_world_size() - 1
    group, rank = dist.new_group(list(range(size))), dist.get_rank()
    if rank == size:
        return None
    axis = Axis("tp", tuple(range(size)), rank, group, Meter())
    start, count = split(VOCAB, size, rank)
    out = []
    for smoothing, z_loss, scale, dtype in cases:
        logits, labels = data(scale, dtype)
        local = logits[..., start : start + count].clone().requires_grad_()
        kept = local.detach().clone()
        loss = VocabParallelCrossEntropy(CrossEntropy(smoothing, z_loss), start, VOCAB, axis)(local, labels)
        (3 * loss).backward()
        assert torch.equal(local, kept), "the input is left alone"
        out.append((loss.detach(), local.grad))
    return out


@pytest.mark.parametrize("tp", [2, 3])
def test_equals_the_loss_of_the_whole(ranks, tp):
    """Trap D1: the largest logit, the sum and the target are those of all ranks, also where exponentials underflow."""
    outcomes = ranks(tp + 1, sharded, CASES)[:-1]
    for i, (smoothing, z_loss, scale, dtype) in enumerate(CASES):
        logits, labels = data(scale, dtype)
        logits.requires_grad_()
        want = LossOfTorch(smoothing, z_loss)(logits, labels)
        (3 * want).backward()
        losses = [o[i][0] for o in outcomes]
        assert all(torch.equal(losses[0], loss) for loss in losses), "every rank has the same bits"
        tolerance = dict(rtol=1e-12, atol=1e-12) if dtype == torch.float64 else dict(rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(losses[0], want.detach(), **tolerance)
        torch.testing.assert_close(torch.cat([o[i][1] for o in outcomes], -1), logits.grad, **tolerance)
        assert torch.isfinite(losses[0])
