"""Every layout and every peer runs, on a model too small to say anything about speed."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from benchmarks import layouts
from benchmarks.rounds import Contender, Record, Work, race, warm_up
from hpctrain.launch.local.zygote import Zygote

TINY = ("model.hidden=16", "model.heads=4", "model.kv_heads=2", "model.ffn=24", "model.vocab=512",
        "model.max_seq=16", "data.seq=8", "train.global_batch=4", "train.micro_batch=2")  # fmt: skip

LAYERS = {"tensor": 1, "pipeline": 4, "data": 1, "experts": 1, "context": 1}
"""Those that a family needs."""


def one_round(family: str) -> dict[str, Any]:
    """One round, in a process that has imported what all ranks need, as `python -m benchmarks.layouts` has."""
    warm_up(layouts.IMPORTS)
    return layouts.measure([family], [*TINY, f"model.layers={LAYERS[family]}"], 1)


@pytest.mark.parametrize("family", layouts.LAYOUTS)
def test_all_run(zygote: Zygote, family: str) -> None:
    result = json.loads(json.dumps(zygote.run(one_round, 0, family)[0]))
    ran, ours = set(result["families"][family]), layouts.LAYOUTS[family]
    peers = {name for name, (_, _, beside) in layouts.PEERS.items() if set(beside) & ours.keys()}
    absent = {name for name in peers if name.startswith("megatron")}
    whole = {layouts.WHOLE[family]} if family in layouts.WHOLE else set()
    assert ran == {layouts.LIMIT, layouts.PLAIN, *whole, *ours, *peers} - absent
    assert result["cannot_run"].keys() == absent
    pairs = sum(name in beside for name in ours for _, _, beside in layouts.PEERS.values())
    of_memory = [row for row in result["rows"] if "peak of a rank" in row[0]]
    assert len(of_memory) == (pairs if family == "data" else 0)
    assert len(result["rows"]) == 1 + len(ours) * (1 + len(whole)) + pairs + len(of_memory)
    for what, measured, beside, ratio in result["rows"]:
        unit = "MiB" if "peak of a rank" in what else "tokens/s"
        assert re.fullmatch(rf"[1-9][\d,]* {unit}", measured)
        if "cannot run" in beside:
            assert beside.endswith("(--megatron PYTHON)") and ratio == "-"
        else:
            assert re.fullmatch(rf".+: [1-9][\d,]* {unit}", beside) and re.fullmatch(r"\d+\.\d\d", ratio)


def test_other_work_is_refused() -> None:
    config = layouts.config_of(TINY, 1)
    size = sum(s.numel for s in layouts.parameter_specs(config.model))
    layouts.same_work(
        {"a": Record(parameters=size, loss=6.2), layouts.LIMIT: Record(parameters=2 * size, loss=6.2)}, config
    )
    layouts.same_work({"a": Record(error="gone")}, config)
    for wrong in (Record(parameters=size - 1, loss=6.2), Record(parameters=size, loss=7.0)):
        with pytest.raises(AssertionError, match=r"^a "):
            layouts.same_work({"a": wrong}, config)


def count_up(fails_at: int | None = None) -> Work:
    """Loss n at the n-th step."""
    import torch.distributed as dist

    steps = [0]

    def step() -> float | None:
        steps[0] += 1
        if steps[0] == fails_at and dist.get_rank() == 1:
            raise ValueError("the second rank had enough")
        return float(steps[0])

    return Work(step, 3.0)


def test_one_that_fails_is_out_and_the_rest_go_on(zygote: Zygote) -> None:
    contenders = [
        Contender("well", count_up, (), world=2),
        Contender("ill", count_up, (4,), world=2),
        Contender("pair", count_up, (), world=0, copies=2),
    ]
    records: dict[str, Any] = zygote.run(race, 0, contenders, 3, 2)[0]
    assert {name: r.error for name, r in records.items()} == {
        "well": None,
        "ill": "ValueError: the second rank had enough",
        "pair": None,
    }
    assert {name: len(r.seconds) for name, r in records.items()} == {"well": 3, "ill": 0, "pair": 3}
    assert [(records[name].parameters, records[name].loss) for name in ("well", "pair")] == [(6.0, 1.0)] * 2
