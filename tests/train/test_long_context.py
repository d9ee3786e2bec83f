"""A sequence eight times as long as a rank's memory allows trains when eight ranks hold a part of it each."""

from __future__ import annotations

import resource

import torch.distributed as dist

from tests.training import make_config, make_mesh, train_step

ALLOWED = 60 << 20
"""Bytes that a rank may take for data beside what it holds after a small step, which has started all threads: the
kernel refuses it more (RLIMIT_DATA, which counts private memory that can be written, as what malloc and mmap give).
Measured need, to 4 MiB: one process 48 MiB for 1024 tokens and 72 MiB for 1536; a rank of eight 48 MiB for 8192, of
which it holds 1024."""

MAPPED = 64 << 10
"""Bytes from which on an allocation is a mapping of its own. Left alone the bound moves with what was freed, and how
much of a heap lies in pieces depends on the order in which ranks are served."""

FITS = 1024
"""Tokens of which one process holds the activations in that; of a half more it does not."""


def train(seq, cp, allowed=ALLOWED):
    """A step on a sequence of one document, after a small one; its mean loss, or what there was no memory for."""
    from hpctrain.parallel.parallelize import build_model
    from hpctrain.sharding.build import build_engine
    from hpctrain.telemetry.memory import return_freed_memory

    config = make_config(
        model=dict(hidden=64, heads=2, kv_heads=1, head_dim=32, ffn=1024, vocab=512, max_seq=seq, layers=2),
        data=dict(seq=seq, document_mask=False),
        parallel=dict(cp=cp),
        train=dict(precision="float32", global_batch=1, micro_batch=1),
    )
    mesh = make_mesh(config, dist.get_world_size())
    return_freed_memory(MAPPED)
    model, records = build_model(config, mesh)
    engine = build_engine([model], records, mesh, config)
    train_step(engine, mesh, config.model_copy(update={"data": config.data.model_copy(update={"seq": 16 * cp})}), 0)
    with open("/proc/self/status") as status:
        held = next(int(line.split()[1]) << 10 for line in status if line.startswith("VmData"))
    resource.setrlimit(resource.RLIMIT_DATA, (held + allowed, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    try:
        return train_step(engine, mesh, config, 1)[0]
    except (RuntimeError, MemoryError) as error:
        return str(error)


def test_eight_times_what_fits(ranks):
    assert isinstance(ranks(1, train, FITS, 1)[0], float)
    for too_long in (FITS + FITS // 2, 8 * FITS):
        assert "can't allocate memory" in str(ranks(1, train, too_long, 1)[0])
    losses = ranks(8, train, 8 * FITS, 8)
    assert losses == [losses[0]] * 8 and 6.0 < losses[0] < 6.5, "log(512) is 6.24"
