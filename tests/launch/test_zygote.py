"""Ranks forked by the warm parent."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from hpctrain.launch.zygote import RankFailure


def add(x):
    t = torch.tensor([float(dist.get_rank() + x)])
    dist.all_reduce(t)
    return t.item()


def test_ranks_form_a_group(ranks):
    assert ranks(3, add, 1) == [6.0] * 3


def fail(rank):
    if dist.get_rank() == rank:
        raise ValueError("on purpose")
    dist.barrier()


def test_failed_rank_is_named(ranks):
    with pytest.raises(RankFailure, match="on purpose") as caught:
        ranks(2, fail, 1)
    assert 1 in caught.value.ranks


def test_late_rank_is_killed(ranks):
    start = time.monotonic()
    with pytest.raises(RankFailure, match="in time"):
        ranks(1, sleep, timeout_s=0.5)
    assert time.monotonic() - start < 20


def sleep():
    time.sleep(60)


def test_dead_rank_is_named(ranks):
    with pytest.raises(RankFailure, match="rank 0: died"):
        ranks(1, die)


def die():
    os.kill(os.getpid(), 9)
