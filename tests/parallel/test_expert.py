"""Expert parallelism equals one plain process to 1e-9: every loss, gradient, norm, weight and bias, whatever the
layout, however uneven the load."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest

from hpctrain.config.schema import RunConfig
from hpctrain.config.validate import validate
from tests.training import Trace, assemble, compare, make_config, reference, run

ROUTERS = dict(experts=8, top_k=2, ffn=12, aux_loss=0.03, z_loss=0.002)
MODELS: dict[str, dict[str, Any]] = {
    "softmax": dict(moe=dict(**ROUTERS)),
    "deepseek": dict(
        moe=dict(**ROUTERS, router="sigmoid", groups=4, top_groups=2, shared_ffn=16, bias_rate=0.02, dense_layers=1)
    ),
    "uneven": dict(init_std=0.5, moe=dict(**{**ROUTERS, "top_k": 1}, normalize=False)),
    "drop": dict(init_std=0.1, moe=dict(**ROUTERS, capacity=1.0, bias_rate=0.02)),
    "pad": dict(init_std=0.1, moe=dict(**ROUTERS, capacity=1.0, overflow="pad", shared_ffn=8)),
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ep2": (2, dict(ep=2)),
    "ep4": (4, dict(ep=4)),
    "ep8": (8, dict(ep=8)),
    "ep2-edp2": (4, dict(ep=2)),
    "tp2-ep1": (2, dict(tp=2)),
    "tp2-ep2": (2, dict(tp=2, ep=2)),
    "tp2-ep4": (4, dict(tp=2, ep=4)),
    "tp2-ep2-dp2": (4, dict(tp=2, ep=2)),
    "tp4-ep2": (4, dict(tp=4, ep=2)),
    "tp2-etp2": (2, dict(tp=2, etp=2)),
    "tp2-etp2-ep2": (4, dict(tp=2, etp=2, ep=2)),
    "sp2-ep1": (2, dict(tp=2, sp=True)),
    "sp2-ep2": (2, dict(tp=2, sp=True, ep=2)),
    "sp2-ep4": (4, dict(tp=2, sp=True, ep=4)),
    "sp4-ep2": (4, dict(tp=4, sp=True, ep=2)),
    "sp2-etp2-ep2": (4, dict(tp=2, sp=True, etp=2, ep=2)),
    "pp2-ep2": (4, dict(pp=2, ep=2)),
    "pp2-tp2-ep4": (8, dict(pp=2, tp=2, ep=4)),
    "pp2-sp2-etp2-ep2": (8, dict(pp=2, tp=2, sp=True, etp=2, ep=2, schedule="interleaved", chunks=2)),
    "cp2-ep2": (2, dict(cp=2, ep=2)),
    "cp4-ep2": (4, dict(cp=4, ep=2, cp_method="ulysses")),
    "cp2-sp2-ep4": (4, dict(cp=2, tp=2, sp=True, ep=4)),
    "cp2-tp2-etp2-ep2": (4, dict(cp=2, tp=2, etp=2, ep=2)),
    "pp2-cp2-ep2": (4, dict(pp=2, cp=2, ep=2)),
    "zb-h1-ep2": (4, dict(pp=2, ep=2, schedule="zb-h1")),
    "cp8-ep8": (8, dict(cp=8, ep=8)),
    "every axis": (16, dict(pp=2, cp=2, tp=2, sp=True, ep=4, schedule="zb-h1")),
    "every axis and etp": (8, dict(pp=2, cp=2, tp=2, sp=True, ep=2, etp=2, schedule="interleaved", chunks=2)),
}


def config_of(model: str, layout: str = "ep2", **sections: Any) -> RunConfig:
    """Of a layout, with two micro-batches a rank where it has more than one of the eight samples; the reference does
    not look at either."""
    world, parallel = LAYOUTS[layout]
    shape = dict(layers=4, **MODELS[model])
    samples = 8 * math.prod(parallel.get(axis, 1) for axis in ("pp", "cp", "tp")) // world
    train = dict(micro_batch=max(1, samples // 2)) | sections.pop("train", {})
    config = make_config(model=shape, parallel=parallel, data=dict(seq=16), train=train, **sections)
    validate(config, world)
    return config


@functools.cache
def expected(model: str) -> Trace:
    return reference(config_of(model))


def check(ranks: Any, model: str, layout: str, **sections: Any) -> None:
    config, world = config_of(model, layout, **sections), LAYOUTS[layout][0]
    got = assemble(config, ranks(world, run, config, world))
    assert got.gradients.keys() == expected(model).gradients.keys()
    compare(got, expected(model), 1e-9)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_one_process(ranks: Any, layout: str) -> None:
    """Traps D13 (losses of routers over parts of samples), D14 and D26 (experts' gradients and norm over groups of
    their own)."""
    check(ranks, "deepseek", layout)


@pytest.mark.parametrize("layout", ["ep2-edp2", "tp2-ep4", "sp2-etp2-ep2"])
def test_softmax(ranks: Any, layout: str) -> None:
    """Of many micro-batches."""
    check(ranks, "softmax", layout, train=dict(micro_batch=1))


@pytest.mark.parametrize("layout", ["ep4", "tp2-ep4", "sp2-etp2-ep2", "cp2-sp2-ep4"])
@pytest.mark.parametrize("model", ["uneven", "drop", "pad"])
def test_uneven_loads(ranks: Any, model: str, layout: str) -> None:
    check(ranks, model, layout)


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recomputation(ranks: Any, recompute: str) -> None:
    check(ranks, "deepseek", "sp2-ep4", train=dict(recompute=recompute, micro_batch=2))
