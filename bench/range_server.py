"""A local HTTP server that gives byte ranges of a folder's files, and what bad servers give, for tests and benchmarks.

It knows a file by the last part of the path, whatever stands before: a redirect or a hub's address leads to it as well.
It runs in a thread of its own and remembers every request.
"""

from __future__ import annotations

import asyncio
import os
import re
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import unquote, urlsplit

_BLOCK = 1 << 18
_ETAG = '"first"'


class Fault(Enum):
    """What the server does to a request."""

    DROP = "closes the connection in the middle of the body"
    ERROR = "status 503"
    BUSY = "status 429 with Retry-After"
    SHORT = "sends, and says so, half of the range"
    LONG = "announces one byte more than the range has, and sends it"
    WRONG_LENGTH = "sends half of what it announced, and is silent"
    WRONG_RANGE = "says that it sends a range one byte further on"
    WRONG_TOTAL = "says that the file has one byte more"
    NEW_ETAG = "says that the file is another one than before"
    NO_RANGES = "sends the whole file with status 200"
    NO_CONTENT_RANGE = "status 206 and not a word about which bytes"
    ENCODED = "says that the bytes are compressed"
    MISSING = "status 404"
    DENIED = "status 403"
    GARBAGE = "no HTTP"
    STALL = "sends half of the body and then nothing"
    SILENCE = "sends nothing at all"
    SLOW = "sends the body with many pauses"
    REDIRECT = "status 302 to another place"
    LOOP = "status 302 to where it is"
    FLIP = "sends one wrong bit"


@dataclass
class Trouble:
    """Strikes requests from byte ``start`` of a file on: the first ``times`` of them, or every ``every``-th. ``file``
    is a part of the name; ``to`` the address that a redirect leads to, before the path; ``header`` is Retry-After's."""

    fault: Fault
    times: int | None = None
    every: int = 1
    file: str = ""
    start: int = 1  # so that questions for the first byte, with which a client begins, are answered well
    to: str = ""
    header: str = "0"
    asked: int = 0
    struck: int = 0

    def strikes(self, name: str, start: int) -> bool:
        if start < self.start or self.file not in name or (self.times is not None and self.struck >= self.times):
            return False
        self.asked += 1
        if self.asked % self.every:
            return False
        self.struck += 1
        return True


@dataclass
class Asked:
    """A request. ``sent_bytes`` of its body went out."""

    path: str
    headers: dict[str, str]
    connection: int
    start: int = 0
    stop: int = 0
    fault: Fault | None = None
    sent_bytes: int = 0


@dataclass
class _Answer:
    """What would be right, before something is done to it."""

    status: str
    headers: dict[str, str]
    path: Path
    start: int
    stop: int
    flip: bool = False


