"""What squeue and sacct print, read back.

Samples named 22.05 were printed by that version. Those named 23.11 to 26.05 are written after its manual pages, which
keep these fields and words, and add states.
"""

from __future__ import annotations

import pytest

from hpctrain.launch.slurm.state import JobState, from_sacct, from_squeue

SQUEUE_22_05 = """\
45987565|CANCELLED|None|
45987560|FAILED|NonZeroExitCode|n0
45987562_0|FAILED|JobLaunchFailure|n0
45987292|FAILED|BadConstraints|
45987558|PENDING|BeginTime|
45987561|PENDING|Dependency|
45987294|PENDING|PartitionNodeLimit|
45987559_0|PENDING|JobHeldUser|
45987298_[1-3%2]|PENDING|JobHeldUser|
45987297|RUNNING|None|n[0-1]
"""
SACCT_22_05 = """\
45987560|FAILED|3:0|n0
45987561|PENDING|0:0|None assigned
45987563|RUNNING|0:0|n1
45987559_[0-3%2]|PENDING|0:0|None assigned
45987562_0|FAILED|0:9|n0
45987565|CANCELLED by 0|0:0|n0
45987565.batch|CANCELLED|0:15|n0
"""


def test_squeue_22_05() -> None:
    found = from_squeue(SQUEUE_22_05)
    assert found["45987297"] == JobState("45987297", "RUNNING", "", "n[0-1]")
    assert found["45987560"] == JobState("45987560", "FAILED", "NonZeroExitCode", "n0")
    assert {job for job in found if job.startswith("45987298")} == {f"45987298_{i}" for i in (1, 2, 3)}
    assert {job for job, state in found.items() if state.ended} == {*("45987565", "45987560", "45987562_0", "45987292")}
    assert {job for job, state in found.items() if state.stuck} == {
        *("45987294", "45987559_0", "45987298_1", "45987298_2", "45987298_3")
    }


def test_sacct_22_05() -> None:
    found = from_sacct(SACCT_22_05)
    assert found["45987560"] == JobState("45987560", "FAILED", "exit status 3", "n0")
    assert found["45987562_0"] == JobState("45987562_0", "FAILED", "signal 9", "n0")
    assert found["45987565"] == JobState("45987565", "CANCELLED", "by 0", "n0")
    assert found["45987561"] == JobState("45987561", "PENDING")
    assert len(found) == 9 and not any(job.endswith("batch") for job in found)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("8|PENDING|ReqNodeNotAvail, UnavailableNodes:n[1-2]|(null)", ("8", False, "ReqNodeNotAvail, Unavail")),
        ("8|EXPEDITING|Priority|", ("8", False, "Priority")),
        ("8|REQUEUE_HOLD|JobHoldMaxRequeue|", ("8", False, "JobHoldMaxRequeue")),
        ("8|COMPLETING|None|n1", ("8", False, "")),
        ("8|OUT_OF_MEMORY|OutOfMemory|n1", ("8", True, "OutOfMemory")),
        ("8+1|NODE_FAIL|NodeDown|n1", ("8+1", True, "NodeDown")),
        ("8_[3]|PENDING|(null)|", ("8_3", False, "")),
    ],
)
def test_squeue_23_11_to_26_05(line: str, expected: tuple[str, bool, str]) -> None:
    (found,) = from_squeue(line).values()
    assert (found.id, found.ended, found.reason[:24]) == expected


@pytest.mark.parametrize(
    ("ids", "expanded"),
    [
        ("7_[0-4]", ["7_0", "7_1", "7_2", "7_3", "7_4"]),
        ("7_[0,2,5-6%3]", ["7_0", "7_2", "7_5", "7_6"]),
        ("7_[0-6:3]", ["7_0", "7_3", "7_6"]),
        ("7_[1,3,...]", ["7_1", "7_3"]),
        ("7_[1,3,...", ["7_1", "7_3"]),
        ("7_12", ["7_12"]),
        ("7", ["7"]),
    ],
)
def test_elements_of_arrays(ids: str, expanded: list[str]) -> None:
    assert list(from_squeue(f"{ids}|PENDING|Resources|")) == expanded
    assert list(from_sacct(f"{ids}|PENDING|0:0|None assigned")) == expanded


@pytest.mark.parametrize(
    "text", ["", "\n", "CLUSTER: other\n", "slurm_load_jobs error: x", "1|2|3", "|RUNNING||", "a|b|c|d|e"]
)
def test_what_is_no_row_is_passed_over(text: str) -> None:
    assert from_squeue(text) == {} == from_sacct(text)


def test_a_cut_word_is_known_by_its_letters() -> None:
    assert from_sacct("5|CANCELLED+|0:0|")["5"].state == "CANCELLED"


def test_in_words() -> None:
    assert str(JobState("7", "FAILED", "exit status 3", "n[0-1]")) == "job 7 FAILED (exit status 3, on n[0-1])"
    assert str(JobState("7", "PENDING")) == "job 7 PENDING"
    assert JobState("7", "COMPLETED").good and not JobState("7", "FAILED").good
