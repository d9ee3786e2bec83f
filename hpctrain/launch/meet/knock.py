"""Which addresses of a host answer. A resolver may need seconds to say that it knows no such name; nobody waits."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Iterator, Sequence

HEAD_START_S = 0.25
"""What an address has before the next one is tried beside it: the delay that RFC 8305, section 8, recommends."""


def answers(hosts: Sequence[str], port: int, timeout_s: float) -> Iterator[tuple[str, str]]:
    """Where somebody listens, as they answer: their address and the own one by which they were reached, numeric.

    Args:
        hosts: names and addresses, the likeliest first.
        timeout_s: for an answer, names included.
    """
    heard: queue.SimpleQueue[tuple[str, str] | None] = queue.SimpleQueue()

    def knock(host: str) -> None:
        try:
            with socket.create_connection((host, port), timeout_s) as line:
                heard.put((str(line.getpeername()[0]), str(line.getsockname()[0])))
        except (OSError, UnicodeError):  # the latter of what is no name at all
            heard.put(None)

    open_, deadline = 0, time.monotonic() + timeout_s
    for number, host in enumerate(hosts, 1):
        threading.Thread(target=knock, args=(host,), daemon=True).start()
        open_ += 1
        last = number == len(hosts)
        while open_ and (left := deadline - time.monotonic() if last else HEAD_START_S) > 0:
            try:
                answer = heard.get(timeout=left)
            except queue.Empty:
                break
            open_ -= 1
            if answer is not None:
                yield answer
            elif not last:
                break  # the next at once
