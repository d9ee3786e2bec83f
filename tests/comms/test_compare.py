"""Verdicts: noise, tolerance, several baselines, published sweeps; and where results are read from."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from hpctrain.cli import main
from hpctrain.comms import store
from hpctrain.comms.compare import compare, tally
from hpctrain.comms.groups import Where
from hpctrain.comms.load import NAMES, load, published
from hpctrain.comms.nccltests import document
from hpctrain.errors import DataError
from tests.comms.made import result, row


def words(before, after, tolerance: float = 0.1) -> list[str]:
    before = before if isinstance(before, list) else [before]
    return [v.word for v in compare([result(b) for b in before], result(after), tolerance)]


def test_a_difference_counts_beyond_tolerance_and_noise() -> None:
    assert words(row(seconds=1e-3), row(seconds=1.2e-3)) == ["slower"]
    assert words(row(seconds=1.2e-3), row(seconds=1e-3)) == ["faster"]
    assert words(row(seconds=1e-3), row(seconds=1.09e-3)) == ["same"]
    assert words(row(seconds=1e-3), row(seconds=1.09e-3), tolerance=0.05) == ["slower"]
    # 20 iterations spread over +-90 %: a median is known to some 40 %
    assert words(row(seconds=1e-3, jitter=0.9), row(seconds=1.2e-3, jitter=0.9)) == ["same"]
    assert words(row(seconds=1e-3, jitter=0.9, iterations=2000), row(seconds=1.2e-3, jitter=0.9, iterations=2000)) == [
        "slower"
    ]


def test_the_noise_of_either_counts() -> None:
    quiet, noisy = row(seconds=1e-3), row(seconds=1e-3, jitter=0.9)
    assert words(noisy, row(seconds=1.2e-3)) == ["same"] and words(quiet, row(seconds=1.2e-3, jitter=0.9)) == ["same"]


def test_runs_that_differ_are_noise() -> None:
    runs = [row(seconds=s) for s in (0.9e-3, 1.0e-3, 1.1e-3)]
    assert words(runs, row(seconds=1.25e-3)) == ["same"]
    assert words(runs[1], row(seconds=1.25e-3)) == ["slower"]
    assert words(runs, row(seconds=1.4e-3)) == ["slower"]


def test_only_equal_lines_are_compared() -> None:
    verdicts = compare([result(row(1024), row(2048))], result(row(1024), row(1024, ranks=2)))
    assert [(v.word, v.key.ranks, v.key.size) for v in verdicts] == [
        ("same", 4, 1024),
        ("new", 2, 1024),
        ("gone", 4, 2048),
    ]
    assert tally(verdicts) == {"same": 1, "new": 1, "gone": 1}


def test_other_backends_and_hosts_are_other_lines() -> None:
    """gloo is no regression of MPI, nor are four ranks on four hosts one of four on two."""
    one = result(row())
    assert [v.word for v in compare([one], result(row(backend="mpi")))] == ["new", "gone"]
    spread = replace(one, where=tuple(Where(f"n{rank}", 0) for rank in range(4)))
    assert [(v.word, v.key.hosts) for v in compare([one], spread)] == [("new", 4), ("gone", 2)]
    placed = replace(spread, where=tuple(Where(f"m{rank % 2}", rank // 2) for rank in range(4)))
    assert [v.word for v in compare([one], placed)] == ["same"], "other hosts, as many"


def test_in_what_nothing_is_common_is_said(tmp_path) -> None:
    for name, backend, ranks in (("a", "gloo", 4), ("b", "mpi", 2)):
        (tmp_path / name).mkdir()
        result(row(backend=backend, ranks=ranks)).write(tmp_path / name)
    done = run(str(tmp_path / "a"), str(tmp_path / "b"))
    said = "lines of the same backend (it has gloo, not mpi), ranks (it has 4, not 2), hosts (it has 2, not 1)."
    assert done.exit_code == 2 and said in done.stderr


def test_a_placement_is_held_against_its_like_where_there_is_one() -> None:
    """Also when the result has one placement of the two that the baseline has."""
    both = [row(seconds=1e-3), row(seconds=4e-3, placement="out_of_place")]
    assert [v.word for v in compare([result(*both)], result(row(seconds=2e-3)))] == ["slower", "gone"]
    other = row(seconds=2e-3, placement="out_of_place")
    assert [v.word for v in compare([result(both[0])], result(other))] == ["slower"], "in place stands for it"
    assert [v.word for v in compare([result(*both)], result(*both))] == ["same", "same"]
    assert [(v.word, v.key.placement) for v in compare([result(both[0])], result(*both))] == [
        ("same", "in_place"),
        ("new", "out_of_place"),
    ]


def test_the_slowest_of_groups_that_ran_at_once_counts() -> None:
    fast, slow = row(seconds=1e-3), row(seconds=2e-3)
    assert [v.word for v in compare([result(fast, fast)], result(fast, slow))] == ["slower"]


@pytest.mark.parametrize("name", NAMES)
def test_published_sweeps_equal_themselves(name: str) -> None:
    found = published(name)
    assert found.rows and found.extra["sources"]
    assert {v.word for v in compare([found], found)} == {"same"}
    assert all(row.busbw and row.busbw > 0 for row in found.rows)


def test_published_sweeps_give_the_obvious_verdicts() -> None:
    """Newer hardware is faster from 1 MiB on; without in-switch reduction 8 GPUs are slower, 4 are not; a fabric that
    its owners reported as performing badly is slower than what is expected."""

    def verdicts(a: str, b: str) -> dict[tuple[int, int], str]:
        found = compare([published(a)], published(b))
        return {(v.key.ranks, v.key.size): v.word for v in found}

    newer = verdicts("a100", "h200")
    assert {word for (_, size), word in newer.items() if size >= 1 << 20} == {"faster"}
    older = verdicts("b200", "h200")
    assert {word for (_, size), word in older.items() if size >= 1 << 27} == {"slower"}
    ring = verdicts("h200-gpus", "h200-gpus-ring")
    assert ring == {(4, 1 << 33): "same", **{(n, 1 << 33): "slower" for n in (5, 6, 7, 8)}}
    assert set(verdicts("b200-gpus", "b200-gpus-ring").values()) == {"same", "slower"}
    bad = verdicts("h100-2-nodes", "h100-2-nodes-misperforming")
    assert bad == {(16, 1 << 33): "slower", (16, 1 << 30): "new"}


def run(*arguments: str):
    return CliRunner().invoke(main, ["bench", "compare", *arguments])


def test_the_command_says_which_lines_and_fails_on_a_regression() -> None:
    done = run("published:b200", "published:a100")
    assert done.exit_code == 1
    assert "lines are slower than the baseline, most of all all_reduce of" in done.stderr
    done = run("published:a100", "published:a100")
    assert done.exit_code == 0 and done.stdout.splitlines()[-1] == "20 same"
    rows = json.loads(run("published:a100", "published:h200", "--json").stdout)
    assert (
        len(rows) == 20
        and rows[-1]["word"] == "faster"
        and rows[-1]["change"] == pytest.approx(234.89 / 482.26 - 1, rel=0.01)
    )


def test_nothing_in_common_is_no_comparison(tmp_path) -> None:
    result(row(operation="broadcast")).write(tmp_path)
    done = run("published:a100", str(tmp_path))
    assert done.exit_code == 2 and "no line in common" in done.stderr


def test_results_are_read_from_everywhere(tmp_path) -> None:
    made = result(row(seconds=2e-3))
    path = made.write(tmp_path)
    (tmp_path / "printed.json").write_text(json.dumps(document(made, ["x"])))
    plain = document(made, ["all_reduce_perf"])
    del plain["hpctrain"]
    (tmp_path / "theirs.json").write_text(json.dumps(plain))
    name = store.append(tmp_path / "s.h5", made)
    for source in (tmp_path, path, tmp_path / "printed.json", tmp_path / "theirs.json", tmp_path / "s.h5"):
        assert load(str(source)).rows[0].seconds == pytest.approx(2e-3), source
    assert load(f"{tmp_path}/s.h5:{name}").rows == made.rows
    (tmp_path / "bad.json").write_text("{}")
    for bad, said in (("bad.json", "is no result"), ("nowhere", "is not there")):
        with pytest.raises(DataError, match=said):
            load(str(tmp_path / bad))
    with pytest.raises(DataError, match="nothing is published as 'x'"):
        load("published:x")
