"""What a rank of Slurm does before and after its work."""

from __future__ import annotations

from pathlib import Path

import pytest
from submitit.core.utils import temporary_save_path

from hpctrain.launch.task import _clear_torn_result


def test_a_result_that_an_earlier_life_has_not_finished_writing_is_no_hindrance(tmp_path: Path) -> None:
    result = tmp_path / "7_0_result.pkl"
    with pytest.raises(KeyboardInterrupt), temporary_save_path(result) as part:
        part.write_bytes(b"torn")
        raise KeyboardInterrupt
    with pytest.raises(AssertionError), temporary_save_path(result):
        pass
    _clear_torn_result(result)
    with temporary_save_path(result) as part:
        part.write_bytes(b"whole")
    assert result.read_bytes() == b"whole"
    _clear_torn_result(result)
