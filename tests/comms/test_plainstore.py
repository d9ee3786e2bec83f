"""The store of ranks without torch: what it keeps, whom it answers, and that it goes with its rank."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time

import pytest

from hpctrain.comms.plainstore import PlainStore, serving

HERE = ["127.0.0.1"]


def test_it_keeps_what_the_watchdog_tells_it() -> None:
    with serving("key") as port:
        one, other = PlainStore(["0.0.0.1", *HERE], port, "key"), PlainStore(HERE, port, "key")
        one.set("beat/0", "text with\nlines, \u00e9")
        assert other.get("beat/0").decode() == "text with\nlines, \u00e9"
        assert not other.check(["beat/0", "beat/1"]) and other.check(["beat/0"]) and other.check([])
        other.clone().set("beat/1", "1")
        assert one.multi_get(["beat/1", "beat/0"])[0] == b"1"
        with pytest.raises(RuntimeError, match="the store has no beat/2"):
            one.multi_get(["beat/1", "beat/2"])


def test_many_add_at_once() -> None:
    """First come is first served: the failure that everybody hears of is one."""
    with serving("key") as port:
        store, found = PlainStore(HERE, port, "key"), []

        def add(own: PlainStore) -> None:
            found.extend(own.add("failures", 1) for _ in range(50))

        threads = [threading.Thread(target=add, args=(s,)) for s in (store, store, store.clone(), store.clone())]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(found) == list(range(1, 201))


def test_strangers_are_not_answered() -> None:
    with serving("key") as port:
        with pytest.raises(RuntimeError, match="the store is gone"):
            PlainStore(HERE, port, "another").set("a", "b")
        with socket.create_connection(("127.0.0.1", port), 5) as raw:
            raw.sendall(b"no JSON\n")
            assert raw.recv(10) == b""
        assert not PlainStore(HERE, port, "key").check(["a"])


def test_it_goes_with_whoever_keeps_it() -> None:
    """Also with a rank that is killed, and has no time to end it."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            with serving("key") as port:
                os.write(write, f"{port}\n".encode())
                time.sleep(60)
        finally:
            os._exit(1)
    port = int(os.read(read, 20))
    store = PlainStore(HERE, port, "key")
    store.set("a", "b")
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    deadline = time.monotonic() + 20
    with pytest.raises(RuntimeError, match=r"the store (is gone|cannot be reached)"):
        while time.monotonic() < deadline:
            store.check(["a"])
            time.sleep(0.02)
