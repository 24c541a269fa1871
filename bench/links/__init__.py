"""Bad links on demand: a TCP proxy between two addresses, for every test and benchmark that needs one.

    async with proxy(("127.0.0.1", 4001), Link(Shape(delay_seconds=0.02, bytes_per_second=1.25e6))) as between:
        ...  # what connects to between.address reaches port 4001 as over 20 ms and 10 Mbit/s
        between.link.cut()  # a pulled cable: nothing arrives, nothing ends
        between.link.heal()  # what was held goes on
        await between.link.reset()  # RST to both sides of every connection

A ``Link`` is one machine's cable: ``down`` are the bytes it receives, ``up`` those it sends. All connections of a link
share its bandwidth. ``linked_swarm`` puts each node of a swarm behind a link of its own; by hand there is
``python -m bench.links --help``. What a link can't do is said at ``Lane`` and ``linked_swarm``.
"""

from bench.links.lane import Lane, Shape
from bench.links.link import Direction, Link
from bench.links.path import Path
from bench.links.proxy import Address, Proxy, proxy

__all__ = ["Address", "Direction", "Lane", "Link", "Path", "Proxy", "Shape", "proxy"]
