"""A small training run under DeepSpeed, and the same in plain PyTorch, for the tests of this engine."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hpctrain.config.schema import RunConfig
from hpctrain.layout.layout import Layout
from hpctrain.layout.parameters import parameter_specs
from hpctrain.layout.placement import Index, replica_groups
from hpctrain.model.batch import IGNORED, Batch
from hpctrain.parallel.comm import all_reduce, gather_objects
from hpctrain.parallel.mesh import Mesh, build_mesh
from hpctrain.parallel.parallelize import build_model
from hpctrain.sharding.deepspeed.engine import DeepSpeedEngine
from hpctrain.sharding.state import KINDS

MODEL = {"layers": 2, "hidden": 16, "heads": 4, "kv_heads": 2, "ffn": 28, "vocab": 37, "max_seq": 32}
SEQ, GLOBAL_BATCH, MICRO_BATCH = 12, 8, 2
LR = (1e-2, 8e-3, 5e-3, 3e-3, 1e-3, 1e-3)


class Log(NamedTuple):
    """What a run shows: mean loss and norm of each step, and which were skipped."""

    losses: list[float]
    norms: list[float]
    skipped: list[bool]


def run_config(tp: int = 1, stage: int = 1, **sections: dict[str, Any]) -> RunConfig:
    """A configuration with a clip that bites, weight decay, and buckets smaller than the model."""
    sharding = {"engine": "deepspeed" if stage else "none", "stage": stage, "bucket_mib": 0.005}
    return RunConfig.model_validate(
        {
            "model": MODEL | sections.get("model", {}),
            "parallel": {"tp": tp, **sections.get("parallel", {})},
            "sharding": sharding | sections.get("sharding", {}),
            "optimizer": {"clip": 0.5, **sections.get("optimizer", {})},
            "train": {"global_batch": GLOBAL_BATCH, "micro_batch": MICRO_BATCH, **sections.get("train", {})},
        }
    )


def global_batch(step: int, vocab: int, constant: bool = False) -> Batch:
    """Samples with documents and very unequal masks: one is nearly, and one wholly, without labels."""
    generator = torch.Generator().manual_seed(0 if constant else 1000 + step)
    tokens = torch.randint(0, vocab, (GLOBAL_BATCH, SEQ + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[0, 1:], labels[1], labels[5, ::3] = IGNORED, IGNORED, IGNORED
    documents = (torch.arange(SEQ) >= 5).long().expand(GLOBAL_BATCH, SEQ)
    samples = torch.arange(step * GLOBAL_BATCH, (step + 1) * GLOBAL_BATCH)
    return Batch(tokens[:, :-1], labels, documents, samples)


def mesh_of(config: RunConfig) -> Mesh:
    """The mesh of a test's world."""
    import torch.distributed as dist

    layout = Layout.of(config.parallel, dist.get_world_size() if dist.is_initialized() else 1)
    return build_mesh(layout, torch.device("cpu"), replica_groups(config.model, layout))


def make_engine(config: RunConfig, mesh: Mesh) -> DeepSpeedEngine:
    model, placements = build_model(config, mesh)
    return DeepSpeedEngine([model], config, mesh, placements)


def share(batch: Batch, mesh: Mesh) -> list[Batch]:
    """The micro-batches of this rank."""
    return batch.split(MICRO_BATCH)[mesh.dp.index :: mesh.dp.size]


def train(engine: DeepSpeedEngine, config: RunConfig, mesh: Mesh, steps: range, constant: bool = False) -> Log:
    """Steps of the run; `constant` repeats one batch."""
    log = Log([], [], [])
    for step in steps:
        batch = global_batch(step, config.model.vocab, constant)
        valid = batch.valid_tokens
        micro_batches = share(batch, mesh)
        engine.begin_step(valid, len(micro_batches))
        total = torch.zeros((), dtype=torch.float64)
        for micro_batch in micro_batches:
            ticket = engine.forward(0, micro_batch)
            total += ticket.output.detach().double()
            engine.backward(ticket)
        result = engine.step(LR[step])
        log.losses.append(float(all_reduce(total, mesh.loss)) / valid)
        log.norms.append(result.grad_norm)
        log.skipped.append(result.skipped)
    return log


def state_of(engine: DeepSpeedEngine, mesh: Mesh) -> dict[tuple[str, str], list[tuple[Index, Tensor]]]:
    """All boxes that all ranks would write."""
    mine = [(p.name, p.kind, p.start, p.fetch().numpy()) for p in engine.pieces()]
    out: dict[tuple[str, str], list[tuple[Index, Tensor]]] = {}
    for ranks in gather_objects(mine, mesh.world):
        for name, kind, start, values in ranks:  # type: ignore[attr-defined]
            out.setdefault((name, kind), []).append((start, torch.from_numpy(values)))
    return out


class MemoryReader:
    """A checkpoint in memory, made of the pieces of all ranks."""

    def __init__(self, config: RunConfig, boxes: dict[tuple[str, str], list[tuple[Index, Tensor]]], scalars: Any):
        self.tensors: dict[tuple[str, str], Tensor] = {}
        self.writes: dict[tuple[str, str], Tensor] = {}
        for spec in parameter_specs(config.model):
            for kind in KINDS:
                values, writes = torch.full(spec.shape, float("nan")), torch.zeros(spec.shape, dtype=torch.int64)
                for start, box in boxes[spec.name, kind]:
                    at = tuple(slice(a, a + n) for a, n in zip(start, box.shape))
                    values[at] = box
                    writes[at] += 1
                self.tensors[spec.name, kind], self.writes[spec.name, kind] = values, writes
        self._scalars = scalars

    @classmethod
    def of(cls, engine: DeepSpeedEngine, config: RunConfig, mesh: Mesh) -> MemoryReader:
        return cls(config, state_of(engine, mesh), engine.scalars())

    def read(self, name: str, kind: str, start: Index, shape: Index) -> Tensor:
        return self.tensors[name, kind][tuple(slice(a, a + n) for a, n in zip(start, shape))].contiguous()

    def scalars(self) -> dict[str, float]:
        return dict(self._scalars)


def reference(config: RunConfig, steps: range) -> tuple[Log, dict[str, Tensor]]:
    """The same run as plain PyTorch on one process: losses, norms, weights after it."""
    mesh = mesh_of(config)
    model, _ = build_model(config, mesh)
    decay = {spec.name for spec in parameter_specs(config.model) if spec.decay}
    named, o = dict(model.named_parameters()), config.optimizer
    groups = [
        {"params": [p for n, p in named.items() if n in decay], "weight_decay": o.weight_decay},
        {"params": [p for n, p in named.items() if n not in decay], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(o.beta1, o.beta2), eps=o.eps)
    log = Log([], [], [])
    for step in steps:
        batch = global_batch(step, config.model.vocab)
        loss = model(batch) / batch.valid_tokens
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), o.clip)
        for group in optimizer.param_groups:
            group["lr"] = LR[step]
        optimizer.step()
        optimizer.zero_grad()
        log.losses.append(float(loss))
        log.norms.append(float(norm))
        log.skipped.append(False)
    return log, {name: p.detach().clone() for name, p in named.items()}
