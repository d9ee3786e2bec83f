"""A store of keys over TCP for ranks that have no torch, with the calls of torch's that the watchdog makes.

The server (`storeserver`) is a process of its own, so that answering beats takes nothing from a rank that is being
measured. It ends with the process that started it. A request is a line of JSON, a list of a call and its arguments; an
answer is another.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TIMEOUT_S = 60.0
"""Of a connection and of an answer."""


class PlainStore:
    """A client. It connects when it is first used, and may be used by several threads.

    Args:
        hosts: where the server may be reached, the likeliest first.
        key: that the server was given; no other client is answered.
    """

    def __init__(self, hosts: Sequence[str], port: int, key: str) -> None:
        self.hosts, self.port, self.key = hosts, port, key
        self._lock = threading.Lock()
        self._file: Any = None

    def clone(self) -> PlainStore:
        """Another connection to the same store."""
        return PlainStore(self.hosts, self.port, self.key)

    def set(self, key: str, value: str) -> None:
        """Keep a value.

        Raises:
            RuntimeError: the store is gone; so do all calls.
        """
        self._ask("set", key, value)

    def get(self, key: str) -> bytes:
        """What was set."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """What was set, of each key."""
        found = self._ask("get", list(keys))
        if None in found:
            raise RuntimeError(f"the store has no {keys[found.index(None)]}")
        return [value.encode() for value in found]

    def add(self, key: str, number: int) -> int:
        """Add to a counter, which begins at 0; what it is then."""
        return int(self._ask("add", key, number))

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all have been set."""
        return None not in self._ask("get", list(keys))

    def _ask(self, *request: Any) -> Any:
        with self._lock:
            try:
                if self._file is None:
                    self._file = self._connected()
                self._file.write(json.dumps(request).encode() + b"\n")
                self._file.flush()
                answer = self._file.readline()
            except OSError as error:
                raise RuntimeError(f"the store cannot be reached: {error}") from None
        if not answer:
            raise RuntimeError("the store is gone")
        return json.loads(answer)

    def _connected(self) -> Any:
        failed = OSError("no address")
        for host in self.hosts:
            try:
                with socket.create_connection((host, self.port), TIMEOUT_S) as connection:
                    file = connection.makefile("rwb")
            except OSError as error:
                failed = error
                continue
            file.write(json.dumps(["key", self.key]).encode() + b"\n")
            return file
        raise failed


@contextmanager
def serving(key: str) -> Iterator[int]:
    """The port of a server that lasts as long as the block."""
    command = [sys.executable, "-I", "-S", str(Path(__file__).with_name("storeserver.py"))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin and child.stdout
        child.stdin.write(f"{key}\n")
        child.stdin.flush()
        yield int(child.stdout.readline())
        child.stdin.close()
