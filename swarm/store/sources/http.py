"""Files on an HTTP server that gives ranges of them. Whatever else it gives is refused, with the reason."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from urllib.parse import quote, urlsplit, urlunsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp

from swarm import __version__
from swarm.artifact.manifest import Manifest
from swarm.errors import SourceError
from swarm.store.sources.ranges import (
    OK,
    Asked,
    headers_refusal,
    is_busy,
    retry_after_seconds,
    status_refusal,
    strong_etag,
)
from swarm.store.sources.source import Unavailable

_MAX_REDIRECTS = 8
_READ_BUFFER = 1 << 16  # of a connection that breaks, up to twice that is lost, and comes again
_HEADERS = {"User-Agent": f"glm-swarm/{__version__}", "Accept-Encoding": "identity"}
# of these a second try makes nothing better
_FINAL = (
    aiohttp.TooManyRedirects,
    aiohttp.InvalidURL,
    aiohttp.NonHttpUrlClientError,
    UnicodeError,  # of a host's name that is none
    aiohttp.ClientSSLError,
    aiohttp.ClientConnectorCertificateError,
)


@dataclass(frozen=True)
class HttpTimeouts:
    """``silence_seconds``: how long a server may send nothing while bytes of it are awaited. The time in which nobody
    awaits them, because of a rate limit or a slow disk, does not count: aiohttp's own ``sock_read`` counts it too."""

    connect_seconds: float = 20.0
    silence_seconds: float = 30.0

    @property
    def client(self) -> aiohttp.ClientTimeout:
        return aiohttp.ClientTimeout(total=None, sock_connect=self.connect_seconds)


class HttpSource:
    """``urls`` are those of the manifest's files, in its order. ``headers`` may hold a token: redirects to another
    host go without it. Connections are kept and used again."""

    def __init__(
        self,
        name: str,
        urls: Sequence[str],
        headers: Mapping[str, str] | None = None,
        timeouts: HttpTimeouts | None = None,
    ) -> None:
        self._name = name
        self._urls = tuple(urls)
        self._headers = {**_HEADERS, **(headers or {})}
        self._timeouts = timeouts or HttpTimeouts()
        self._manifest: Manifest | None = None
        self._session: aiohttp.ClientSession | None = None
        self._etags: list[str | None] = [None] * len(self._urls)

    @classmethod
    def at(cls, url: str, file_names: Sequence[str], timeouts: HttpTimeouts | None = None) -> HttpSource:
        """A folder on a server, or one of the files in it. What follows ``?`` is sent with every request."""
        parts = urlsplit(url)
        path = parts.path
        if path.rpartition("/")[2] in {*file_names, *map(quote, file_names)}:
            path = path.rpartition("/")[0]
        base = path.rstrip("/")
        urls = [urlunsplit(parts._replace(path=f"{base}/{quote(name)}", fragment="")) for name in file_names]
        return cls(_shown(url), urls, timeouts=timeouts)

    @property
    def name(self) -> str:
        return self._name

    async def open(self, manifest: Manifest) -> None:
        if self._manifest is not None:
            return
        if self._session is None:
            self._session = self._new_session()
        probes = [self._probe(manifest, file) for file in range(len(manifest.files))]
        results = await asyncio.gather(*probes, return_exceptions=True)
        failed = [result for result in results if isinstance(result, BaseException)]
        if failed:
            # a final refusal says more than a server that is busy
            raise min(failed, key=lambda error: isinstance(error, Unavailable))
        self._manifest = manifest

    async def read(self, file: int, start: int, stop: int) -> AsyncGenerator[bytes, None]:
        assert self._manifest is not None, "read before open"
        asked = Asked(start, stop, self._manifest.files[file].size_bytes, self._etags[file])
        where = self._where(self._manifest, file)
        left = stop - start
        async with self._answer(file, asked, where) as response:
            while data := await self._next(response, where):
                left -= len(data)
                if left < 0:
                    raise SourceError(f"{where}: sends more bytes than were asked for; choose another --source")
                yield data
        if left:
            raise Unavailable(f"{where}: the answer ended {left} bytes early; try again later")

    async def close(self) -> None:
        session, self._session, self._manifest = self._session, None, None
        if session is not None:
            await session.close()

    async def _probe(self, manifest: Manifest, file: int) -> None:
        asked = Asked(0, 1, manifest.files[file].size_bytes)
        async with self._answer(file, asked, self._where(manifest, file)) as response:
            self._etags[file] = strong_etag(response.headers)
            await self._next(response, self._where(manifest, file))  # to the end: the connection can be used again

    @asynccontextmanager
    async def _answer(self, file: int, asked: Asked, where: str) -> AsyncIterator[aiohttp.ClientResponse]:
        """An answer that says it brings what was asked for."""
        assert self._session is not None, "no session before open"
        url = self._urls[file]
        silence = self._timeouts.connect_seconds + self._timeouts.silence_seconds
        async with _translated(where), asyncio.timeout(silence):
            response = await self._session.get(
                url, headers={"Range": asked.header}, max_redirects=_MAX_REDIRECTS, proxy=_proxy(url)
            )
        try:
            check(response, asked, where, secure=url.startswith("https:"))
            yield response
        finally:
            response.release() if response.content.at_eof() else response.close()

    async def _next(self, response: aiohttp.ClientResponse, where: str) -> bytes:
        """What has come of the body; empty at its end."""
        async with _translated(where), asyncio.timeout(self._timeouts.silence_seconds):
            return await response.content.readany()

    def _new_session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            headers=self._headers,
            timeout=self._timeouts.client,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            read_bufsize=_READ_BUFFER,
            connector=aiohttp.TCPConnector(limit_per_host=0),
        )

    def _where(self, manifest: Manifest, file: int) -> str:
        return f"{self._name}: {manifest.files[file].name}"


