"""Table, JSON of nccl-tests, CSV and HDF5: what is in them, and that it comes back."""

from __future__ import annotations

import io
import json
import os
from dataclasses import replace
from typing import Any

import pytest

from hpctrain.comms import nccltests, store, tidy
from hpctrain.comms.groups import Where
from hpctrain.comms.load import load
from hpctrain.comms.result import Result
from hpctrain.comms.table import lines, named
from hpctrain.errors import DataError
from tests.comms.made import result, row

MEASURES = {"time": float, "alg_bw": (float, str), "bus_bw": (float, str), "nwrong": (float, type(None))}
ITERATIONS = {
    **dict.fromkeys(("min_us", "max_us", "avg_us", "p50_us", "p95_us", "p99_us", "stdev_us", "cv_pct"), float),
    **dict.fromkeys(("times_us", "per_process_max_times_us"), list),
}
LINE = {
    **dict(size=int, count=int, type=str, redop=str, root=str, actual_iterations=int, experiment_name=str),
    **dict.fromkeys(("out_of_place", "in_place"), (MEASURES, type(None))),
}
DEVICE = dict(rank=int, group=int, pid=int, hostname=str, device=int, device_hex=str, device_info=str)
WHOLE = ("nthreads", "ngpus", "minimum_bytes", "maximum_bytes", "warmup_iters", "iterations", "aggregated_iterations")
CONFIG = {
    **dict.fromkeys((*WHOLE, "validation", "graph"), int),
    **dict.fromkeys(("blocking_collectives", "per_iter_timing", "parallel_init"), str),
    **dict(step_factor=(int, float), devices=[DEVICE]),
}
SCHEMA = dict(
    version=int,
    start_time=str,
    args=[str],
    env=[str],
    nccl_version=int,
    config=CONFIG,
    results=[LINE],
    out_of_bounds=dict(count=int, okay=str),
    average_bus_bandwidth=dict(bandwidth=(float, str), okay=str),
    errors=[str],
    end_time=str,
)
"""nccl-tests' JSON, version 3: names and types, from src/util.cu and common.cu."""


def conforms(value: Any, schema: Any, path: str = "") -> None:
    """Check names and types; more keys are allowed."""
    if isinstance(schema, dict):
        assert isinstance(value, dict), path
        for key, inner in schema.items():
            assert key in value, f"{path}.{key}"
            conforms(value[key], inner, f"{path}.{key}")
    elif isinstance(schema, list):
        assert isinstance(value, list), path
        for index, item in enumerate(value):
            conforms(item, schema[0], f"{path}[{index}]")
    elif isinstance(schema, tuple) and any(isinstance(option, dict) for option in schema):
        if value is not None:
            conforms(value, schema[0], path)
    else:
        assert isinstance(value, schema) and not isinstance(value, bool), f"{path}: {value!r}"


def sample() -> Result:
    return result(
        row(1024, 1e-4, operation="all_gather", placement="out_of_place", reduction="none"),
        row(1024, 2e-4, operation="all_gather", placement="in_place", reduction="none", jitter=0.5),
        row(4096, 1e-3, elements=3, wrong=1),
        row(0, 1e-5, operation="barrier", placement="out_of_place", reduction="none", checked=0),
        row(2048, 1e-4, ranks=1),
    )


def test_json_is_that_of_nccl_tests() -> None:
    plain = json.loads(json.dumps(nccltests.document(sample(), ["hpctrain", "bench"])))
    conforms(plain, SCHEMA)
    for line in plain["results"]:
        for placement in ("out_of_place", "in_place"):
            assert (line[placement] is None) == (f"{placement}_per_iter" not in line)
            if line[placement]:
                conforms(line[f"{placement}_per_iter"], ITERATIONS)
    gathers = plain["results"][0]
    assert gathers["out_of_place"]["time"] == pytest.approx(100.0)
    assert gathers["in_place"]["bus_bw"] == pytest.approx(1024 / 2e-4 / 1e9 * 0.75)
    assert gathers["in_place"]["alg_bw"] == pytest.approx(1024 / 2e-4 / 1e9)
    assert plain["out_of_bounds"] == {"count": 3, "okay": "false"}
    assert [line["in_place"] and line["in_place"]["bus_bw"] for line in plain["results"]][2:] == [None, "nan"]
    assert plain["env"] == ["NCCL_ALGO=Ring"] and plain["nccl_version"] == 22707
    assert plain["start_time"] == "2026-01-02 03:04:05"


def test_a_missing_field_is_seen() -> None:
    plain = nccltests.document(sample(), [])
    del plain["results"][1]["in_place"]["nwrong"]
    with pytest.raises(AssertionError, match=r"results\[1\].in_place.nwrong"):
        conforms(plain, SCHEMA)


def test_json_comes_back_whole() -> None:
    before = sample()
    after = nccltests.read(json.loads(json.dumps(nccltests.document(before, []))))
    assert (
        after.rows == before.rows
        and after.where == before.where
        and json.dumps(after.plain()) == json.dumps(before.plain())
    )


