"""The link kit does what it says, measured between two plain sockets. Times are compared within one run."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import random
import socket
import statistics
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.links import Address, Direction, Link, Path, Proxy, Shape, proxy
from bench.links.line import UNLIMITED_WINDOW_BYTES

SECONDS = 30.0  # for what has to come
SILENCE_SECONDS = 0.15  # in which what must not come would have: hundreds of round trips of loopback
LATE_SECONDS = 0.02  # of timers and of a busy machine, in a median

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(frozen=True)
class Wire:
    """Both ends of a connection through the proxy."""

    between: Proxy
    near: Streams
    far: Streams

    @property
    def link(self) -> Link:
        return self.between.link

    async def round_trip(self) -> float:
        loop = asyncio.get_running_loop()
        began = loop.time()
        for sender, receiver in ((self.near, self.far), (self.far, self.near)):
            sender[1].write(b"!")
            assert await receiver[0].readexactly(1) == b"!"
        return loop.time() - began


@contextlib.asynccontextmanager
async def wire(link: Link | None = None) -> AsyncIterator[Wire]:
    async with listener() as (address, arrived), proxy(address, link) as between, asyncio.timeout(2 * SECONDS):
        near = await asyncio.open_connection(*between.address)
        try:
            yield Wire(between, near, await arrived.get())
        finally:
            near[1].transport.abort()


@contextlib.asynccontextmanager
async def listener() -> AsyncIterator[tuple[Address, asyncio.Queue[Streams]]]:
    """Where it listens, and what has come."""
    arrived: asyncio.Queue[Streams] = asyncio.Queue()
    opened: list[Streams] = []

    def accept(*streams: Any) -> None:
        opened.append(streams)
        arrived.put_nowait(streams)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    async with server:
        try:
            yield server.sockets[0].getsockname(), arrived
        finally:
            for _, writer in opened:
                writer.transport.abort()


async def silent(reader: asyncio.StreamReader) -> bool:
    """Whether neither bytes nor an end come for a while."""
    try:
        async with asyncio.timeout(SILENCE_SECONDS):
            await reader.read(1)
    except TimeoutError:
        return True
    return False


async def how_it_ended(reader: asyncio.StreamReader) -> str:
    """``EOF``, or the name of the error."""
    try:
        async with asyncio.timeout(SECONDS):
            while await reader.read(1 << 16):
                pass
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return "EOF"


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(SECONDS):
        while not condition():  # noqa: ASYNC110  # of sockets, which tell nobody
            await asyncio.sleep(0.005)


async def sent_before_it_blocks(writer: asyncio.StreamWriter, still: Callable[[], int]) -> int:
    """Bytes that the kernel took until nothing moved any more."""
    writer.transport.set_write_buffer_limits(high=1 << 30)
    taken = 0
    while True:
        writer.write(bytes(1 << 20))
        await asyncio.sleep(SILENCE_SECONDS)
        left = writer.transport.get_write_buffer_size() + still()
        if left >= 2 << 20:
            return taken + (1 << 20) - left
        taken += 1 << 20


async def test_a_delay_is_added_each_way() -> None:
    async with wire() as between:
        plain = [await between.round_trip() for _ in range(20)]
        between.link.shape(Shape(delay_seconds=0.03))
        delayed = [await between.round_trip() for _ in range(10)]
    added = statistics.median(delayed) - statistics.median(plain)
    assert min(delayed) >= 0.06  # never early
    assert added <= 0.06 + LATE_SECONDS


async def test_one_direction_may_be_slower() -> None:
    async with wire() as between:
        between.link.shape(Shape(delay_seconds=0.1), Direction.UP)
        between.near[1].write(b"?")
        loop = asyncio.get_running_loop()
        began = loop.time()
        await between.far[0].readexactly(1)
        down = loop.time() - began
        between.far[1].write(b"!")
        await between.near[0].readexactly(1)
        assert loop.time() - began - down >= 0.1 > down


@pytest.mark.parametrize("bytes_per_second", [0.5e6, 10e6], ids=["4-mbit", "80-mbit"])
async def test_bandwidth_is_what_was_asked_for(bytes_per_second: float) -> None:
    """Two connections share it."""
    size = int(bytes_per_second * 0.4)
    link = Link(Shape(bytes_per_second=bytes_per_second))
    async with listener() as (address, arrived), proxy(address, link) as between:
        writers = [(await asyncio.open_connection(*between.address))[1] for _ in range(2)]
        readers = [(await arrived.get())[0] for _ in range(2)]
        loop = asyncio.get_running_loop()
        began = loop.time()
        for writer in writers:
            writer.write(bytes(size))
        await asyncio.gather(*(reader.readexactly(size) for reader in readers))
        taken = loop.time() - began
        for writer in writers:
            writer.transport.abort()
    assert 2 * size / taken == pytest.approx(bytes_per_second, rel=0.15)


async def test_random_bytes_stay_whole_and_in_order_under_jitter() -> None:
    link = Link(Shape(delay_seconds=0.001, jitter_seconds=0.01))
    chance = random.Random(7)
    pieces = [chance.randbytes(chance.randrange(1, 100_000)) for _ in range(40)]
    async with wire(link) as between:

        async def send(writer: asyncio.StreamWriter) -> None:
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(chance.random() / 500)
            writer.write_eof()

        receiving = asyncio.gather(between.far[0].read(-1), between.near[0].read(-1))
        await asyncio.gather(send(between.near[1]), send(between.far[1]))
        assert list(await receiving) == [b"".join(pieces)] * 2


async def test_a_cut_is_silent_and_healing_loses_nothing() -> None:
    async with wire() as between:
        await between.round_trip()
        between.link.cut()
        passed = between.link.passed_bytes
        between.near[1].write(b"question")
        between.far[1].write(b"answer")
        between.far[1].write_eof()  # its end can't be seen either
        assert await silent(between.near[0])
        assert await silent(between.far[0])
        assert between.link.passed_bytes == passed
        between.link.heal()
        assert await between.near[0].read(-1) == b"answer"


async def test_a_cut_in_one_direction_leaves_the_other() -> None:
    async with wire() as between:
        between.link.cut(Direction.UP)
        between.near[1].write(b"still")
        between.far[1].write(b"never")
        assert await between.far[0].readexactly(5) == b"still"
        assert await silent(between.near[0])


async def test_a_connection_made_during_a_cut_waits_for_its_end() -> None:
    async with wire() as between:
        between.link.cut()
        reader, writer = await asyncio.open_connection(*between.between.address)
        assert await silent(reader)
        await until(lambda: between.link.connections == 2)
        between.link.heal()
        writer.write(b"!")
        await until(lambda: between.link.down.passed_bytes == 1)
        writer.transport.abort()


async def test_half_open_keeps_an_end_from_the_other_side() -> None:
    async with wire() as between:
        between.link.half_open()
        await between.round_trip()
        between.near[1].transport.abort()
        between.far[1].write(b"anybody there?")
        assert await silent(between.far[0])
        between.far[1].write(b"still?")
        assert await silent(between.far[0])
        between.link.heal()
        assert await how_it_ended(between.far[0]) in ("EOF", "ECONNRESET")


@pytest.mark.parametrize("cut", [False, True], ids=["open", "cut"])
async def test_a_reset_is_seen_by_both_sides(cut: bool) -> None:
    async with wire() as between:
        await between.round_trip()
        if cut:
            between.link.cut()
        assert await between.link.reset() == 1
        assert await how_it_ended(between.near[0]) == "ECONNRESET"
        assert await how_it_ended(between.far[0]) == "ECONNRESET"
        assert between.link.connections == 0
        between.link.heal()
        _, writer = await asyncio.open_connection(*between.between.address)  # new ones are welcome
        await until(lambda: between.link.connections == 1)
        writer.transport.abort()


async def test_ends_pass_as_they_are() -> None:
    async with wire() as between:
        between.near[1].write(b"last words")
        between.near[1].write_eof()
        assert await between.far[0].read(-1) == b"last words"
        between.far[1].write(b"reply to a half-closed connection")
        between.far[1].close()
        assert await between.near[0].read(-1) == b"reply to a half-closed connection"
        await until(lambda: between.link.connections == 0)
    async with wire() as between:
        await between.round_trip()
        between.near[1].transport.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0"
        )
        between.near[1].transport.abort()
        assert await how_it_ended(between.far[0]) == "ECONNRESET"


async def test_nobody_behind_the_link() -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        address = nobody.getsockname()
    async with proxy(address) as between:
        reader, writer = await asyncio.open_connection(*between.address)
        assert await how_it_ended(reader) == "ECONNRESET"
        writer.close()


async def test_a_receiver_that_does_not_read_stops_the_sender() -> None:
    async with wire() as between:
        taken = await sent_before_it_blocks(between.near[1], lambda: 0)
        kernels = 16 << 20  # what the buffers of four sockets may grow to
        assert taken <= UNLIMITED_WINDOW_BYTES + kernels
        await between.far[0].readexactly(taken + (1 << 20))  # it was only late


async def test_a_slow_link_stops_the_sender() -> None:
    async with wire(Link(Shape(bytes_per_second=1e5))) as between:
        taken = await sent_before_it_blocks(between.near[1], lambda: between.link.down.passed_bytes)
        assert taken <= 8 << 20


async def test_a_path_of_two_links_is_as_bad_as_both() -> None:
    origin, target = Link(Shape(delay_seconds=0.02)), Link(Shape(delay_seconds=0.03))

    async def path_of(_peer: object) -> Path:
        return Path.between(origin, target)

    async with listener() as (address, arrived), proxy(address, target, path_of=path_of) as between:
        near = await asyncio.open_connection(*between.address)
        both = Wire(between, near, await arrived.get())
        assert 0.1 <= await both.round_trip() <= 0.1 + 5 * LATE_SECONDS
        origin.cut(Direction.UP)
        near[1].write(b"?")
        assert await silent(both.far[0])
        assert await origin.reset() == 1
        assert target.connections == 0
        near[1].transport.abort()


def test_commands_by_hand() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        command = [sys.executable, "-m", "bench.links", "--to", f"127.0.0.1:{server.getsockname()[1]}", "--mbit", "8"]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as link:
            assert link.stdin and link.stdout and link.stderr
            try:
                port = int(link.stdout.readline().split()[0].rpartition(":")[2])
                with socket.create_connection(("127.0.0.1", port)) as near, server.accept()[0] as far:
                    near.sendall(b"hello")
                    assert far.recv(5) == b"hello"
                    said = []
                    for line in ("cut down", "delay 20 5", "nonsense", "reset", "status"):
                        link.stdin.write(line + "\n")
                        link.stdin.flush()
                        said.append((link.stderr if line == "nonsense" else link.stdout).readline())
                    assert "down: cut" in said[0] and "up: 0 bytes" in said[0]
                    assert "20 ms + 5 ms jitter one way, 8 Mbit/s" in said[1]
                    assert "no command" in said[2]
                    assert said[3] == "1 connections were reset\n"
                    with pytest.raises(ConnectionResetError):
                        near.recv(1)
            finally:
                link.terminate()


@given(
    st.one_of(
        st.builds(dict, delay_seconds=st.floats(max_value=-1e-9)),
        st.builds(dict, jitter_seconds=st.floats(max_value=-1e-9)),
        st.builds(dict, bytes_per_second=st.floats(max_value=0)),
        st.builds(dict, delay_seconds=st.sampled_from([float("nan"), float("inf")])),
    )
)
def test_impossible_shapes_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="delays are 0 or more"):
        Shape(**wrong)
