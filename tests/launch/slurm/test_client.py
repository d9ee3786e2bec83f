"""Slurm's commands as they fail: one sentence each, and never a client that waits for ever."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hpctrain.launch.slurm.client import SlurmError, call, has_slurm, installed, reason

Programs = Callable[[str, str], None]


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        # printed by 22.05.8
        (
            "sbatch: error: invalid partition specified: nope\n"
            "sbatch: error: Batch job submission failed: Invalid partition name specified\n",
            "Invalid partition name specified (invalid partition specified: nope)",
        ),
        (
            "sbatch: error: Batch job submission failed: Requested node configuration is not available",
            "Requested node configuration is not available",
        ),
        ("sbatch: error: Invalid --time specification", "Invalid --time specification"),
        ("slurm_load_jobs error: Invalid job id specified", "Invalid job id specified"),
        ("Job is pending execution for job 45987300", "Job is pending execution for job 45987300"),
        (
            "sbatch: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host\n"
            "sbatch: error: fetch_config: DNS SRV lookup failed\n"
            "sbatch: error: _establish_config_source: failed to fetch config\n"
            "sbatch: fatal: Could not establish a configuration source",
            "Could not establish a configuration source (_establish_config_source: failed to fetch config)",
        ),
        # in the words of Slurm's list of errors
        (
            "sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified",
            "Invalid account or account/partition combination specified",
        ),
        ("sbatch: error: Same.\nsbatch: error: Batch job submission failed: Same", "Same"),
        ("", "it said nothing"),
    ],
)
def test_reasons(said: str, sentence: str) -> None:
    assert reason(said) == sentence


def test_what_it_prints(programs: Programs) -> None:
    programs("squeue", "echo one; echo warning >&2")
    assert call(["squeue"]) == "one\n"


def test_a_failure_is_one_sentence(programs: Programs) -> None:
    programs("scancel", 'echo "scancel: error: Kill job error on job id 5: Access denied" >&2; exit 1')
    with pytest.raises(SlurmError) as caught:
        call(["scancel", "5"])
    assert str(caught.value) == "scancel failed with status 1: Kill job error on job id 5: Access denied."
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (str(copy), copy.said) == (str(caught.value), caught.value.said)


def test_a_command_that_hangs_is_given_up(programs: Programs) -> None:
    programs("squeue", "exec sleep 60")
    programs("sbatch", "exec sleep 60")
    began = time.monotonic()
    with pytest.raises(SlurmError, match=r"^squeue has not answered in 0\.2 s, so .*: try again later\.$"):
        call(["squeue"], timeout_s=0.2)
    with pytest.raises(SlurmError, match=r"a job that it has queued all the same does nothing\.$"):
        call(["sbatch", "x"], timeout_s=0.2)
    assert time.monotonic() - began < 5


def test_a_command_that_is_not_there(programs: Programs) -> None:
    with pytest.raises(SlurmError, match="there is no sacct-nowhere on PATH"):
        call(["sacct-nowhere"])


def test_filters_of_the_user_do_not_hide_jobs(programs: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SQUEUE_PARTITION", "debug")
    monkeypatch.setenv("SLURM_CONF", "/etc/x")
    programs("squeue", "env")
    printed = call(["squeue"])
    assert "SQUEUE_PARTITION" not in printed and "SLURM_CONF=/etc/x" in printed


def test_which_slurm_is_here(programs: Programs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    programs("sbatch", "echo slurm 26.05.0-rc1")
    programs("scontrol", 'printf "SLURM_VERSION = 24.11.5\\nTopologyPlugin = topology/block\\n"')
    found = installed()
    assert (found.version, found.release, found.plugin, found.unanswered) == ((24, 11), "24.11.5", "block", "")
    programs("scontrol", "echo slurm_load_ctl_conf error: Unable to contact slurm controller >&2; exit 1")
    alone = installed()
    assert has_slurm() and (alone.version, alone.release, alone.plugin) == ((26, 5), "26.05.0-rc1", "")
    assert "Unable to contact slurm controller" in alone.unanswered
    assert not alone.confined, "whether steps are confined to their CPUs is not known, so it is not relied on"
    programs("sbatch", "exit 1")
    assert installed().version is None
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert not has_slurm() and "there is no scontrol on PATH" in installed().unanswered
