"""What an HTTP server may do, what it is refused for, and what the user is told then."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from contextlib import aclosing, nullcontext
from types import SimpleNamespace
from typing import cast

import pytest
from aiohttp import ClientResponse
from yarl import URL

from bench.range_server import Fault, RangeServer, Trouble
from swarm.artifact.catalog import GLM52
from swarm.artifact.pinned_model import HubFolder
from swarm.errors import SourceError, UsageError
from swarm.store.sources import HttpSource, HttpTimeouts, Source, Unavailable, http, open_source
from swarm.store.sources.hub import hub_source
from swarm.store.sources.ranges import Asked
from tests.store.conftest import Served

FILE = 2
SPAN = (5000, 90_000)
PATIENT = HttpTimeouts(silence_seconds=60)


async def read(source: Source, served: Served, file: int = FILE, span: tuple[int, int] = SPAN) -> bytes:
    await source.open(served.manifest)
    async with aclosing(source.read(file, *span)) as blocks:
        return b"".join([block async for block in blocks])


async def read_from(server: RangeServer, served: Served, timeouts: HttpTimeouts = PATIENT) -> bytes:
    source = open_source(server.url, served.manifest, timeouts=timeouts)
    try:
        return await read(source, served)
    finally:
        await source.close()


def right(served: Served) -> bytes:
    path = served.folder / served.manifest.files[FILE].name
    return path.read_bytes()[slice(*SPAN)]


async def test_ranges_over_one_connection_each(served: Served) -> None:
    with RangeServer(served.folder) as server:
        source = open_source(server.url, served.manifest)
        await source.open(served.manifest)
        await source.open(served.manifest)
        n_files = len(served.manifest.files)
        assert [asked.headers["range"] for asked in server.asked] == ["bytes=0-0"] * n_files
        before = server.connections
        for _ in range(5):
            assert await read(source, served) == right(served)
        await source.close()
        assert server.connections == before <= n_files  # kept ones are used again
        assert server.asked[-1].headers["accept-encoding"] == "identity"
        assert server.asked[-1].headers["user-agent"].startswith("glm-swarm/")


@pytest.mark.parametrize("end", ["", "/", "/split-00003-of-00004.gguf", "?key=secret"])
async def test_addresses(served: Served, end: str) -> None:
    with RangeServer(served.folder) as server:
        source = HttpSource.at(server.url + end, [file.name for file in served.manifest.files])
        assert await read(source, served) == right(served)
        await source.close()
        name = "/files/split-00003-of-00004.gguf"
        assert server.asked[-1].path == (f"{name}?key=secret" if "?" in end else name)
        assert "secret" not in source.name


async def test_a_password_is_used_and_not_shown(served: Served) -> None:
    with RangeServer(served.folder) as server:
        source = HttpSource.at(server.url.replace("//", "//me:hush@"), [file.name for file in served.manifest.files])
        assert await read(source, served) == right(served)
        await source.close()
        assert server.asked[-1].headers["authorization"].startswith("Basic ")
        assert "hush" not in source.name


LIES = [
    (Fault.NO_RANGES, "ignores ranges: it sends the whole file"),
    (Fault.WRONG_TOTAL, r"another file: it has 3511809 bytes, and should have 3511808"),
    (Fault.WRONG_RANGE, r"sends bytes \d+-\d+ where \d+-\d+ were asked for"),
    (Fault.SHORT, r"sends bytes 5000-47499 where 5000-89999 were asked for"),
    (Fault.LONG, r"announces 85001 bytes for a range of 85000"),
    (Fault.NO_CONTENT_RANGE, "does not say which bytes it sends"),
    (Fault.NEW_ETAG, "has changed on the server since the first request"),
    (Fault.ENCODED, "bytes encoded with gzip"),
    (Fault.MISSING, r"is not there \(status 404\); the source must have every file"),
    (Fault.DENIED, r"access is denied \(status 403\); check the address and the token"),
    (Fault.LOOP, "is redirected more than 8 times"),
]


@pytest.mark.parametrize(("fault", "reason"), LIES, ids=[fault.name for fault, _ in LIES])
async def test_a_server_that_lies_is_refused(served: Served, fault: Fault, reason: str) -> None:
    lie = Trouble(fault, file="00003")
    with RangeServer(served.folder, [lie]) as server, pytest.raises(SourceError, match=reason) as caught:
        await read_from(server, served)
    assert not isinstance(caught.value, Unavailable)
    assert "split-00003-of-00004.gguf: " in str(caught.value)
    assert "; " in str(caught.value)


@pytest.mark.parametrize(
    ("fault", "reason"), [lie for lie in LIES if lie[0] not in (Fault.SHORT, Fault.LONG, Fault.NEW_ETAG)]
)
async def test_most_lies_are_noticed_before_anything_is_fetched(served: Served, fault: Fault, reason: str) -> None:
    with RangeServer(served.folder, [Trouble(fault, start=0, file="00003")]) as server:
        source = open_source(server.url, served.manifest)
        with pytest.raises(SourceError, match=reason.partition(r"\d")[0].split("(")[0].rstrip("\\ ")):
            await source.open(served.manifest)
        await source.close()


@pytest.mark.parametrize("to", ["file://", "ftp://127.0.0.1", f"http://{'a' * 80}.b"])
async def test_a_redirect_to_what_is_no_web_server_is_refused(served: Served, to: str) -> None:
    lie = Trouble(Fault.REDIRECT, to=to)
    reason = "is no address, or leads to one that is none; check the address"
    with RangeServer(served.folder, [lie]) as server, pytest.raises(SourceError, match=reason) as caught:
        await read_from(server, served)
    assert not isinstance(caught.value, Unavailable)


BUSY = [
    (Fault.ERROR, r"the server is busy \(status 503\)"),
    (Fault.BUSY, r"the server is busy \(status 429\)"),
    (Fault.DROP, "the connection was lost"),
    (Fault.GARBAGE, "the server sends no valid HTTP"),
]


@pytest.mark.parametrize(("fault", "reason"), BUSY, ids=[fault.name for fault, _ in BUSY])
async def test_what_may_pass_is_told_apart(served: Served, fault: Fault, reason: str) -> None:
    with RangeServer(served.folder, [Trouble(fault, header="17", times=1)]) as server:
        with pytest.raises(Unavailable, match=f"{reason}.*; try again later") as caught:
            await read_from(server, served)
        assert caught.value.retry_after_seconds == (17.0 if fault is Fault.BUSY else None)
        assert await read_from(server, served) == right(served)


@pytest.mark.parametrize("fault", [Fault.STALL, Fault.SILENCE, Fault.WRONG_LENGTH])
async def test_a_server_that_stops_is_noticed(served: Served, fault: Fault) -> None:
    stop = Trouble(fault)
    with RangeServer(served.folder, [stop]) as server, pytest.raises(Unavailable, match="the server is silent"):
        await read_from(server, served, HttpTimeouts(connect_seconds=0.2, silence_seconds=0.2))


async def test_a_slow_server_is_waited_for(served: Served) -> None:
    with RangeServer(served.folder, [Trouble(Fault.SLOW)]) as server:
        assert await read_from(server, served, HttpTimeouts(silence_seconds=30)) == right(served)


async def test_a_server_that_is_not_there(served: Served, unused_tcp_port: int) -> None:
    source = open_source(f"http://127.0.0.1:{unused_tcp_port}/x", served.manifest)
    with pytest.raises(Unavailable, match=r"no connection \(.*\); try again later"):
        await source.open(served.manifest)
    await source.close()


async def test_a_transfer_that_is_given_up_ends(served: Served) -> None:
    with RangeServer(served.folder, [Trouble(Fault.STALL)]) as server:
        source = open_source(server.url, served.manifest)
        await source.open(served.manifest)
        blocks = source.read(FILE, *SPAN)
        assert await anext(blocks)
        await blocks.aclose()
        await source.close()


HUB = HubFolder("someone/model-GGUF", "f" * 40, "UD-IQ1_S")


@pytest.mark.parametrize("token", ["", "hf_secret"])
async def test_the_hub_sends_on_to_another_host(served: Served, token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the token stays with the hub."""
    from huggingface_hub import constants

    names = [file.name for file in served.manifest.files]
    with RangeServer(served.folder) as storage, RangeServer(served.folder) as hub:
        hub.troubles.append(Trouble(Fault.REDIRECT, start=0, to=storage.url.replace("127.0.0.1", "localhost")))
        endpoint = hub.url.removesuffix("/files")
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setenv("HF_TOKEN", token)
        source = hub_source(HUB, names)
        assert await read(source, served) == right(served)
        await source.close()
    asked = hub.asked[-1]
    assert asked.path == f"/someone/model-GGUF/resolve/{'f' * 40}/UD-IQ1_S/{names[FILE]}"
    assert [each.headers.get("authorization") for each in hub.asked[-1:]] == [f"Bearer {token}" if token else None]
    assert len(storage.asked) == len(hub.asked) == len(names) + 1
    assert all("authorization" not in each.headers for each in storage.asked)
    assert all(each.headers["range"] for each in storage.asked)
    assert storage.sent_bytes == len(names) + SPAN[1] - SPAN[0]
    assert "hf_secret" not in source.name


