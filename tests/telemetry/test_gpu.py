"""The parts of telemetry that ask a GPU."""

from __future__ import annotations

import pytest


@pytest.mark.gpu
def test_memory_and_name_of_a_gpu() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    from hpctrain.telemetry.environment import gpu_names
    from hpctrain.telemetry.memory import available_memory, peak_memory

    device, size = torch.device("cuda", torch.cuda.current_device()), 1 << 26
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    block = torch.empty(size, dtype=torch.uint8, device=device)
    del block
    peak = peak_memory(device)
    assert peak.kind == "cuda" and peak.bytes >= before + size
    left = available_memory(device)
    assert left.kind == "cuda" and 0 < left.bytes <= torch.cuda.get_device_properties(device).total_memory
    assert torch.cuda.get_device_name(device) in gpu_names()