class RangeServer:
    """``with RangeServer(folder) as server: ... server.url``. ``troubles`` may be changed while it runs."""

    def __init__(
        self, folder: Path, troubles: Sequence[Trouble] = (), *, bytes_per_second: int | None = None, port: int = 0
    ) -> None:
        self.folder = folder
        self.troubles = list(troubles)
        self.asked: list[Asked] = []
        # called in the server's thread
        self.on_request: Callable[[Asked], None] = lambda asked: None
        self.on_bytes: Callable[[Asked], None] = lambda asked: None
        self.port = port
        self._bytes_per_second = bytes_per_second
        self._connections = 0
        self._started = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._run, name="range server", daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/files"

    @property
    def sent_bytes(self) -> int:
        """Of bodies, in all."""
        return sum(asked.sent_bytes for asked in self.asked)

    @property
    def connections(self) -> int:
        return self._connections

    def __enter__(self) -> Self:
        self._thread.start()
        self._started.wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._connected, "127.0.0.1", self.port))
        self.port = server.sockets[0].getsockname()[1]
        self._started.set()
        try:
            self._loop.run_forever()
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*self._tasks, return_exceptions=True))
            self._loop.close()

    def _stop(self) -> None:
        self._loop.stop()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._connections += 1
        number = self._connections
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                while await self._serve(number, reader, writer):
                    pass
        finally:
            self._tasks.discard(task)
            writer.transport.abort() if writer.transport.is_closing() else writer.close()

    async def _serve(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request; whether the connection stays."""
        first = await reader.readexactly(1)
        if first == b"\x16":  # the beginning of TLS
            return False
        head = (first + await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        asked = _parse(head, number)
        self.asked.append(asked)
        self.on_request(asked)
        name = unquote(urlsplit(asked.path).path.rpartition("/")[2])
        path = self.folder / name
        if not path.is_file():
            return await _plain(writer, "404 Not Found")
        size = path.stat().st_size
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", asked.headers.get("range", ""))
        asked.start, asked.stop = (int(match[1]), min(int(match[2]) + 1, size)) if match else (0, size)
        trouble = next((each for each in self.troubles if each.strikes(name, asked.start)), None)
        if trouble is not None:
            asked.fault = trouble.fault
            if trouble.fault in _HEADS:
                return await _HEADS[trouble.fault](writer, trouble, asked)
        answer = _Answer(
            "206 Partial Content" if match else "200 OK", _headers(asked, size), path, asked.start, asked.stop
        )
        if trouble is not None and trouble.fault in _SPOILED:
            _SPOILED[trouble.fault](answer, size)
        return await self._send(writer, answer, asked, trouble.fault if trouble else None)

    async def _send(self, writer: asyncio.StreamWriter, answer: _Answer, asked: Asked, fault: Fault | None) -> bool:
        writer.write(_head(answer.status, answer.headers))
        end = answer.stop
        if fault in (Fault.DROP, Fault.STALL, Fault.WRONG_LENGTH):
            end = answer.start + (answer.stop - answer.start) // 2
        with answer.path.open("rb", buffering=0) as stream:
            await self._body(writer, stream.fileno(), (answer.start, end), asked, answer.flip, fault is Fault.SLOW)
        if fault is Fault.LONG:
            writer.write(b"!")
        await writer.drain()
        if fault in (Fault.STALL, Fault.WRONG_LENGTH):
            await asyncio.Event().wait()  # until the client goes, or this server
        return fault is not Fault.DROP

    async def _body(
        self,
        writer: asyncio.StreamWriter,
        descriptor: int,
        span: tuple[int, int],
        asked: Asked,
        flip: bool,
        slow: bool,
    ) -> None:
        at, stop = span
        block = max(1, (stop - at) // 20) if slow else _BLOCK
        while at < stop:
            data = os.pread(descriptor, min(block, stop - at), at)
            if flip:
                data, flip = bytes([data[0] ^ 1]) + data[1:], False
            writer.write(data)
            await writer.drain()
            at += len(data)
            asked.sent_bytes += len(data)
            self.on_bytes(asked)
            if slow:
                await asyncio.sleep(0.01)
            if self._bytes_per_second is not None:
                await asyncio.sleep(len(data) / self._bytes_per_second)


def _parse(head: str, connection: int) -> Asked:
    first, *lines = head.split("\r\n")
    headers = {key.strip().lower(): value.strip() for key, _, value in (line.partition(":") for line in lines if line)}
    return Asked(first.split(" ")[1], headers, connection)


def _headers(asked: Asked, size: int) -> dict[str, str]:
    return {
        "Content-Range": f"bytes {asked.start}-{asked.stop - 1}/{size}",
        "Content-Length": str(asked.stop - asked.start),
        "ETag": _ETAG,
        "Accept-Ranges": "bytes",
    }


def _head(status: str, headers: dict[str, str]) -> bytes:
    lines = [f"HTTP/1.1 {status}", *(f"{key}: {value}" for key, value in headers.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


async def _plain(writer: asyncio.StreamWriter, status: str, **headers: str) -> bool:
    named = {key.replace("_", "-"): value for key, value in headers.items()}
    writer.write(_head(status, {**named, "Content-Length": "0"}))
    await writer.drain()
    return True


async def _garbage(writer: asyncio.StreamWriter, trouble: Trouble, asked: Asked) -> bool:
    writer.write(b"\x00\xffnot http at all\r\n\r\n")
    await writer.drain()
    return False


async def _silence(writer: asyncio.StreamWriter, trouble: Trouble, asked: Asked) -> bool:
    await asyncio.Event().wait()
    return False


async def _redirect(writer: asyncio.StreamWriter, trouble: Trouble, asked: Asked) -> bool:
    return await _plain(writer, "302 Found", Location=f"{trouble.to}/moved/{asked.path.rpartition('/')[2]}")


_HEADS = {
    Fault.ERROR: lambda writer, trouble, asked: _plain(writer, "503 Service Unavailable"),
    Fault.BUSY: lambda writer, trouble, asked: _plain(writer, "429 Too Many Requests", Retry_After=trouble.header),
    Fault.MISSING: lambda writer, trouble, asked: _plain(writer, "404 Not Found"),
    Fault.DENIED: lambda writer, trouble, asked: _plain(writer, "403 Forbidden"),
    Fault.LOOP: lambda writer, trouble, asked: _plain(writer, "302 Found", Location=asked.path),
    Fault.REDIRECT: _redirect,
    Fault.GARBAGE: _garbage,
    Fault.SILENCE: _silence,
}


def _short(answer: _Answer, size: int) -> None:
    answer.stop = answer.start + max(1, (answer.stop - answer.start) // 2)
    _says(answer, answer.start, answer.stop, size)


def _long(answer: _Answer, size: int) -> None:
    answer.headers["Content-Length"] = str(answer.stop - answer.start + 1)


def _wrong_range(answer: _Answer, size: int) -> None:
    answer.headers["Content-Range"] = f"bytes {answer.start + 1}-{answer.stop}/{size}"


def _wrong_total(answer: _Answer, size: int) -> None:
    answer.headers["Content-Range"] = f"bytes {answer.start}-{answer.stop - 1}/{size + 1}"


def _whole(answer: _Answer, size: int) -> None:
    answer.status, answer.start, answer.stop = "200 OK", 0, size
    del answer.headers["Content-Range"]
    answer.headers["Content-Length"] = str(size)


def _says(answer: _Answer, start: int, stop: int, size: int) -> None:
    answer.headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
    answer.headers["Content-Length"] = str(stop - start)


def _flip(answer: _Answer, size: int) -> None:
    answer.flip = True


_SPOILED: dict[Fault, Callable[[_Answer, int], object]] = {
    Fault.SHORT: _short,
    Fault.LONG: _long,
    Fault.WRONG_RANGE: _wrong_range,
    Fault.WRONG_TOTAL: _wrong_total,
    Fault.NO_RANGES: _whole,
    Fault.FLIP: _flip,
    Fault.NEW_ETAG: lambda answer, size: answer.headers.update(ETag='"second"'),
    Fault.NO_CONTENT_RANGE: lambda answer, size: answer.headers.pop("Content-Range"),
    Fault.ENCODED: lambda answer, size: answer.headers.update({"Content-Encoding": "gzip"}),
}
