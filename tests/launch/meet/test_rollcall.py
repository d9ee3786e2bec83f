"""What rank 0 concludes from the arrivals."""

from hypothesis import given
from hypothesis import strategies as st

from hpctrain.launch.meet.rollcall import Arrival, Verdict, judge, name_ranks


def came(world=2, host="a", cpus=(0, 1), gpu=""):
    return Arrival(world, host, tuple(cpus), gpu)


def test_missing_ranks_are_named():
    verdict = judge({0: came(4), 2: came(4)}, 4, 30.0)
    assert verdict.error.startswith("ranks 1, 3 of 4 did not arrive within 30 s")


def test_disagreement_about_the_world_is_named():
    verdict = judge({0: came(2), 1: came(4)}, 2, 30.0)
    assert "rank 0 of 2, rank 1 of 4" in verdict.error


def test_two_ranks_on_one_gpu_are_named():
    verdict = judge({0: came(gpu="GPU-1"), 1: came(gpu="GPU-1")}, 2, 30.0)
    assert verdict.error.startswith("ranks 0, 1 on a all have GPU GPU-1")
    assert not judge({0: came(gpu="GPU-1"), 1: came(gpu="GPU-2")}, 2, 30.0).error


def test_cpus_are_shared_by_ranks_whose_masks_overlap():
    free = judge({0: came(4), 1: came(4), 2: came(4, "b"), 3: came(4, "b")}, 4, 1.0)
    bound = judge({r: came(4, cpus=(2 * r, 2 * r + 1)) for r in range(4)}, 4, 1.0)
    assert free.sharing == (2, 2, 2, 2)
    assert bound.sharing == (1, 1, 1, 1)


@given(st.text(), st.lists(st.integers(0, 2000)), st.text())
def test_words_survive_the_store(host, cpus, error):
    arrival, verdict = came(3, host, sorted({*cpus})), Verdict(error, tuple(cpus), host)
    assert Arrival.load(arrival.dump()) == arrival
    assert Verdict.load(verdict.dump().encode()) == verdict


def test_many_ranks_are_not_all_listed():
    assert name_ranks([3]) == "rank 3"
    assert name_ranks(range(1000)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 992 more"
