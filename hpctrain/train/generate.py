"""Sampling text from a checkpoint, under any tensor parallelism."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hpctrain.checkpoint.collective import find
from hpctrain.config.schema import RunConfig
from hpctrain.data.corpus import Corpus
from hpctrain.data.tokenizer import TOKENIZER_FILE, tokenizer_of
from hpctrain.errors import CheckpointError, DataError
from hpctrain.launch.life.identity import ALONE, detect
from hpctrain.launch.rank.bootstrap import process_group
from hpctrain.layout.layout import Layout, split
from hpctrain.layout.parameters import saved_shapes
from hpctrain.layout.placement import replica_groups
from hpctrain.model.random import stream_key
from hpctrain.model.router import give_biases
from hpctrain.model.transformer import Transformer
from hpctrain.parallel.comm import Axis, all_gather
from hpctrain.parallel.mesh import Mesh, build_mesh
from hpctrain.parallel.parallelize import Records, build_model
from hpctrain.sharding.frozen import load_packed
from hpctrain.sharding.routers import load_biases
from hpctrain.sharding.state import WEIGHT, StateReader, region
from hpctrain.train.base import TrainedAdapters, open_base
from hpctrain.train.preflight import check_model


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    Attributes:
        tokens: how many at most.
        temperature: 0 takes the likeliest.
        top_k: choose among so many; 0 among all.
        seed: of the draws; the same text comes out under every layout.
    """

    tokens: int = 200
    temperature: float = 0.8
    top_k: int = 0
    seed: int = 0


def generate_main(settings: dict[str, Any], run: Path, prompt: str, sampling: Sampling) -> tuple[str, int]:
    """As one rank of a job: load the weights of a run's newest checkpoint, continue the prompt.

    Returns:
        the prompt and what follows it, the same on every rank; the checkpoint's step.

    Raises:
        CheckpointError: no checkpoint there, none valid, or of another model.
    """
    config = RunConfig.model_validate(settings)
    identity = detect(os.environ) or ALONE
    cluster = config.cluster
    with process_group(identity, run, cluster.device, cluster.timeout_s, cluster.threads, cluster.silence_s) as world:
        layout = Layout.of(config.parallel, identity.world)
        mesh = build_mesh(
            layout, world.device, replica_groups(config.model, layout), world.group_timeout_s, world.meter
        )
        found = find(run, mesh.world)
        if found is None:
            raise CheckpointError(f"{run} holds no checkpoint: train first, or give another run folder.")
        check_model(config, found.path, found.extra, "leave it as it was: a checkpoint has one model")
        found.reader.expect(saved_shapes(config.model))
        corpus = found.extra["corpus"]
        tokenizer = tokenizer_of(corpus["tokenizer"], corpus["tokenizer_sha256"], _tokenizer_files(config, run))
        model, records = build_model(config, mesh)
        reader: StateReader = found.reader
        if config.model.adapter is not None:
            reader = TrainedAdapters(found.reader, open_base(config, mesh.world, found).reader, config)
        load_weights(model, records, reader)
        ids = tokenizer.encode(prompt.encode(errors="surrogateescape")).tolist() or [tokenizer.end_of_document]
        text = tokenizer.decode(sample(model.eval(), mesh, ids, sampling, stop=tokenizer.end_of_document))
        return text, found.step


def _tokenizer_files(config: RunConfig, run: Path) -> Iterator[bytes]:
    """Contents of what may be the tokenizer.json: that of the run folder, then those in its corpora."""
    for folder in (run, *run.parents[:2]):  # a checkpoint lies two folders down
        if (folder / TOKENIZER_FILE).is_file():
            yield (folder / TOKENIZER_FILE).read_bytes()
    for path in config.data.blend or (config.data.corpus,):
        with suppress(DataError):
            yield Corpus.open(path).tokenizer_json


def load_weights(model: Transformer, records: Records, reader: StateReader) -> None:
    """Fill a rank's parameters, and its routers' biases, from a checkpoint of any layout."""
    load_biases(give_biases(model, next(model.parameters()).device), reader)
    for name, p in model.named_parameters():
        for box in records[name].boxes:
            region(p.data, box).copy_(reader.read(name, WEIGHT, box.start, box.shape))
    load_packed([model], reader, next(model.parameters()).device)


@torch.no_grad()
def sample(model: Transformer, mesh: Mesh, ids: list[int], how: Sampling, stop: int) -> list[int]:
    """Continue a sequence of ids until `stop` or `how.tokens` more. Every rank draws the same.

    The whole context is run again for each token; it is cut to the last `max_seq` ids.
    """
    generator = torch.Generator().manual_seed(stream_key(how.seed, "generate"))
    for _ in range(how.tokens):
        context = torch.tensor([ids[-model.model.max_seq :]], device=mesh.device)
        logits = gather_vocabulary(model.logits(context)[0, -1].float(), mesh.tp, model.model.vocab).cpu()
        chosen = draw(logits, how, generator)
        if chosen == stop:
            break
        ids = [*ids, chosen]
    return ids


def draw(logits: Tensor, how: Sampling, generator: torch.Generator) -> int:
    """One id from logits [vocab]."""
    if how.temperature == 0:
        return int(logits.argmax())
    if how.top_k:
        kept = min(how.top_k, len(logits))
        logits = logits.masked_fill(logits < logits.topk(kept).values[-1], -torch.inf)
    return int(torch.multinomial((logits / how.temperature).softmax(0), 1, generator=generator))


def gather_vocabulary(logits: Tensor, tp: Axis, vocab: int) -> Tensor:
    """All logits [vocab] from each rank's part; parts may differ in length by one."""
    if tp.size == 1:
        return logits
    longest = split(vocab, tp.size, 0)[1]
    padded = torch.nn.functional.pad(logits, (0, longest - len(logits)))
    return torch.cat([part[: split(vocab, tp.size, i)[1]] for i, part in enumerate(all_gather(padded, tp))])
