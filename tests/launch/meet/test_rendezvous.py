"""Ranks that find each other through a file, and those that do not."""

import collections
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch.distributed as dist

from hpctrain.errors import LaunchError
from hpctrain.launch.life.identity import Identity, Master
from hpctrain.launch.local.zygote import RankFailure
from hpctrain.launch.meet import rendezvous
from hpctrain.launch.meet.rendezvous import _own_store, _speaks, meet, rendezvous_file
from hpctrain.launch.meet.rollcall import Arrival


def me(world, rank=None, key="slurm-7-0-0", master=None):
    rank = dist.get_rank() if rank is None else rank
    return Identity(rank, world, rank, world, "srun", key, master)


def arrive(world):
    return Arrival(world, "here", (0, 1))


def gather(store, rank, world):
    store.set(f"test/{rank}", str(10 * rank))
    values = [int(store.get(f"test/{other}")) for other in range(world)]
    store.add("test/done", 1)
    while rank == 0 and store.add("test/done", 0) < world:  # it owns the store: it stays until all have read
        time.sleep(0.01)
    return values


def by_file(folder):
    if dist.get_rank() == 0:
        time.sleep(0.3)  # the others must wait for the file
    store, verdict = meet(me(3), folder, arrive(3), 20.0)
    return gather(store, dist.get_rank(), 3), verdict.sharing


def test_ranks_meet_by_file(ranks, tmp_path):
    """Field failure 6: no port is guessed. Rank 0 binds one that is free, and tells the others."""
    assert ranks(3, by_file, tmp_path) == [([0, 10, 20], (3, 3, 3))] * 3
    assert rendezvous_file(tmp_path, me(3, 0)).name == "slurm-7-0-0.json"


def stale(folder, note):
    if dist.get_rank() == 0:
        path = rendezvous_file(folder, me(2))
        path.parent.mkdir(parents=True)
        path.write_text(note)
    dist.barrier()
    if dist.get_rank() == 0:
        time.sleep(0.5)  # the other rank reads what is left from before
    store, _ = meet(me(2), folder, arrive(2), 20.0)
    return gather(store, dist.get_rank(), 2)


def test_file_of_a_dead_life_is_not_used(ranks, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    assert ranks(2, stale, tmp_path, json.dumps({"port": port, "hosts": ["127.0.0.1"]})) == [[0, 10]] * 2


def test_store_of_another_job_is_not_used(ranks, tmp_path):
    """Same file name, and somebody listens there: a job of another cluster, or a port given out again."""
    other = dist.TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)
    other.set("hpctrain/key", "slurm-6-0-0")
    assert ranks(2, stale, tmp_path, json.dumps({"port": other.port, "hosts": ["127.0.0.1"]})) == [[0, 10]] * 2


@pytest.mark.parametrize("note", ["", "{", "[]", '{"port": "x", "hosts": []}'])
def test_damaged_file_is_not_used(ranks, tmp_path, note):
    assert ranks(2, stale, tmp_path, note) == [[0, 10]] * 2


def one_missing(folder):
    start = time.monotonic()
    if dist.get_rank() == 2:
        return None
    with pytest.raises(LaunchError) as caught:
        meet(me(3), folder, arrive(3), 1.0)
    return str(caught.value), time.monotonic() - start


def test_missing_rank_is_named_to_all(ranks, tmp_path):
    first, second, _ = ranks(3, one_missing, tmp_path)
    assert first[0].startswith("rank 2 of 3 did not arrive within 1 s")
    assert second[0] == first[0]
    assert max(first[1], second[1]) < 4.0


def test_missing_rank_0_is_a_sentence(tmp_path):
    start = time.monotonic()
    with pytest.raises(LaunchError, match=r"rank 1 found no .*slurm-7-0-0.json within 0 s: check that rank 0 is alive"):
        meet(me(2, 1), tmp_path, arrive(2), 0.4)
    assert time.monotonic() - start < 3


def test_unreachable_rank_0_names_the_addresses(tmp_path):
    path = rendezvous_file(tmp_path, me(2, 1))
    path.parent.mkdir()
    path.write_text('{"port": 1, "hosts": ["127.0.0.1"]}')
    with pytest.raises(LaunchError, match=r"reached rank 0 at none of 127.0.0.1:1"):
        meet(me(2, 1), tmp_path, arrive(2), 0.4)