def test_json_that_nccl_tests_wrote_is_read() -> None:
    plain = json.loads(json.dumps(nccltests.document(sample(), ["./build/all_gather_perf", "-b", "1K"])))
    del plain["hpctrain"]
    found = nccltests.read(plain)
    assert [(r.operation, r.size, r.placement, len(r.ranks)) for r in found.rows[:2]] == [
        ("all_gather", 1024, "out_of_place", 4),
        ("all_gather", 1024, "in_place", 4),
    ]
    assert found.rows[1].seconds == pytest.approx(2e-4) and found.rows[1].dtype == "float32"
    assert (found.rows[2].elements, found.rows[2].wrong) == (3, 1)


def of_nccl_tests(**changes) -> dict[str, Any]:
    """As all_reduce_perf on 4 ranks writes it."""
    plain = json.loads(json.dumps(nccltests.document(result(row(1024), row(4096)), ["./build/all_reduce_perf"])))
    del plain["hpctrain"]
    return plain | changes


def test_split_ranks_are_counted_by_their_group() -> None:
    """NCCL_TESTS_SPLIT makes communicators of some ranks each, by the `group` of a device."""
    plain = of_nccl_tests()
    for device in plain["config"]["devices"]:
        device["group"] = device["rank"] % 2
    found = nccltests.read(plain)
    assert {(r.ranks, r.groups, len(r.times)) for r in found.rows} == {((0, 2), "split", 2)}
    assert found.rows[0].busbw == pytest.approx(found.rows[0].algbw), "2 (n - 1) / n of 2, not of 4"
    assert nccltests.read(of_nccl_tests()).rows[0].ranks == (0, 1, 2, 3)


def test_who_the_ranks_were_is_known() -> None:
    found = nccltests.read(of_nccl_tests())
    assert [(at.host, at.local_rank) for at in found.where] == [("n0", 0), ("n0", 1), ("n1", 0), ("n1", 1)]
    assert found.library == "nccl-tests, NCCL 2.27.7"


@pytest.mark.parametrize(
    ("plain", "said"),
    [
        (of_nccl_tests(args=["./hypercube_perf"]), "ValueError: 'hypercube' is none of all_reduce, all_gather"),
        (of_nccl_tests(config={}), "KeyError: 'devices'"),
    ],
)
def test_what_cannot_be_understood_is_refused(plain: dict[str, Any], said: str, tmp_path) -> None:
    (tmp_path / "x.json").write_text(json.dumps(plain))
    with pytest.raises(DataError, match="is no result") as caught:
        load(str(tmp_path / "x.json"))
    assert said in str(caught.value)


def test_a_rank_that_is_idle_counts_in_no_mean() -> None:
    """The last of an odd number has no partner: its empty iterations are no times of a message."""
    times = ((2.0,), (4.0,), (0.0,))
    pairs = replace(row(ranks=3, operation="ping_pong"), times=times)
    assert (pairs.seconds, pairs.spread.p50) == (3.0, 4.0)
    assert replace(pairs, average="min").seconds == 2.0
    assert replace(pairs, operation="all_reduce").seconds == 2.0
    assert replace(pairs, times=times[:2], ranks=(0, 1)).seconds == 3.0
    assert replace(pairs, times=((0.1,),), ranks=(0,)).seconds == 0.1


def test_the_table_has_the_columns_of_nccl_tests() -> None:
    text = list(lines(sample()))
    header = next(line for line in text if "busbw" in line)
    assert header.split()[:8] == ["#", "size", "count", "type", "redop", "root", "time", "algbw"]
    (gather,) = [line.split() for line in text if line.split()[:1] == ["1024"]]
    assert gather == [
        *("1024", "256", "float", "none", "-1"),
        *("100.00", "0.010", "0.008", "100.00", "100.00", "100.00", "0"),
        *("200.00", "0.005", "0.004", "205.26", "289.47", "300.00", "0"),
    ]
    (one,) = [line.split() for line in text if line.split()[:1] == ["2048"]]
    assert one[5:12] == ["n/a"] * 7 and one[14] == "n/a", "one rank has no bus"
    assert "# Out of bounds values : 3 FAILED" in text
    assert "#   all_reduce 4096 B in_place: 1 of 2 results wrong" in text
    assert all(len(line) < 220 for line in text)


def test_lines_of_equal_size_are_all_shown() -> None:
    """1000 and 1001 bytes are 250 floats; and of parts several sizes come to the same."""
    twice = [
        *(row(1000, 1e-4, placement=placed, operation="all_gather") for placed in ("out_of_place", "in_place")),
        *(row(1000, 3e-4, placement=placed, operation="all_gather") for placed in ("out_of_place", "in_place")),
    ]
    shown = [line.split() for line in lines(result(*twice)) if line.split()[:1] == ["1000"]]
    assert [(line[5], line[12]) for line in shown] == [("100.00", "100.00"), ("300.00", "300.00")]
    plain = nccltests.document(result(*twice), [])["results"]
    assert [(line["out_of_place"]["time"], line["in_place"]["time"]) for line in plain] == [
        (pytest.approx(100.0), pytest.approx(100.0)),
        (pytest.approx(300.0), pytest.approx(300.0)),
    ]


