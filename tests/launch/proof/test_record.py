"""What is kept of a proof: all of it, in a file that stays small."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from hpctrain.launch.place.tablefile import RECORD
from hpctrain.launch.proof import record
from hpctrain.launch.proof.record import ranks_of
from hpctrain.launch.proof.verdict import FILE, examine
from tests.launch.machines import config, job
from tests.launch.test_field_failures import NODE, changed, good, proof


def test_what_was_reported_is_what_is_read(tmp_path: Path) -> None:
    ranks = changed(3, nic="down", hcas="", changed={"OMPI_MCA_btl_tcp_if_include": ""})
    ranks[5] = (None, replace(ranks[5][1], visible=None))
    ranks[6] = (replace(ranks[6][0], set={"NCCL_IB_HCA": "=x"}, kept={"UCX_NET_DEVICES": "y"}), ranks[6][1])
    made = proof(ranks)
    record.write(tmp_path, made, None, dict(enumerate(ranks)))
    tree = json.loads((tmp_path / FILE).read_text())
    whole = json.loads(json.dumps([{"planned": b.plain() if b else None, "found": f.plain()} for b, f in ranks]))
    assert [{key: row[key] for key in ("planned", "found")} for row in ranks_of(tree)] == whole
    assert [row["rank"] for row in tree["ranks"]] == list(range(16))
    (down,) = [found for found in tree["findings"] if found["what"] == "NIC"]
    assert (down["rank"], down["ranks"], down["stops"]) == (3, "3", True)
    assert tree["stops"] and tree["summary"] == made.summary and not (tmp_path / RECORD).exists()


def test_of_thousands_of_ranks_it_is_small_and_soon_there(tmp_path: Path) -> None:
    """4096 ranks on 512 hosts, all of which find something: less than half a kilobyte each."""
    hosts, pattern = [f"n{i}" for i in range(512)], good()[:8]
    reports = {
        8 * i + local: (replace(b, host=host, row=8 * i + local), replace(f, host=host, shm_bytes=1 << 20))
        for i, host in enumerate(hosts)
        for local, (b, f) in enumerate(pattern)
    }
    table = job(NODE, hosts, config(512, 8, tp=8))
    made = examine(table, reports)
    record.write(tmp_path, made, table, reports)
    text = (tmp_path / FILE).read_text()
    assert len(text) / 4096 < 500 and len((tmp_path / RECORD).read_text()) / 4096 < 500
    tree = json.loads(text)
    assert [(found["ranks"], found["what"]) for found in tree["findings"]] == [("0-4095", "/dev/shm")]
    assert len(ranks_of(tree)) == 4096 and ranks_of(tree)[4095]["planned"]["row"] == 4095
