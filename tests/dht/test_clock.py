from __future__ import annotations

import time

import pytest

from dht.announcer import Announcer, AnnounceTiming
from dht.clock import check, measure
from dht.errors import ClockSkewed
from dht.identity import Identity
from tests.dht.support import CUTS, StartPeer, until


@pytest.mark.parametrize(("shift", "side"), [(10.0, "ahead of"), (-10.0, "behind")])
async def test_a_wrong_clock_is_told_by_how_much(start_peer: StartPeer, shift: float, side: str) -> None:
    first = await start_peer()
    others = [await start_peer(first), await start_peer(first)]
    client = await start_peer(first, *others, client_only=True, clock=lambda: time.time() + shift)
    offset = await measure(client)
    assert offset == pytest.approx(-shift, abs=0.5)
    with pytest.raises(
        ClockSkewed, match=f"this clock is 10.0 s {side} the swarm's .*: set it, for example with timedatectl"
    ) as caught:
        await check(client)
    assert caught.value.offset_seconds == pytest.approx(-shift, abs=0.5)


async def test_a_right_clock_passes(start_peer: StartPeer) -> None:
    client = await start_peer(await start_peer(), client_only=True)
    assert await check(client) == pytest.approx(0, abs=0.5)


async def test_nobody_to_ask_is_no_offset(start_peer: StartPeer) -> None:
    assert await check(await start_peer()) is None


async def test_the_announcer_reports_a_wrong_clock(start_peer: StartPeer, caplog: pytest.LogCaptureFixture) -> None:
    identity = Identity.ephemeral()
    peer = await start_peer(await start_peer(), identity=identity, clock=lambda: time.time() + 5)
    async with Announcer(peer, identity, CUTS, AnnounceTiming(watch_seconds=0.2)) as announcer:
        await until(lambda: announcer.status.trouble != "")
        assert announcer.status.clock_offset_seconds == pytest.approx(-5, abs=0.5)
    assert "this clock is 5.0 s ahead of the swarm's" in caplog.text
