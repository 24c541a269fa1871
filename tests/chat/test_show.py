"""Routes and waterfalls as text."""

from __future__ import annotations

import pytest

from swarm.chat.options import parse
from swarm.chat.screen import Screen
from swarm.chat.show import printable, route_line, waterfall, with_short_ids
from swarm.client.generate import Generation, GenerationOptions, Vocabulary
from swarm.client.hop import HopPlace
from swarm.client.steps import StepSession
from swarm.client.trace import HopTrace, RecoveryTrace, StepTrace
from swarm.ids import PeerId

ROUTE = (
    HopPlace(0, PeerId("12D3KooWAAAAAAAAAAAAAAAAAAAAA"), (0, 10), name="alice"),
    HopPlace(1, PeerId("12D3KooWBBBBBBBBBBBBBBBBBBBBB"), (10, 30)),
)


def test_a_route_names_peers_and_layers() -> None:
    assert route_line(ROUTE) == "route: alice 0:10 -> 12D3Ko…BBBBBB 10:30"


def test_a_peer_is_called_by_its_name_or_by_the_ends_of_its_id() -> None:
    alice, bob = f"12D3KooW{'A' * 44}", f"12D3KooW{'B' * 44}"
    told = with_short_ids(f"peer {alice} (layers 0:10) is gone, peer {bob} came; 12D3KooW", {alice: "alice"})
    assert told == "peer alice (layers 0:10) is gone, peer 12D3Ko…BBBBBB came; 12D3KooW"


def test_a_waterfall_is_drawn_to_scale() -> None:
    hops = (
        HopTrace(ROUTE[0].peer_id, (0, 10), 1000, 5000, 1000, 1000, 2000, 500, 500, 1, 1),
        HopTrace(ROUTE[1].peer_id, (10, 30), 6000, 9000, 1000, 0, 3000, 0, 0, 1, 1),
    )
    trace = StepTrace(7, 41, 1, 10_000, 1000, hops)
    lines = waterfall(trace, ROUTE)
    assert lines[0] == "last token (position 42): 10.00 ms"
    starts = [len(line) - len(line.rstrip("·-#+")) for line in lines[1:]]
    assert [line.split()[0] for line in lines[1:]][:2] == ["network", "alice"]
    assert len(lines) == 1 + 2 * 4 + 1
    computing = [line for line in lines if "compute" in line]
    assert [line.count("#") for line in computing] == [10, 14]
    assert computing[1].index("#") > computing[0].rindex("#")
    assert lines[-1].strip().startswith("network 12D3Ko…BBBBBB 10:30 -> here")
    assert all(count >= 1 for count in starts)


def test_a_waterfall_survives_clocks_that_are_off() -> None:
    hop = HopTrace(ROUTE[0].peer_id, (0, 10), -900_000, 2_000_000, 0, 1, 1, 1, 1, 1, 1)
    assert len(waterfall(StepTrace(1, 0, 1, 0, 0, (hop,)), ROUTE)) == 6


def test_a_model_can_not_send_control_sequences() -> None:
    assert printable("a\x1b[2Jb\tc\nd\x9b") == "a�[2Jb\tc\nd�"


def test_the_trace_tells_of_recoveries(capsys: pytest.CaptureFixture[str]) -> None:
    async def nowhere() -> StepSession:
        raise AssertionError

    generation = Generation([1], GenerationOptions(), Vocabulary(lambda _: b"", frozenset()), nowhere)
    recovery = RecoveryTrace(97, (), ((PeerId("d"), (2, 4)),), ("peer b closed the connection",), 0.5, 0.2, 0.1, 1)
    generation.progress.recoveries.append(recovery)
    for arguments, lines in (([], ""), (["--trace"], f"{recovery}\n")):
        Screen(parse([*arguments, "-p", "x", "--no-show-route"])).close(generation, None)  # type: ignore[arg-type]
        assert capsys.readouterr().err == lines