def check(response: aiohttp.ClientResponse, asked: Asked, where: str, *, secure: bool) -> None:
    """Raises ``SourceError`` for an answer that is not what was asked for; ``secure``: it was asked for by https."""
    if secure and response.url.scheme != "https":
        raise SourceError(f"{where}: leads from https to plain http; choose another --source")
    status = response.status
    if is_busy(status):
        pause = retry_after_seconds(response.headers)
        raise Unavailable(f"{where}: the server is busy (status {status}); try again later", pause)
    refusal = status_refusal(status, asked) or headers_refusal(response.headers, asked)
    if refusal:
        raise SourceError(f"{where}: {refusal}")
    assert status == OK


@asynccontextmanager
async def _translated(where: str) -> AsyncIterator[None]:
    """The transport's errors in our words; the caller's own pass."""
    try:
        yield
    except _FINAL as error:
        raise SourceError(f"{where}: {_reason(error)}; check the address, or choose another --source") from error
    except TimeoutError as error:
        raise Unavailable(f"{where}: the server is silent; try again later") from error
    except (aiohttp.ClientError, OSError) as error:
        raise Unavailable(f"{where}: {_reason(error)}; try again later") from error


def _reason(error: Exception) -> str:
    if isinstance(error, aiohttp.TooManyRedirects):
        return f"is redirected more than {_MAX_REDIRECTS} times"
    if isinstance(error, aiohttp.ClientSSLError | aiohttp.ClientConnectorCertificateError):
        return "the server's certificate is not accepted"
    if isinstance(error, aiohttp.InvalidURL | aiohttp.NonHttpUrlClientError | UnicodeError):
        return "is no address, or leads to one that is none"
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"no connection ({error.strerror or type(error.os_error).__name__})"
    if isinstance(error, aiohttp.ClientPayloadError):
        return "the connection was lost in the middle of an answer"
    if isinstance(error, aiohttp.ClientResponseError):
        return "the server sends no valid HTTP"
    return "the connection was lost"


def _shown(url: str) -> str:
    """Without what may be secret."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment=""))


def _proxy(url: str) -> str | None:
    """From the environment, as other programs take it; aiohttp's own way mixes it with passwords from netrc."""
    parts = urlsplit(url)
    if parts.hostname is None or proxy_bypass(parts.hostname):
        return None
    return getproxies().get(parts.scheme)