def test_the_hub_is_the_one_that_the_environment_names() -> None:
    show = (
        "from swarm.artifact.catalog import GLM52; from swarm.store.sources import open_source; "
        "print(open_source('hub', GLM52.manifest)._urls[1])"
    )
    environment = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9"}
    done = subprocess.run([sys.executable, "-c", show], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == (
        f"http://127.0.0.1:9/{GLM52.hub.repository}/resolve/{GLM52.hub.revision}/UD-IQ1_S/{GLM52.file_names[1]}"
    )


@pytest.mark.parametrize("secure", [False, True])
def test_a_redirect_from_https_to_plain_http_is_refused(secure: bool) -> None:
    headers = {"Content-Range": "bytes 0-0/2"}
    answer = cast(ClientResponse, SimpleNamespace(url=URL("http://host/file"), status=206, headers=headers))
    refused = pytest.raises(SourceError, match="host: leads from https to plain http; choose another")
    with refused if secure else nullcontext():
        http.check(answer, Asked(0, 1, 2), "host", secure=secure)


@pytest.mark.parametrize("to_https", [False, True])
async def test_a_certificate_that_nobody_signed(served: Served, to_https: bool) -> None:
    """A plain HTTP server behind an https address, straight or by a redirect."""
    with RangeServer(served.folder) as server:
        secure = server.url.replace("http:", "https:")
        if to_https:
            server.troubles.append(Trouble(Fault.REDIRECT, start=0, to=secure, every=1))
        source = open_source(server.url if to_https else secure, served.manifest)
        with pytest.raises(SourceError, match=r"; (check the address|try again later)"):
            await source.open(served.manifest)
        await source.close()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("hub", "no place there is pinned for"),
        ("ftp://host/x", "no http or https address"),
        ("http://", "no http or https address"),
        ("http://[::1/x", "no http or https address"),
        ("http://host:99999/x", "no http or https address"),
        ("/no/such/folder", "no such folder; write hub, a folder, or an address"),
    ],
)
def test_bad_sources(served: Served, text: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        open_source(text, served.manifest)


async def test_proxies_of_the_environment(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    with RangeServer(served.folder) as proxy:
        monkeypatch.setenv("http_proxy", proxy.url.removesuffix("/files"))
        monkeypatch.setenv("no_proxy", "")
        source = open_source("http://swarm.invalid/folder", served.manifest)
        assert await read(source, served) == right(served)
        await source.close()
    assert proxy.asked[-1].path.startswith("http://swarm.invalid/folder/")


async def test_many_reads_at_once(served: Served) -> None:
    with RangeServer(served.folder) as server:
        source = open_source(server.url, served.manifest)
        results = await asyncio.gather(*(read(source, served) for _ in range(8)))
        await source.close()
    assert results == [right(served)] * 8
