"""A peer in its own process that echoes streams: ``python -m tests.dht.echo_node``. Prints its address and pids."""

from __future__ import annotations

import asyncio
import os

from dht.identity import Identity
from dht.peer import Peer

ECHO = "glm-swarm/test/echo"


async def echo(peer_id: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()


async def main() -> None:
    async with await Peer.start(Identity.ephemeral(), listen=("/ip4/127.0.0.1/tcp/0",)) as peer:
        await peer.serve_stream(ECHO, echo)
        print((await peer.addresses())[0], os.getpid(), peer.p2p.pid, flush=True)
        await peer.lost


if __name__ == "__main__":
    asyncio.run(main())
