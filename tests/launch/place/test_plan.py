"""Where ranks go."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hpctrain.config.schema import RunConfig
from hpctrain.launch.place.plan import rank_plan, summary
from hpctrain.layout.layout import Layout


def config(nodes: int, per_node: int, **parallel: int) -> RunConfig:
    cluster = {"nodes": nodes, "gpus_per_node": per_node}
    return RunConfig.model_validate({"cluster": cluster, "parallel": parallel})


def test_by_hand() -> None:
    places = rank_plan(config(2, 4, tp=2, pp=2))
    rows = [(p.rank, p.node, p.local_rank, p.pp, p.dp, p.tp) for p in places]
    assert rows == [
        (0, 0, 0, 0, 0, 0),
        (1, 0, 1, 0, 0, 1),
        (2, 0, 2, 0, 1, 0),
        (3, 0, 3, 0, 1, 1),
        (4, 1, 0, 1, 0, 0),
        (5, 1, 1, 1, 0, 1),
        (6, 1, 2, 1, 1, 0),
        (7, 1, 3, 1, 1, 1),
    ]


@given(st.integers(1, 5), st.integers(1, 8), st.sampled_from((1, 2, 4)))
def test_every_rank_has_one_place(nodes: int, per_node: int, tp: int) -> None:
    if nodes * per_node % tp:
        return
    places = rank_plan(config(nodes, per_node, tp=tp))
    assert [p.rank for p in places] == list(range(nodes * per_node))
    assert len({(p.node, p.local_rank) for p in places}) == len(places)
    layout = Layout(dp=nodes * per_node // tp, tp=tp)
    assert all(layout.rank(pp=p.pp, dp=p.dp, cp=p.cp, tp=p.tp) == p.rank for p in places)
    assert [row["node"] for row in summary(places)] == [str(node) for node in range(nodes)]


def test_summary() -> None:
    first, *_, last = summary(rank_plan(config(16, 8, tp=2, cp=2)))
    assert first == {"node": "0", "ranks": "0-7", "pp": "0", "dp": "0-1", "cp": "0-1", "tp": "0-1"}
    assert last == {"node": "15", "ranks": "120-127", "pp": "0", "dp": "30-31", "cp": "0-1", "tp": "0-1"}
    places = rank_plan(config(2, 3, tp=1))
    assert summary(places[::2])[0]["ranks"] == "0,2"
