"""The server of `plainstore`: a program of the standard library alone, so that it starts at once.

python -I -S storeserver.py     reads its key from its input, prints its port, and ends with its input
"""

from __future__ import annotations

import asyncio
import json
import resource
import signal
import sys
from contextlib import suppress
from typing import Any


class Server:
    """Keeps values by key.

    Args:
        key: a client that does not begin with it is not answered.
    """

    def __init__(self, key: str) -> None:
        self.key, self.kept = key, dict[str, str]()

    def answer(self, what: str, *arguments: Any) -> Any:
        """What a request comes to."""
        if what == "set":
            self.kept[arguments[0]] = arguments[1]
            return None
        if what == "add":
            self.kept[arguments[0]] = str(int(self.kept.get(arguments[0], 0)) + arguments[1])
            return self.kept[arguments[0]]
        return [self.kept.get(key) for key in arguments[0]]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one client, until it leaves."""
        with suppress(OSError, ValueError):
            known = json.loads(await reader.readline()) == ["key", self.key]
            while known and (line := await reader.readline()):
                writer.write(json.dumps(self.answer(*json.loads(line))).encode() + b"\n")
                await writer.drain()
        writer.close()


async def main() -> None:
    """Serve on a free port of all interfaces."""
    server = Server(sys.stdin.readline().strip())
    listening = await asyncio.start_server(server.serve, "0.0.0.0", 0, limit=1 << 24)
    print(listening.sockets[0].getsockname()[1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)  # until it is closed
    listening.close()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with the rank that started it
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # two connections a rank
    asyncio.run(main())
