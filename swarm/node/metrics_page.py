"""The page at which Prometheus reads a node's metrics."""

from __future__ import annotations

import os
import socket
from types import TracebackType

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from swarm.errors import NetworkError
from swarm.node.config import HostPort

PATH = "/metrics"


class MetricsPage:
    """Listens while used as a context manager; answers 503 before ``registry`` is there.

    Entering raises NetworkError when the address can't be had.
    """

    def __init__(self, address: HostPort) -> None:
        self._address = address
        self._runner: web.AppRunner | None = None
        self.registry: CollectorRegistry | None = None

    @property
    def url(self) -> str:
        assert self._runner is not None, "not listening"
        host, port = self._runner.addresses[0][:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}{PATH}"

    async def __aenter__(self) -> MetricsPage:
        application = web.Application()
        application.router.add_get(PATH, self._answer)
        runner = web.AppRunner(application, access_log=None, handle_signals=False, shutdown_timeout=1.0)
        await runner.setup()
        try:
            await web.TCPSite(runner, self._address.host, self._address.port).start()
        except OSError as error:
            await runner.cleanup()
            raise NetworkError(
                f"metrics can't be served at {self._address} ({_reason(error)}); choose another --metrics HOST:PORT"
            ) from error
        self._runner = runner
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.Response:
        if self.registry is None:
            raise web.HTTPServiceUnavailable(text="the node is not set up yet; try again\n")
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(self.registry), headers={"Content-Type": content_type})


def _reason(error: OSError) -> str:
    """Without the address, which asyncio repeats."""
    if error.errno is None or isinstance(error, socket.gaierror):
        return error.strerror or str(error)
    return os.strerror(error.errno).lower()
