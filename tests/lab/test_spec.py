"""Sizes and folders that cannot be a lab are refused; two labs never meet."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from hpctrain.errors import LabError
from hpctrain.lab.spec import MAX_FOLDER, SPINE, LabSpec

SPEC = LabSpec(Path("/lab"), first_port=21000)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"nodes": 0}, "nodes=0: choose from 1 to 64"),
        ({"nodes": 65}, "nodes=65"),
        ({"gpus": -1}, "gpus=-1: choose from 0 to 16"),
        ({"gpus": 17}, "gpus=17"),
        ({"cpus": 0}, "cpus=0: choose from 1 to 1024"),
        ({"rails": 9}, "rails=9: choose from 0 to 8"),
        ({"rail_mbit": 0}, "rail_mbit=0: choose from 1 to 10000"),
        ({"spine_mbit": 10_001}, "spine_mbit=10001: choose from 1 to 10000"),
        ({"folder": Path("lab")}, "cannot live in 'lab'"),
        ({"folder": Path("/my lab")}, "cannot live in '/my lab'"),
        ({"folder": Path("/%n")}, "cannot live in '/%n'"),
        ({"folder": Path("/lab#1")}, "cannot live in"),
        ({"folder": Path("/lab\n")}, "cannot live in"),
        ({"folder": Path("/übung")}, "cannot live in"),
        ({"folder": Path("/" + "x" * MAX_FOLDER)}, f"at most {MAX_FOLDER}"),
    ],
)
def test_refused(change: dict[str, object], said: str) -> None:
    with pytest.raises(LabError) as caught:
        replace(SPEC, **change)  # type: ignore[arg-type]
    assert said in str(caught.value)
    assert str(caught.value).count(". ") == 0


def test_longest_folder_keeps_the_sockets_of_a_job_within_the_limit_of_the_kernel() -> None:
    spec = replace(SPEC, folder=Path("/" + "x" * (MAX_FOLDER - 1)), nodes=64)
    job = "99999999.0"
    socket = spec.home("n63") / "spool" / f"pmix.{job}" / f"stepd.slurm.pmix.{job}"
    assert len(str(socket)) < 108


def test_survives_json() -> None:
    spec = replace(SPEC, nodes=3, accounting=True, first_job=17, rails=2, spine_mbit=7)
    assert LabSpec.from_json(spec.to_json()) == spec
    with pytest.raises(TypeError):
        LabSpec.from_json(json.dumps({"folder": "/lab", "colour": "red"}))


def test_every_port_and_address_is_used_once() -> None:
    spec = replace(SPEC, nodes=64)
    ports = [spec.controller_port, spec.accounting_port, *map(spec.node_port, spec.node_names)]
    assert ports == list(range(21000, 21066))
    addresses = [spec.address(name) for name in spec.machines]
    assert len(set(addresses)) == 65
    assert addresses[:2] == ["127.82.8.10", "127.82.8.11"]
    beside = replace(spec, first_port=21066)
    assert not set(addresses) & {beside.address(name) for name in beside.machines}


def test_every_address_of_a_lab_with_rails_is_used_once() -> None:
    spec = replace(SPEC, nodes=64, rails=8)
    rails = [spec.rail_address(name, rail) for name in (*spec.node_names, SPINE) for rail in range(8)]
    addresses = [*map(spec.address, spec.machines), *rails]
    assert len(set(addresses)) == 65 + 65 * 8
    assert (addresses[0], addresses[64], rails[3], rails[-1]) == ("10.0.0.10", "10.0.0.74", "10.1.3.11", "10.1.7.254")
    assert {a.rpartition(".")[0] for a in rails} == {f"10.1.{rail}" for rail in range(8)}
    assert spec.everything == ("switches", "spine", "head", *(f"n{i}" for i in range(64)))
    assert SPEC.everything == ("head", "n0", "n1", "n2", "n3")
