"""Fits: lines that made the points are found, published sweeps are predicted, profiles keep what they had."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from hpctrain.cli import main
from hpctrain.comms.fit import Fit, Line, best_lines, fits, line_through, predict, sent
from hpctrain.comms.load import published
from hpctrain.comms.nccltests import document
from hpctrain.comms.nccltests import read as read_json
from hpctrain.comms.profile import collectives, read, update
from hpctrain.errors import DataError
from hpctrain.layout.traffic import wire
from hpctrain.plan.constants import constants
from hpctrain.plan.constants import profile as profile_of_plan
from hpctrain.plan.hardware import hardware
from hpctrain.plan.links import Group, Machine
from tests.comms.made import result, row

SIZES = [1 << power for power in range(10, 27)]
HERE = ["n0"] * 4
TWO = ["n0"] * 4 + ["n1"] * 4
"""Hosts of ranks."""


def points(*lines: Line) -> list[tuple[float, float]]:
    return [(size, predict(lines, size)) for size in SIZES]


def test_one_line_is_found_exactly() -> None:
    (found,) = best_lines(points(Line(20e-6, 10e9)))
    assert (found.latency, found.rate) == (pytest.approx(20e-6), pytest.approx(10e9))


def test_two_protocols_are_two_lines() -> None:
    made = Line(10e-6, 1e9), Line(100e-6, 20e9)
    found = best_lines(points(*made))
    assert len(found) == 2
    for a, b in zip(found, made):
        assert (a.latency, a.rate) == (pytest.approx(b.latency, rel=0.01), pytest.approx(b.rate, rel=0.01))


def test_noise_earns_no_line() -> None:
    noisy = [(size, seconds * (1.004 if i % 2 else 0.996)) for i, (size, seconds) in enumerate(points(Line(1e-5, 1e9)))]
    assert len(best_lines(noisy)) == 1


def test_latency_and_rate_are_never_negative() -> None:
    assert line_through([(1000, 1e-6), (2000, 3e-6), (3000, 6e-6)]).latency == 0.0
    flat = line_through([(1000, 3e-6), (2000, 2e-6), (4000, 1e-6)])
    assert flat.latency > 0 and flat.rate > 9e14


@pytest.mark.parametrize("operation", ["all_reduce", "reduce_scatter", "all_to_all"])
def test_bytes_are_those_that_leave_a_rank(operation: str) -> None:
    """By nccl-tests' factor as by the planner's formula, which counts an input."""
    for ranks in (2, 4, 8):
        assert sent(row(8192, operation=operation, ranks=ranks)) == wire(operation, 8192, ranks)
    assert sent(row(8192, operation="all_gather")) == wire("all_gather", 8192 // 4, 4)
    assert sent(row(8192, operation="ping_pong")) == wire("send", 8192, 2)


def test_held_out_sizes_are_predicted() -> None:
    made = [row(size, 30e-6 + size * 1.5 / 5e9) for size in SIZES]
    (found,) = fits(made, ["n0", "n0", "n1", "n1"])
    assert (found.hosts, found.ranks, len(found.held)) == (2, 4, 5)
    assert not set(found.held) & set(found.points)
    assert found.median_error == pytest.approx(0, abs=1e-6)
    assert found.lines[-1].rate == pytest.approx(5e9, rel=1e-3)


def sweep(operation: str = "ping_pong", ranks: tuple[int, ...] = tuple(range(8)), slow: float = 1.0, **kept) -> list:
    rows = [row(size, (1e-5 + size / 1e9) * slow, operation=operation, **kept) for size in SIZES[:6]]
    return [replace(r, ranks=ranks, times=r.times[:1] * len(ranks)) for r in rows]


@pytest.mark.parametrize(
    ("operation", "ranks", "found"),
    [
        ("ping_pong", tuple(range(8)), (2, 1)),  # 0-1, 2-3, 4-5, 6-7
        ("bidirectional", tuple(range(8)), (2, 1)),
        ("ping_pong", (0, 4), (2, 2)),
        ("ping_pong", (0, 1, 2, 4), (2, 2)),  # 2-4 crosses
        ("ping_pong", (0, 1, 4), (2, 1)),  # 4 is idle
        ("sendrecv", tuple(range(8)), (8, 2)),
        ("all_reduce", tuple(range(8)), (8, 2)),
        ("all_reduce", (0, 1, 2, 3), (4, 1)),
    ],
)
def test_a_pair_inside_a_node_does_not_cross_hosts(operation: str, ranks: tuple[int, ...], found) -> None:
    """The planner prices a send between stages by it: inside a node or between nodes."""
    (made,) = fits(sweep(operation, ranks), TWO)
    assert (made.ranks, made.hosts) == found
    if operation == "ping_pong":
        (entry,) = collectives([made])
        assert (entry["operation"], entry["devices"], entry["hosts"]) == ("send", *found)


def test_of_groups_at_once_that_differ_the_widest_counts() -> None:
    rows = sweep("all_reduce", (0, 1, 2)) + sweep("all_reduce", (3, 4, 5), slow=2.0)
    (made,) = fits(rows, TWO)
    assert (made.ranks, made.hosts) == (3, 2) and made.points[0][1] == rows[6].seconds


def of_published(name: str) -> list[Fit]:
    found = published(name)
    return fits(found.rows, [at.host for at in found.where])


def test_published_and_foreign_results_know_their_hosts() -> None:
    assert [(f.ranks, f.hosts) for f in of_published("b200-4-nodes")] == [(32, 4)]
    assert [(f.ranks, f.hosts) for f in of_published("h200")] == [(8, 1)]
    plain = document(result(*(row(size) for size in SIZES[:4])), ["all_reduce_perf"])
    del plain["hpctrain"]
    found = read_json(plain)
    assert [(f.ranks, f.hosts) for f in fits(found.rows, [at.host for at in found.where])] == [(4, 2)]


def test_a_profile_has_the_backends_own_algorithm_alone() -> None:
    ring, own = sweep("all_reduce", (0, 1, 2, 3), slow=5.0, algorithm="ring"), sweep("all_reduce", (0, 1, 2, 3))
    made = fits(ring + own, TWO)
    assert [f.algorithm for f in made] == ["ring", ""]
    (entry,) = collectives(made)
    assert entry["lines"] == collectives(fits(own, TWO))[0]["lines"]
    assert collectives(fits(ring, TWO)) == []


def test_of_groups_of_equal_size_and_spread_the_slower_is_in_a_profile() -> None:
    kinds = sweep("all_reduce", (0, 1), groups="tp"), sweep("all_reduce", (2, 3), groups="dp", slow=2.0)
    for rows in (kinds[0] + kinds[1], kinds[1] + kinds[0]):
        (entry,) = collectives(fits(rows, HERE))
        assert entry["lines"][0]["latency"] == pytest.approx(2e-5)


def test_a_profile_is_of_one_backend(tmp_path) -> None:
    gloo, mpi = (collectives(fits(sweep("all_reduce", backend=name), TWO)) for name in ("gloo", "mpi"))
    with pytest.raises(DataError, match="over gloo and mpi are in no profile together"):
        collectives(fits(sweep("all_reduce", backend="gloo") + sweep("all_reduce", backend="mpi"), TWO))
    update(tmp_path / "p.yaml", "here", gloo)
    with pytest.raises(DataError, match="over gloo and mpi are in no profile together"):
        update(tmp_path / "p.yaml", "here", mpi)
    assert read(tmp_path / "p.yaml")["collectives"] == gloo


def test_a_profile_is_of_one_choice_of_algorithms(tmp_path) -> None:
    for name in ("Ring", "Tree"):
        (tmp_path / name).mkdir()
        variables = {"variables": {"NCCL_ALGO": name, "OMP_NUM_THREADS": name}}
        replace(result(*(row(size) for size in SIZES[:4])), environment=variables).write(tmp_path / name)
    both = ["bench", "fit", str(tmp_path / "Ring"), str(tmp_path / "Tree")]
    assert CliRunner().invoke(main, both).exit_code == 0
    done = CliRunner().invoke(main, [*both, "--profile", str(tmp_path / "p")])
    assert done.exit_code == 2 and not (tmp_path / "p").exists()
    assert '{"NCCL_ALGO": "Ring"} and {"NCCL_ALGO": "Tree"}\': were measured with different algorithms' in done.stderr


def test_the_planner_prices_by_a_profile(tmp_path) -> None:
    """What `bench fit` writes, `hpctrain plan` reads: its seconds are those that were measured."""
    path = tmp_path / "p.yaml"
    update(path, "dgx-h100", collectives(fits(sweep("all_reduce"), ["n0"] * 8)), matmul={"bf16": 5e14})
    machine = Machine(hardware("dgx-h100"), constants(), profile_of_plan(path))
    assert machine.profile is not None and machine.profile.matmul == {"bf16": 5e14}
    seconds = float(machine.collective("all_reduce", 8e9, Group(8, 8, 8)))
    assert seconds == pytest.approx(1e-5 + 8e9 / 1e9, rel=1e-3)


def test_a_wrong_prediction_has_an_error() -> None:
    made = [row(size, (30e-6 + size * 1.5 / 5e9) * (2 if size == SIZES[4] else 1)) for size in SIZES]
    (found,) = fits(made, HERE)
    assert min(found.errors(found.held)) == pytest.approx(-0.5, abs=0.02)


@pytest.mark.parametrize("name", ["a100", "h200", "b200"])
def test_published_sweeps_are_predicted_within_a_tenth(name: str) -> None:
    (found,) = of_published(name)
    assert len(found.held) == 6 and found.median_error is not None and found.median_error < 0.1
    assert found.lines[-1].rate / 1e9 == pytest.approx(max(r.busbw or 0 for r in published(name).rows), rel=0.1)


def wavering(seconds: list[float]) -> list:
    return [row(size, s) for size, s in zip(SIZES, seconds)]


@pytest.mark.parametrize(
    "seconds",
    [
        [2e-5, 2.02e-5, 1.99e-5, 2.01e-5, 2e-5, 1.98e-5],  # bytes cost nothing yet
        [2e-5, 3e-5, 1.5e-5, 2.5e-5, 2e-5, 2.6e-5],  # or so they say, among noise
        [2e-5, 1.9e-5, 1.8e-5, 1.7e-5, 1.6e-5, 1.5e-5],
    ],
)
def test_where_times_do_not_grow_no_rate_is_known(seconds: list[float], tmp_path) -> None:
    made = fits(wavering(seconds), HERE, hold=0)
    assert [f.rated for f in made] == [False] and collectives(made) == []
    result(*wavering(seconds)).write(tmp_path)
    what = ["bench", "fit", str(tmp_path), "--hold", "0"]
    done = CliRunner().invoke(main, what)
    assert done.exit_code == 0 and "n/a" in done.stdout, done.output
    assert "all_reduce over world of 4: times do not grow with bytes by more than they differ anyway" in done.stdout
    (plain,) = json.loads(CliRunner().invoke(main, [*what, "--json"]).stdout, parse_constant=lambda name: 1 / 0)
    assert {line["rate"] for line in plain["lines"]} == {None}
    done = CliRunner().invoke(main, [*what, "--profile", str(tmp_path / "p")])
    assert done.exit_code == 2 and "so no rate is known; measure larger sizes" in done.stderr
    assert not (tmp_path / "p").exists()


def test_a_rate_amid_some_noise_is_known() -> None:
    noisy = [r * (1.1 if i % 2 else 0.9) for i, r in enumerate(2e-5 + size / 1e9 for size in SIZES)]
    (made,) = fits(wavering(noisy), HERE, hold=0)
    assert made.rated and made.noise == pytest.approx(0.1, rel=0.3)
    assert made.lines[-1].rate == pytest.approx(1.5e9, rel=0.15)


def test_noise_is_what_is_left_over_of_a_fit() -> None:
    (made,) = fits(wavering([2e-5, 3e-5, 4e-5, 9e-5]), HERE, hold=0)
    left = made.errors(made.points)
    free = len(left) - 2 * len(made.lines)
    assert free == 2 and made.noise == pytest.approx((sum(e * e for e in left) / free) ** 0.5)


def test_one_line_that_fits_badly_tells_a_rate_all_the_same() -> None:
    (made,) = fits(wavering([1e-4, 1.5e-4, 9e-4, 1e-2]), HERE, hold=0)
    assert made.rated and made.noise > 0.25


def test_holding_out_every_size_is_refused() -> None:
    done = CliRunner().invoke(main, ["bench", "fit", "published:h200", "--hold", "1"])
    assert done.exit_code == 2
    assert done.stderr == "error: --hold=1: would hold out every size, and leave none to fit; use 2 or more, or 0.\n"
    two = json.loads(CliRunner().invoke(main, ["bench", "fit", "published:h200", "--hold", "2", "--json"]).stdout)
    assert (len(two[0]["held"]), len(two[0]["points"])) == (9, 11)


def test_few_sizes_are_no_fit() -> None:
    assert fits([row(1024), row(2048)], HERE) == []
    (found,) = fits([row(1024), row(2048), row(4096)], HERE)
    assert found.held == () and found.median_error is None


def test_a_profile_is_what_the_planner_reads(tmp_path) -> None:
    path = tmp_path / "p.yaml"
    made = collectives(fits([row(size, 1e-5 + size / 1e9) for size in SIZES], HERE))
    assert made == [
        dict(operation="all_reduce", backend="gloo", devices=4, hosts=1, lines=[dict(latency=1e-5, rate=1.5e9)])
    ]
    update(path, "here", made, matmul={"bf16": 7.123456e14})
    later = [{**made[0], "lines": [{"latency": 2e-5, "rate": 1.5e9}]}, {**made[0], "operation": "send", "devices": 2}]
    update(path, "here", later, memory_bandwidth=3e12)
    found = read(path)
    assert list(found) == ["cluster", "matmul", "memory_bandwidth", "collectives"]
    assert found["matmul"] == {"bf16": 7.123e14} and found["memory_bandwidth"] == 3e12
    assert [(e["operation"], e["lines"][0]["latency"]) for e in found["collectives"]] == [
        ("all_reduce", 2e-5),
        ("send", 1e-5),
    ]
    with pytest.raises(DataError, match="is of cluster 'here', not of 'there'"):
        update(path, "there")
    (tmp_path / "bad.yaml").write_text("a: 1\n")
    with pytest.raises(DataError, match="is no profile"):
        read(tmp_path / "bad.yaml")


def test_operations_that_no_training_has_are_in_no_profile() -> None:
    assert collectives(fits([row(size, operation="broadcast") for size in SIZES], HERE)) == []


def test_the_command(tmp_path) -> None:
    profile, png = tmp_path / "h.yaml", tmp_path / "h.png"
    arguments = [
        "bench",
        "fit",
        "published:h200",
        "--profile",
        str(profile),
        "--cluster",
        "dgx-h200",
        "--png",
        str(png),
    ]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 0, done.output
    assert "median error of sizes held out:" in done.stdout and "predicted (us)" in done.stdout
    assert read(profile)["collectives"][0]["devices"] == 8
    assert png.read_bytes().startswith(b"\x89PNG")
    result(row(1024)).write(tmp_path)
    assert CliRunner().invoke(main, ["bench", "fit", str(tmp_path)]).exit_code == 2