def test_folder_that_cannot_be_written_is_a_sentence(tmp_path):
    (tmp_path / "rendezvous").write_text("in the way")
    with pytest.raises(LaunchError, match=r"the run folder must be writable"):
        meet(me(2, 0), tmp_path, arrive(2), 0.4)


def other_world(folder):
    world = 2 + dist.get_rank()
    with pytest.raises(LaunchError) as caught:
        meet(me(world), folder, arrive(world), 5.0)
    return str(caught.value)


def test_ranks_that_disagree_on_the_world_are_named(ranks, tmp_path):
    texts = ranks(2, other_world, tmp_path)
    assert texts[0] == texts[1]
    assert "rank 0 of 2, rank 1 of 3" in texts[0]


def twice(folder):
    rank = min(dist.get_rank(), 1)
    try:
        _store, _ = meet(me(2, rank), folder, arrive(2), 5.0)
    except LaunchError as error:
        dist.barrier()
        return str(error)
    dist.barrier()
    return "met"


def test_a_rank_started_twice_is_refused(ranks, tmp_path):
    texts = sorted(ranks(3, twice, tmp_path))
    assert texts[:2] == ["met", "met"]
    assert texts[2].startswith("two processes say that they are rank 1 of 2")


def by_name(folder, port):
    store, _ = meet(me(2, master=Master("127.0.0.1", port)), folder, arrive(2), 20.0)
    return gather(store, dist.get_rank(), 2), os.listdir(folder)


def test_named_store_is_used_and_no_file_written(ranks, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    assert ranks(2, by_name, tmp_path, port) == [([0, 10], [])] * 2


def test_taken_port_is_a_sentence(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(LaunchError, match=rf"cannot serve the store on 127.0.0.1:{port}"):
            meet(me(2, 0, master=Master("127.0.0.1", port)), tmp_path, arrive(2), 1.0)


def rank_0_dies(folder):
    if dist.get_rank() == 0:
        store, _ = _own_store(me(2), folder, time.monotonic() + 5, 5.0)
        while not store.check(["hpctrain/slurm-7-0-0/came/1"]):
            time.sleep(0.01)
        os._exit(3)
    start = time.monotonic()
    with pytest.raises(LaunchError, match=r"lost rank 0 while the ranks were meeting"):
        meet(me(2), folder, arrive(2), 60.0)
    assert time.monotonic() - start < 10
    os._exit(4)


def test_death_of_rank_0_is_seen_at_once(ranks, tmp_path):
    with pytest.raises(RankFailure) as caught:
        ranks(2, rank_0_dies, tmp_path)
    assert "rank 0: exited with status 3" in str(caught.value)
    assert "rank 1: exited with status 4" in str(caught.value)


def test_only_a_library_that_fits_its_launcher_is_started():
    assert _speaks("Open MPI v5.0.11, package", "pmix")
    assert not _speaks("Open MPI v5.0.11, package", "pmi")
    assert _speaks("MPICH Version: 5.0.2", "pmi")
    assert not _speaks("MPICH Version: 5.0.2", "pmix")


LIBRARY = """
import ctypes, os
from types import SimpleNamespace

def waits(name):
    if os.environ["WAITS_IN"] == name:
        ctypes.PyDLL(None).sleep(60)  # as a collective that a rank does not come to, with the interpreter's lock held

class rc: pass

MPI = SimpleNamespace(
    COMM_WORLD=SimpleNamespace(
        Get_rank=lambda: 1,
        Get_size=lambda: int(os.environ.get("SIZE", "2")),
        Ibcast=lambda buffer, root: SimpleNamespace(Test=lambda: os.environ["WAITS_IN"] != "Ibcast"),
    ),
    Is_initialized=lambda: False,
    Get_library_version=lambda: "Open MPI v5, so to speak",
    Init=lambda: waits("Init"),
    Finalize=lambda: waits("Finalize"),
)
waits("import")
"""

LISTENER = """
import sys, time
from pathlib import Path
from hpctrain.launch.life.identity import Identity
from hpctrain.launch.meet.rendezvous import _own_store
me = Identity(1, 2, 1, 2, "srun", "slurm-7-0-0", mpi="pmix")
_own_store(me, Path(sys.argv[1]), time.monotonic() + 2, 2.0)
"""


def listen(folder, **env):
    """Rank 1 of 2 with an MPI library that only pretends; how it ended, what it said, and how long that took."""
    (folder / "mpi4py").mkdir()
    (folder / "mpi4py" / "__init__.py").write_text(LIBRARY)
    path = os.pathsep.join([str(folder), *(p for p in sys.path if p)])
    command, start = [sys.executable, "-c", LISTENER, str(folder / "run")], time.monotonic()
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path, **env}, capture_output=True, text=True)
    return done.returncode, done.stderr, time.monotonic() - start


