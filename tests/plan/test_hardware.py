"""Hardware files and constants: strict, sourced, found by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hpctrain.errors import ConfigError
from hpctrain.plan.constants import constants
from hpctrain.plan.hardware import Dtype, Hardware, hardware, names
from hpctrain.plan.links import Machine
from hpctrain.telemetry.flops import peak_flops


@pytest.mark.parametrize("name", names())
def test_every_file_is_whole_and_its_links_have_constants(name: str) -> None:
    made = hardware(name)
    assert made.name == name and made.domain.devices % made.host.devices == 0
    assert {made.domain.link, made.fabric.network} <= set(constants().links)
    assert set(constants().matmul[name]) <= set(made.gpu.peak)


@pytest.mark.parametrize("name", [n for n in names() if n != "cpu-lab"])
def test_peaks_are_those_that_mfu_is_counted_against(name: str) -> None:
    made = hardware(name)
    assert made.peak("fp16") == pytest.approx(peak_flops(made.gpu.name, "fp16"), rel=0.01)


def test_numbers_of_one_file() -> None:
    made = hardware("h100")
    assert (made.name, made.gpu.sms.value, made.peak("bf16"), made.host.nic_bandwidth.value) == (
        "dgx-h100",
        132,
        989e12,
        50e9,
    )


def test_the_mtbf_is_that_of_the_llama_run() -> None:
    assert hardware("dgx-h100").failures.device_mtbf_hours.value == pytest.approx(16384 * 54 * 24 / 419, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("dgx-h10", ("must be one of a100-40g", "the nearest is dgx-h100")),
        ("nowhere.yaml", ("there is no such file",)),
    ],
)
def test_unknown_clusters_are_refused(name: str, words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as error:
        hardware(name)
    assert all(word in str(error.value) for word in words)


def changed(tmp_path: Path, old: str, new: str) -> Path:
    text = names()["dgx-a100"].read_text(encoding="utf-8")
    assert old in text
    path = tmp_path / "mine.yaml"
    path.write_text(text.replace(old, new, 1))
    return path


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    made = hardware(str(changed(tmp_path, "value: 25e9", "value: 12.5e9")))
    assert isinstance(made, Hardware) and made.host.nic_bandwidth.value == 12.5e9


@pytest.mark.parametrize("name", names())
def test_a_copy_under_another_name_is_as_fast(tmp_path: Path, name: str) -> None:
    """What is fitted is of a device: a file that differs in its name alone prices alike; of another device 0.8."""
    text, path = names()[name].read_text(encoding="utf-8"), tmp_path / "mine.yaml"
    path.write_text(text.replace(f"name: {name}\n", "name: mine\n", 1))
    copy, own = (Machine(hardware(str(path) if mine else name), constants()) for mine in (True, False))
    assert copy.hardware.name == "mine" and set(copy.hardware.gpu.peak) == set(own.hardware.gpu.peak)
    assert [copy.device(dtype) for dtype in copy.hardware.gpu.peak] == [own.device(d) for d in own.hardware.gpu.peak]
    gpu = copy.hardware.gpu.model_copy(update={"name": "another"})
    other = replace(copy, hardware=copy.hardware.model_copy(update={"gpu": gpu}))
    dtype: Dtype = "fp16" if "fp16" in gpu.peak else "bf16"
    rate = 0.8 * constants().training.matmul * gpu.peak[dtype].value
    assert other.device(dtype).rate == pytest.approx(rate)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('source: "HDR, 200 Gbit/s"', 'source: ""', "host.nic_bandwidth.source"),
        ("  devices: 8\n  bandwidth", "  devices: 0\n  bandwidth", "domain.devices"),
        ("fabric:\n", "fabrics: 1\nfabric:\n", "fabrics"),
        ("value: 25e9", "value: fast", "host.nic_bandwidth.value"),
        ("value: 25e9", "value: 0", "host.nic_bandwidth.value is 0: must be a number of bytes/s, 1 to 1e.18; see"),
        ("value: 25e9", "value: 1e-300", "host.nic_bandwidth.value is 1e-300: must be a number of bytes/s, 1 to"),
        ("value: 25e9", "value: .inf", "host.nic_bandwidth.value: input should be a finite number"),
        ("nvme_write: {value: 12e9", "nvme_write: {value: 1e-300", "host.nvme_write.value is 1e-300: must be a number"),
        ("bf16: {value: 312e12", "bf16: {value: 1e-300", "gpu.peak.bf16.value is 1e-300: must be a number of FLOP/s"),
        ("memory_bandwidth: {value: 2.039e12", "memory_bandwidth: {value: 0.5", "gpu.memory_bandwidth.value is 0.5: "),
        ("memory: {value: 85899345920", "memory: {value: 1e30", "gpu.memory.value is 1e.30: must be a number of bytes"),
        ("sms: {value: 108", "sms: {value: 1.5", "gpu.sms.value is 1.5: must be a whole number of units, 1 to 1e.06"),
        ("restart_seconds: {value: 600", "restart_seconds: {value: 1e300", "failures.restart_seconds.value is 1e.300"),
        ("hours: {value: 50674", "hours: {value: 0", "device_mtbf_hours.value is 0: must be a number of hours, 0.001 "),
        ("nics: {value: 8", "nics: {value: 0", "host.nics is 0, so no host reaches another, but fabric.kind is rails"),
        ("nics: {value: 8", "nics: {value: -1", "host.nics.value is -1: must be a whole number of ports, 0 "),
        ("sms: {value: 108", "sms: {value: 0", "gpu.sms.value"),
        ("  devices: 8\n  bandwidth", "  devices: 3\n  bandwidth", "domain.devices is 3 and host.devices 8: a domain"),
        ("  devices: 8\n  bandwidth", "  devices: 7\n  bandwidth", "a host whole domains, so use 4 or 8; see docs"),
        ("  devices: 8\n  bandwidth", "  devices: 20\n  bandwidth", "a host whole domains, so use 16 or 24; see docs"),
        ("oversubscription: {value: 1", "oversubscription: {value: 0", "oversubscription.value"),
    ],
)
def test_a_wrong_file_says_where(tmp_path: Path, old: str, new: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        hardware(str(changed(tmp_path, old, new)))


def test_hosts_without_ports_are_alone(tmp_path: Path) -> None:
    """`nics: 0` is one domain and nothing beyond it: larger jobs are refused, and others never ask for a port."""
    path = changed(tmp_path, "nics: {value: 8", "nics: {value: 0")
    path.write_text(path.read_text().replace("kind: rails", "kind: single"))
    machine = Machine(hardware(str(path)), constants())
    one, usual = machine.of(8), Machine(hardware("dgx-a100"), constants())
    sizes = (np.array([2, 8]), np.array([1, 1]))
    for operation in ("all_reduce", "all_to_all"):
        times = [m.collective(operation, 1e8, m.group(*sizes)) for m in (one, usual)]
        assert times[0] == pytest.approx(times[1]) and np.isfinite(times[0]).all()
    assert float(one.send(1e8, False)) == float(usual.send(1e8, False))
    with pytest.raises(ConfigError, match=r"gpus=16: hosts of dgx-a100 have no ports to others.*use 8"):
        machine.of(16)


@pytest.mark.parametrize("devices", [2, 4, 6, 8, 16, 24])
def test_a_host_may_have_several_domains(tmp_path: Path, devices: int) -> None:
    """Four devices of eight are joined: groups of more leave them, however many hosts a job has."""
    path = changed(tmp_path, "  devices: 8\n  bandwidth", "  devices: 4\n  bandwidth")
    machine = Machine(hardware(str(path)), constants()).of(devices)
    assert machine.hardware.domain.devices == 4
    group = machine.group(devices, 1)
    assert int(group.inside) == {2: 2, 6: 3}.get(devices, 4)
    assert np.isfinite(machine.collective("all_reduce", 1e8, group))
    usual = Machine(hardware("dgx-a100"), constants()).of(devices)
    slower = machine.collective("all_reduce", 1e9, group) > usual.collective("all_reduce", 1e9, usual.group(devices, 1))
    assert slower == (devices > 4)


@pytest.mark.parametrize(
    ("domain", "used", "within"), [(8, 4, 4), (16, 4, 8), (4, 4, 4), (4, 2, 2), (4, 3, 3), (4, 6, 2), (4, 5, 1)]
)
def test_a_part_of_each_host_is_in_as_few_domains_as_go(tmp_path: Path, domain: int, used: int, within: int) -> None:
    path = changed(tmp_path, "  devices: 8\n  bandwidth", f"  devices: {domain}\n  bandwidth")
    assert hardware(str(path)).part(used).domain.devices == within


def test_no_drives_are_a_fact(tmp_path: Path) -> None:
    assert hardware(str(changed(tmp_path, "nvme: {value: 30e12", "nvme: {value: 0"))).host.nvme.value == 0


def test_a_precision_without_units_is_refused() -> None:
    with pytest.raises(ConfigError, match="precision='bf16': NVIDIA V100-SXM2-32GB multiplies in fp16"):
        hardware("v100").peak("bf16")


def test_oversubscription_multiplies_up_the_levels() -> None:
    made = hardware("dgx-h100")
    levels = tuple(
        level.model_copy(update={"oversubscription": level.oversubscription.model_copy(update={"value": 2.0})})
        for level in made.fabric.levels
    )
    fat = made.model_copy(update={"fabric": made.fabric.model_copy(update={"levels": levels})})
    assert [fat.oversubscription(devices) for devices in (256, 257, 2048, 2049)] == [1, 2, 2, 4]
