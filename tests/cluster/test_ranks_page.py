"""The table of `docs/ranks.md`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hpctrain.cluster.fabrics import rail_optimized
from hpctrain.cluster.ranktable import rank_table
from hpctrain.config.load import load
from hpctrain.layout.layout import Layout

PAGE = (Path(__file__).parents[2] / "docs/ranks.md").read_text()
ROWS = [tuple(map(int, row)) for row in re.findall(r"^\| (\d) " + r"\| (\d+) " * 5 + r"\|$", PAGE, re.MULTILINE)]


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_bytes_on_the_page(row: tuple[int, ...]) -> None:
    assert len(ROWS) == 3
    parallel = [f"parallel.tp={row[0]}", "parallel.pp=4", "sharding.stage=1"]
    config = load("llama-70b", [*parallel, "cluster.nodes=64", "cluster.gpus_per_node=8", "train.global_batch=1024"])
    hosts = [f"n{i:02d}" for i in range(64)]
    layout = Layout.of(config.parallel, 512)
    table = rank_table(layout, hosts, None, rail_optimized(hosts, 8, 32), per_node=8, config=config)
    got = [table.bytes.over(link) for link in ("nvlink", "leaf", "spine", "cross_rail")]
    got.append(table.slurm["by name"].over("cross_rail"))
    assert tuple(round(n / 1e9) for n in got) == row[1:]
    assert table.bytes.over("core") == 0