def test_of_many_groups_the_slowest_middle_and_fastest_are_shown() -> None:
    rows = [row(1024, 1e-4 * (1 + i)) for i in range(9)]
    rows = [type(r)(**{**vars(r), "ranks": (2 * i, 2 * i + 1)}) for i, r in enumerate(rows)]
    shown = [line.split()[-1] for line in lines(result(*rows)) if line.split()[:1] == ["1024"]]
    assert shown == ["16,17", "8,9", "0,1"]
    assert [named(r) for r in ((0, 1, 2), (0, 2), tuple(range(0, 40, 4)))] == ["0-2", "0,2", "0,4,...,36"]


def test_csv_is_tidy() -> None:
    out = io.StringIO()
    tidy.write(sample(), out)
    names, *rows = [line.split(",") for line in out.getvalue().splitlines()]
    assert names == [*tidy.VARIED, *tidy.MEASURED] and len(rows) == 5
    first = dict(zip(names, rows[1]))
    assert (first["placement"], first["n"], first["size_bytes"], first["iterations"]) == ("in_place", "4", "1024", "20")
    assert float(first["p95_us"]) == pytest.approx(289.47, abs=0.01)
    found = [float(first[name]) for name in ("time_us", "algbw_GB/s", "busbw_GB/s")]
    assert found == pytest.approx([200.0, 0.00512, 0.00384])
    assert dict(zip(names, rows[3]))["busbw_GB/s"] == ""
    varied = [tuple(row[: len(tidy.VARIED)]) for row in rows]
    assert len(set(varied)) == len(varied)


def test_the_store_keeps_every_iteration_of_every_rank(tmp_path) -> None:
    path, before = tmp_path / "bench.h5", sample()
    assert store.append(path, before) == "2026-01-02T030405-0"
    later = result(row(8), start="2026-01-03T00:00:00+00:00")
    assert store.append(path, later) == "2026-01-03T000000-0"
    assert store.append(path, before) == "2026-01-02T030405-1"
    assert store.read(path).rows == later.rows
    back = store.read(path, "2026-01-02T030405-0")
    assert back.rows == before.rows
    assert back.plain() == json.loads(json.dumps(before.plain())) | {
        "rows": back.plain()["rows"],
        "where": back.plain()["where"],
    }
    with pytest.raises(DataError, match="no measurement 'x'"):
        store.read(path, "x")


def test_the_store_takes_thousands_of_ranks(tmp_path) -> None:
    """What an attribute of HDF5 cannot hold, 64 KiB: places of 1,000 ranks, ranks of a group of 10,000, a matrix."""
    where = tuple(Where(f"node-with-a-long-name-{rank:05d}", 0, rank, "NVIDIA H100 80GB HBM3") for rank in range(10000))
    made = replace(result(row(1024, ranks=10000, iterations=1)), where=where, extra={"matrix": [[0.5] * 200] * 200})
    made = replace(made, spec={**made.spec, "weights": "1 " * 100000})
    store.append(tmp_path / "s.h5", made)
    back = store.read(tmp_path / "s.h5")
    assert (back.rows, back.where, back.extra) == (made.rows, made.where, made.extra)
    assert back.spec == json.loads(json.dumps(made.spec))
    assert store.read(tmp_path / "s.h5", rows=False) == replace(back, rows=())


def test_a_store_changes_as_a_whole_or_not_at_all(tmp_path, monkeypatch) -> None:
    path = tmp_path / "s.h5"
    store.append(path, sample())
    before = path.read_bytes()

    def torn(file, *rest) -> str:
        file.create_group("torn")
        file.flush()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(store, "_add", torn)
        with pytest.raises(KeyboardInterrupt):
            store.append(path, sample())
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir() if p.suffix != ".lock"] == ["s.h5"]
    path.write_bytes(before[: len(before) // 2])
    with pytest.raises(DataError, match="cannot be added to"):
        store.append(path, sample())
    assert path.read_bytes() == before[: len(before) // 2]


def test_several_add_to_a_store_at_once(tmp_path) -> None:
    path, children = tmp_path / "s.h5", []
    for number in range(6):
        pid = os.fork()
        if not pid:
            status = 1
            try:
                store.append(path, result(row(8), start=f"2026-01-0{number + 1}T00:00:00+00:00"))
                status = 0
            finally:
                os._exit(status)
        children.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * 6
    assert store.names(path) == [f"2026-01-0{number + 1}T000000-0" for number in range(6)]


def test_other_files_are_no_store(tmp_path) -> None:
    import h5py

    (tmp_path / "text").write_text("no")
    for act in (lambda: store.append(tmp_path / "text", sample()), lambda: store.read(tmp_path / "text")):
        with pytest.raises(DataError, match="HDF5"):
            act()
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["x"] = 1
    for act in (lambda: store.append(tmp_path / "other.h5", sample()), lambda: store.read(tmp_path / "other.h5")):
        with pytest.raises(DataError, match="no store of hpctrain bench"):
            act()
