"""Bytes that a rank sends to others in one training step, by axis. Plain arithmetic, held against what is counted."""

from __future__ import annotations

import math

from hpctrain.config.schema import RunConfig
from hpctrain.layout.layout import Layout
from hpctrain.layout.memory import COMPUTE_BYTES
from hpctrain.layout.placement import tied_copy
from hpctrain.layout.stages import stages, stages_of


def pipeline_bytes(config: RunConfig, layout: Layout, rank: int) -> int:
    """Sent over pp: hidden states to the stage after, their gradients to the stage before, where that is another rank.

    With m micro-batches of b samples of s tokens, each of n such boundaries costs m b s hidden elements in the
    precision of the computation, divided by tp where the sequence is sharded over it. A tied embedding adds its
    weight once on the first stage, and as much for its gradient on the last.
    """
    homes = {stage.index: stage.home for stage in stages(config.model, layout)}
    mine = stages_of(config.model, layout, rank)
    neighbours = [homes[i] for stage in mine for i in (stage.index - 1, stage.index + 1) if i in homes]
    boundaries = sum(home != mine[0].home for home in neighbours)
    tokens = config.train.global_batch // layout.dp * config.data.seq // (layout.tp if config.parallel.sp else 1)
    sent = boundaries * tokens * config.model.hidden
    copy, ends = tied_copy(config.model, layout, rank), (homes[0], homes[len(homes) - 1])
    if copy is not None and ends[0] != ends[1] and mine[0].home in ends:
        sent += math.prod(copy.local_shape)
    return sent * COMPUTE_BYTES[config.train.precision]
