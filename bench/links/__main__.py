"""A bad link by hand: a proxy in this terminal, which takes commands, one a line."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import stat
import sys
from collections.abc import AsyncIterator, Sequence

from bench.links import Address, Direction, Link, Shape, proxy

COMMANDS = """\
commands, on standard input (up: from the target; down: to it; both when not said):
  delay MS [JITTER_MS]    one way, for what is sent from now on
  mbit N                  bandwidth of all connections together, each way; 0: unlimited
  cut [up|down]           nothing arrives, nothing ends
  half-open               the end of one side is kept from the other
  heal [up|down]          as before the cut; what was held arrives
  reset                   RST to both sides of every connection
  status
"""


class Console:
    """What the commands do to ``link``."""

    def __init__(self, link: Link) -> None:
        self._link = link

    async def obey(self, line: str) -> str:
        """What to tell. Raises ValueError for what is no command."""
        verb, *words = line.split() or ["status"]
        match verb, words:
            case "delay", [delay, *jitter] if len(jitter) < 2:
                now = self._link.up.shape
                self._link.shape(_shape(float(delay), float(jitter[0]) if jitter else 0.0, now.bytes_per_second))
            case "mbit", [mbit]:
                now = self._link.up.shape
                self._link.shape(Shape(now.delay_seconds, now.jitter_seconds, _bytes_per_second(float(mbit))))
            case "cut" | "heal", [*which] if len(which) < 2:
                direction = Direction[which[0].upper()] if which else Direction.BOTH
                (self._link.cut if verb == "cut" else self._link.heal)(direction)
            case "half-open", []:
                self._link.half_open()
            case "reset", []:
                return f"{await self._link.reset()} connections were reset"
            case "status", []:
                pass
            case _:
                raise ValueError(f"{line.strip()!r} is no command; see --help")
        return self._status()

    def _status(self) -> str:
        states = []
        for name, lane in (("down", self._link.down), ("up", self._link.up)):
            held = "cut, " if lane.is_cut else "half-open, " if lane.is_half_open else ""
            states.append(f"{name}: {held}{lane.passed_bytes:,} bytes passed")
        shape = self._link.up.shape
        rate = "unlimited" if shape.bytes_per_second is None else f"{shape.bytes_per_second * 8e-6:g} Mbit/s"
        times = f"{shape.delay_seconds * 1e3:g} ms + {shape.jitter_seconds * 1e3:g} ms jitter one way"
        return f"{self._link.connections} connections; {times}, {rate}; {'; '.join(states)}"


async def serve(options: argparse.Namespace) -> None:
    link = Link(_shape(options.delay_ms, options.jitter_ms, _bytes_per_second(options.mbit)))
    console = Console(link)
    async with proxy(options.to, link, listen=options.listen) as between:
        print("{}:{} leads to {}:{}".format(*between.address, *options.to), flush=True)
        async with _commands() as lines:
            async for line in lines:
                try:
                    print(await console.obey(line.decode()), flush=True)
                except (ValueError, KeyError) as error:
                    print(f"{error}; see --help", file=sys.stderr, flush=True)
        await asyncio.Event().wait()  # commands have ended, the link has not


@contextlib.asynccontextmanager
async def _commands() -> AsyncIterator[asyncio.StreamReader]:
    """Lines of standard input; none when it is a file or a device without an end."""
    reader = asyncio.StreamReader()
    mode = os.fstat(sys.stdin.fileno()).st_mode
    if not (sys.stdin.isatty() or stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
        reader.feed_eof()
        yield reader
        return
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    try:
        yield reader
    finally:
        transport.close()


def _shape(delay_ms: float, jitter_ms: float, bytes_per_second: float | None) -> Shape:
    return Shape(delay_ms / 1e3, jitter_ms / 1e3, bytes_per_second)


def _bytes_per_second(mbit: float) -> float | None:
    return mbit * 1e6 / 8 or None


def _address(text: str) -> Address:
    host, mark, port = text.rpartition(":")
    if not mark or not port.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT")
    return host or "127.0.0.1", int(port)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.links",
        description=__doc__,
        epilog=COMMANDS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--to", type=_address, required=True, metavar="HOST:PORT", help="where the link leads")
    parser.add_argument(
        "--listen", type=_address, default="127.0.0.1:0", metavar="HOST:PORT", help="default: a free port of loopback"
    )
    parser.add_argument("--delay-ms", type=float, default=0.0, help="one way (default: %(default)g)")
    parser.add_argument("--jitter-ms", type=float, default=0.0, help="added at random (default: %(default)g)")
    parser.add_argument("--mbit", type=float, default=0.0, help="Mbit/s each way; 0: unlimited (default)")
    options = parser.parse_args(arguments)
    try:
        asyncio.run(serve(options))
    except KeyboardInterrupt:
        return 130
    except (OSError, ValueError) as error:
        print(f"python -m bench.links: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
