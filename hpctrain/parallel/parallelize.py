"""From the plain model to the part of it that one rank runs. The order is the documentation."""

from __future__ import annotations

import torch
from torch import nn

from hpctrain.config.schema import RunConfig
from hpctrain.layout.parameters import parameter_specs
from hpctrain.layout.placement import Placement, cut_of, placements
from hpctrain.layout.stages import Stage, stages_of
from hpctrain.model.loss import CrossEntropy
from hpctrain.model.mlp import FanOut
from hpctrain.model.packed import packed_weights
from hpctrain.model.random import initial_reader, initial_values
from hpctrain.model.transformer import Transformer
from hpctrain.parallel.adapters import apply_adapter_dropout, column_parallel, row_parallel
from hpctrain.parallel.context import apply_context_parallelism
from hpctrain.parallel.expert import apply_expert_parallelism
from hpctrain.parallel.loss import VocabParallelCrossEntropy
from hpctrain.parallel.mesh import Mesh
from hpctrain.parallel.precision import master
from hpctrain.parallel.recompute import apply_recomputation
from hpctrain.parallel.sequence import SequenceNorm, apply_sequence_parallelism
from hpctrain.parallel.stash import Shelf, Stash, make_shelf
from hpctrain.parallel.tensor import ColumnHead, Region, VocabParallelEmbedding

Records = dict[str, Placement]


def build_model(config: RunConfig, mesh: Mesh, materialize: bool = True) -> tuple[Transformer, Records]:
    """`build_chunks` of a rank that holds one chunk."""
    (model,), records = build_chunks(config, mesh, materialize)
    return model, records


def build_chunks(config: RunConfig, mesh: Mesh, materialize: bool = True) -> tuple[list[Transformer], Records]:
    """The parts of the model that this rank runs, in the order of the model.

    Args:
        config: of the run.
        mesh: this rank's view of all ranks.
        materialize: give it its initial values, in master precision, on the rank's device; otherwise its
            parameters stay on the meta device, for an engine that never holds all of them.

    Returns:
        the modules, and the placement of each of their parameters.
    """
    records = placements(config.model, mesh.layout, mesh.rank)
    shelf = make_shelf(config.sharding.offload, mesh.device)
    chunks = []
    for stage in stages_of(config.model, mesh.layout, mesh.rank):
        with torch.device("meta"):
            loss = CrossEntropy(config.train.label_smoothing, config.train.z_loss)
            model = Transformer(config.model, config.train.seed, loss)
        parallelize(model, stage, mesh, config, records, shelf)
        if materialize:
            initialize(model, config, records, mesh.device)
        chunks.append(model)
    return chunks, records


def parallelize(
    model: Transformer, stage: Stage, mesh: Mesh, config: RunConfig, records: Records, shelf: Shelf | None = None
) -> None:
    """Turn a plain model on the meta device into this rank's part of one stage, in place.

    Order: keep the stage's parts, cut every parameter to its box, tensor parallelism, sequence parallelism, expert
    parallelism, context parallelism, dropout of adapters, recomputation, and the shelf on which what backward needs
    waits, if there is one.
    """
    model.take(stage.layers, stage.first, stage.last)
    cut_parameters(model, records)
    if mesh.tp.size > 1:
        region = Region(mesh.tp, config.parallel.sp, config.train.overlap)
        apply_tensor_parallelism(model, mesh, region, records)
        if region.sequence:
            apply_sequence_parallelism(model, mesh, records)
    apply_expert_parallelism(model, mesh, config)
    if mesh.cp.size > 1:
        apply_context_parallelism(model, mesh, config)
    apply_adapter_dropout(model, mesh, config, records)
    apply_recomputation(model, config.train, Stash(shelf) if shelf else None)


def cut_parameters(model: nn.Module, records: Records) -> None:
    """Give every parameter the shape of this rank's box."""
    for name, parameter in list(model.named_parameters()):
        record = records[name]
        assert tuple(parameter.shape) == record.global_shape, (name, parameter.shape, record.global_shape)
        if record.local_shape != record.global_shape:
            _set(model, name, torch.empty(record.local_shape, device="meta", dtype=parameter.dtype))
    for name, packed in packed_weights(model).items():
        (box,) = records[name].boxes
        packed.cut(box)


def apply_tensor_parallelism(model: Transformer, mesh: Mesh, region: Region, records: Records) -> None:
    """Swap the layers that now hold a part for ones that talk over tp."""

    def column(prefix: str, fan: FanOut) -> FanOut:
        return column_parallel(prefix, fan, region, mesh, records)

    def row(prefix: str, linear: nn.Module) -> nn.Module:
        return row_parallel(prefix, linear, region, mesh, records)

    start = cut_of(model.model, "vocab", mesh.tp.size, mesh.tp.index)[0]
    if model.embedding is not None:
        model.embedding = VocabParallelEmbedding(model.embedding, start, region)
    for index, layer in model.numbered_layers():
        layer.attention.qkv = column(f"layers.{index}.attention.qkv", layer.attention.qkv)
        if model.model.qk_norm:
            at = f"layers.{index}.attention"
            layer.attention.q_norm = SequenceNorm(layer.attention.q_norm, mesh.partial(records[f"{at}.q_norm.weight"]))
            layer.attention.k_norm = SequenceNorm(layer.attention.k_norm, mesh.partial(records[f"{at}.k_norm.weight"]))
        layer.attention.output = row(f"layers.{index}.attention.output", layer.attention.output)
        if layer.mlp is not None:
            layer.mlp.inputs = column(f"layers.{index}.mlp.inputs", layer.mlp.inputs)
            layer.mlp.down = row(f"layers.{index}.mlp.down", layer.mlp.down)
        if layer.moe is not None and layer.moe.shared is not None:
            shared = layer.moe.shared
            shared.inputs = column(f"layers.{index}.moe.shared.inputs", shared.inputs)
            shared.down = row(f"layers.{index}.moe.shared.down", shared.down)
    if model.head is not None:
        model.head = ColumnHead(model.head, region, mesh.alone)
    model.loss = VocabParallelCrossEntropy(model.loss, start, model.model.vocab, mesh.tp)


def initialize(model: nn.Module, config: RunConfig, records: Records, device: torch.device) -> None:
    """Replace every parameter on the meta device by its initial values, in master precision.

    None are drawn where all come from a checkpoint (`checkpoint.base`).
    """
    dtype, drawn = master(config.train.precision), config.checkpoint.base is None
    specs = {spec.name: spec for spec in parameter_specs(config.model)}
    for name, parameter in list(model.named_parameters()):
        assert tuple(parameter.shape) == records[name].local_shape, name
        values = torch.zeros(parameter.shape, dtype=dtype, device=device)
        for box in records[name].boxes if drawn else ():
            window = tuple(slice(a, a + n) for a, n in zip(box.local, box.shape))
            values[window].copy_(initial_values(specs[name], config.train.seed, box))
        _set(model, name, values)
    for name, packed in packed_weights(model).items() if drawn else ():
        packed.fill(initial_reader(specs[name], config.train.seed), device)


def _set(model: nn.Module, name: str, values: torch.Tensor) -> None:
    """Give a parameter other values, and perhaps another shape; it is trained if it was."""
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    module.register_parameter(leaf, nn.Parameter(values, module.get_parameter(leaf).requires_grad))