@pytest.mark.parametrize("call", ["Init", "Ibcast", "Finalize"])
def test_mpi_is_not_waited_for_longer_than_for_other_ranks(tmp_path, call):
    code, said, seconds = listen(tmp_path, WAITS_IN=call)
    assert code == -signal.SIGKILL and seconds < 30
    assert said == (
        "error: rank 1 waited 2 s in MPI for ranks that did not come: it must work on every node; "
        "without mpi in the profile, ranks meet through the run folder alone.\n"
    )


def test_a_rank_that_mpi_takes_for_a_world_of_its_own_waits_for_rank_0(tmp_path):
    code, said, _ = listen(tmp_path, WAITS_IN="", SIZE="1")
    assert code == 1 and "LaunchError: rank 1 found no" in said and "slurm-7-0-0.json within 2 s" in said


def test_a_rank_that_mpi_told_of_nobody_waits_for_rank_0(tmp_path):
    code, said, _ = listen(tmp_path, WAITS_IN="")
    assert code == 1 and "LaunchError: rank 1 found no" in said


def by_ipv6(folder):
    if dist.get_rank() == 0:
        rendezvous.addresses = lambda identity: ["::1"]
    store, _ = meet(me(2), folder, arrive(2), 20.0)
    return gather(store, dist.get_rank(), 2)


def has_ipv6():
    with contextlib.suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        return True
    return False


@pytest.mark.skipif(not has_ipv6(), reason="no loopback of IPv6 here")
def test_ranks_meet_over_ipv6(ranks, tmp_path):
    assert ranks(2, by_ipv6, tmp_path) == [[0, 10]] * 2


def test_addresses_of_both_kinds_are_published(monkeypatch):
    """Field failure 19: on nodes that have IPv6 alone there is no other way; those of the machine itself, and those
    that need to be told an interface, lead nowhere."""
    card = collections.namedtuple("card", "family address")
    cards = {
        "lo": [card(socket.AF_INET, "127.0.0.1"), card(socket.AF_INET6, "::1")],
        "ib0": [
            card(socket.AF_INET6, "fd00:1::7"),
            card(socket.AF_INET6, "fe80::1%ib0"),
            card(socket.AF_PACKET, "0:1"),
        ],
        "eth0": [card(socket.AF_INET, "10.0.0.7"), card(socket.AF_INET6, "2001:db8::7")],
    }
    monkeypatch.setattr("psutil.net_if_addrs", lambda: cards)
    monkeypatch.setenv("SLURMD_NODENAME", "n7")
    monkeypatch.setattr(socket, "gethostname", lambda: "n7.cluster")
    found = rendezvous.addresses(Identity(0, 4, 0, 2, "srun", "k"))
    assert found == ["n7", "n7.cluster", "10.0.0.7", "fd00:1::7", "2001:db8::7"]


def test_an_address_of_ipv6_is_named_so_that_its_port_can_be_told(tmp_path):
    path = rendezvous_file(tmp_path, me(2, 1))
    path.parent.mkdir()
    path.write_text('{"port": 1, "hosts": ["::1"]}')
    with pytest.raises(LaunchError, match=r"reached rank 0 at none of \[::1\]:1 within"):
        meet(me(2, 1), tmp_path, arrive(2), 0.4)
