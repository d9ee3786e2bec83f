"""The driver's own step, as a contender."""

from __future__ import annotations

from benchmarks.rounds import Work
from hpctrain.config.schema import RunConfig


def ours(config: RunConfig, world: int) -> Work:
    """Steps of `config` on `world` ranks, on random tokens. Of what is offloaded to a disk, bytes are counted that were
    `read` and `written`, and seconds that were `waited` for them."""
    import torch

    from hpctrain.layout.layout import Layout
    from hpctrain.layout.placement import replica_groups
    from hpctrain.model.batch import Batch
    from hpctrain.parallel.context import own_part
    from hpctrain.parallel.mesh import build_mesh
    from hpctrain.parallel.parallelize import build_chunks
    from hpctrain.parallel.pipeline import Pipeline
    from hpctrain.sharding.build import build_engine, takes_values
    from hpctrain.train.loop import train_step

    layout = Layout.of(config.parallel, world)
    mesh = build_mesh(layout, torch.device("cpu"), replica_groups(config.model, layout))
    chunks, records = build_chunks(config, mesh, takes_values(config))
    held = [records[name] for chunk in chunks for name, _ in chunk.named_parameters()]
    owned = sum(b.numel / mesh.reduction(r).size for r in held if r.owner == mesh.rank for b in r.boxes)
    engine = build_engine(chunks, records, mesh, config)
    pipeline = Pipeline(engine, mesh, config)
    inputs, labels = random_tokens(config, mesh.dp.index, mesh.dp.size)
    batch = own_part(Batch(inputs, labels, None, torch.arange(len(inputs))), config, mesh)

    def step() -> float:
        return train_step(config, pipeline, engine, batch, config.optimizer.lr)[0].mean

    disk = getattr(getattr(getattr(engine, "_store", None), "_home", None), "disk", None)

    def moved() -> dict[str, float]:
        return {"read": disk.moved.read, "written": disk.moved.written, "waited": disk.moved.waited} if disk else {}

    return Work(step, owned, counts=moved)


def random_tokens(config: RunConfig, part: int = 0, parts: int = 1):  # type: ignore[no-untyped-def]
    """Inputs and labels [samples, seq] of one of `parts` equal parts of a global batch."""
    import torch

    generator = torch.Generator().manual_seed(0)
    shape = (config.train.global_batch, config.data.seq + 1)
    tokens = torch.randint(0, config.model.vocab, shape, generator=generator).chunk(parts)[part]
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
