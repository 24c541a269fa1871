from __future__ import annotations

import json
import os
from dataclasses import astuple, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.node.node import SwarmNode
from swarm.node.speed import (
    FASTEST,
    FRESH_SECONDS,
    LIVE_SECONDS,
    MOST_FILES,
    OLD_SECONDS,
    SLOWEST,
    LiveSpeed,
    Speed,
    SpeedCache,
    SpeedKey,
)
from swarm.node.upkeep import is_idle
from tests.node.harness import client_peer, config, session, until

KEY = SpeedKey("build/cpu/f16", "A CPU @ 3 GHz", 8, 4, "a" * 64, 0, 10, False)
SPEED = Speed(12.5, 300.0)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_speed_that_was_kept_is_found_again(tmp_path: Path) -> None:
    cache = SpeedCache(tmp_path / "made" / "when needed")
    assert cache.get(KEY) is None
    cache.put(KEY, SPEED)
    assert SpeedCache(tmp_path / "made" / "when needed").get(KEY) == SPEED
    assert [path.suffix for path in (tmp_path / "made" / "when needed").iterdir()] == [".json"]


@pytest.mark.parametrize(
    "changes",
    [
        {"engine": "other/cpu/f16"},
        {"cpu": "B"},
        {"cores": 4},
        {"threads": 3},
        {"artifact_id": "b" * 64},
        {"first": 1},
        {"last": 9},
        {"mtp": True},
    ],
)
def test_anything_else_has_another_speed(tmp_path: Path, changes: dict[str, str | int]) -> None:
    cache = SpeedCache(tmp_path)
    cache.put(KEY, SPEED)
    assert cache.get(replace(KEY, **changes)) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe\x00",
        b"[]",
        b"{}",
        b"null",
        b'{"version": 1}',
    ],
)
def test_a_file_that_makes_no_sense_is_as_good_as_none(tmp_path: Path, content: bytes) -> None:
    cache = SpeedCache(tmp_path)
    (tmp_path / KEY.file_name).write_bytes(content)
    assert cache.get(KEY) is None
    cache.put(KEY, SPEED)
    assert cache.get(KEY) == SPEED


@pytest.mark.parametrize(
    "change",
    [
        {"decode_tokens_per_second": float("inf")},
        {"decode_tokens_per_second": float("nan")},
        {"decode_tokens_per_second": -1},
        {"prefill_tokens_per_second": 0},
        {"prefill_tokens_per_second": 1e300},
        {"version": 2},
        {"key": {}},
        {"saved_at": 1e11},
        {"more": 1},
    ],
)
def test_values_that_nobody_measured_are_not_taken(tmp_path: Path, change: dict[str, object]) -> None:
    cache = SpeedCache(tmp_path)
    cache.put(KEY, SPEED)
    path = tmp_path / KEY.file_name
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    assert cache.get(KEY) is None


def test_what_is_old_is_measured_again(tmp_path: Path) -> None:
    clock = Clock()
    cache = SpeedCache(tmp_path, clock)
    cache.put(KEY, SPEED)
    clock.now += OLD_SECONDS - 1
    assert cache.get(KEY) == SPEED
    clock.now += 2
    assert cache.get(KEY) is None


def test_what_was_found_a_moment_ago_is_fresh(tmp_path: Path) -> None:
    clock = Clock()
    cache = SpeedCache(tmp_path, clock)
    assert not cache.is_fresh(KEY)
    cache.put(KEY, SPEED)
    assert cache.is_fresh(KEY)
    clock.now += FRESH_SECONDS
    assert not cache.is_fresh(KEY)


def test_a_speed_that_is_not_known_is_not_kept(tmp_path: Path) -> None:
    SpeedCache(tmp_path).put(KEY, Speed())
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_none_costs_the_cache_only(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = SpeedCache(tmp_path / "file")
    cache.put(KEY, SPEED)
    assert cache.get(KEY) is None


def test_the_oldest_files_go(tmp_path: Path) -> None:
    cache = SpeedCache(tmp_path)
    for number in range(MOST_FILES + 3):
        path = tmp_path / f"{number}.json"
        path.write_text("{}")
        os.utime(path, (number, number))
    cache.put(KEY, SPEED)
    left = {path.name for path in tmp_path.iterdir()}
    assert len(left) == MOST_FILES
    assert KEY.file_name in left and "3.json" not in left and "4.json" in left


# --- live


def live(measured: Speed = SPEED, n_layers: int = 10) -> tuple[LiveSpeed, Clock]:
    clock = Clock()
    speed = LiveSpeed(clock)
    speed.measured(measured, n_layers)
    return speed, clock


def test_without_calls_it_is_what_was_measured() -> None:
    speed, _ = live()
    assert astuple(speed.now(10)) == pytest.approx(astuple(SPEED))


def test_a_busy_node_announces_what_it_does_and_a_quiet_one_what_it_can() -> None:
    speed, clock = live()
    for _ in range(200):
        speed.decoded(10, 0.16)  # half as fast: others share its calls
        speed.prefilled(64, 5, 64 / 1200)  # of half the layers
    assert astuple(speed.now(10)) == pytest.approx((1 / 0.16, 600), rel=0.01)
    clock.now += LIVE_SECONDS + 1
    assert astuple(speed.now(10)) == pytest.approx(astuple(SPEED))


def test_a_machine_that_slept_during_a_call_is_no_slow_one() -> None:
    speed, _ = live()
    speed.decoded(10, 3600.0)
    assert speed.now(10).decode_tokens_per_second > 0.8 * SPEED.decode_tokens_per_second


def test_short_chunks_say_nothing_of_long_ones() -> None:
    speed, _ = live()
    for _ in range(100):
        speed.prefilled(3, 10, 1.0)
    assert speed.now(10).prefill_tokens_per_second == pytest.approx(SPEED.prefill_tokens_per_second)


def test_a_node_that_measured_nothing_learns_from_its_calls() -> None:
    speed, _ = live(Speed())
    assert speed.now(10) == Speed()
    speed.decoded(5, 0.05)
    assert speed.now(10).decode_tokens_per_second == pytest.approx(10)


@given(st.lists(st.floats(0, 1e6), max_size=300))
def test_calls_can_move_it_so_far_only(seconds: list[float]) -> None:
    speed, _ = live()
    for taken in seconds:
        speed.decoded(10, taken)
        speed.prefilled(100, 10, taken)
    for found, measured in zip(astuple(speed.now(10)), astuple(SPEED), strict=True):
        assert SLOWEST * measured * 0.999 <= found <= FASTEST * measured * 1.001


# --- a real node


async def test_a_node_that_starts_again_announces_at_once_and_measures_in_quiet(
    llama_untied_path: Path, tmp_path: Path
) -> None:
    given = config(llama_untied_path, "0:6", tmp_path, quiet_seconds=0.05)
    given = replace(given, measure_speed=True, speed_folder=tmp_path / "speed")
    async with SwarmNode(replace(given, timeouts=replace(given.timeouts, quiet_seconds=3600.0))) as node:
        first = node.shared.speed
        assert first.decode_tokens_per_second > 0 and first.prefill_tokens_per_second > 0
    [kept] = (tmp_path / "speed").iterdir()
    document = json.loads(kept.read_text())
    told = {"decode_tokens_per_second": 0.125, "prefill_tokens_per_second": 0.25}
    told["saved_at"] = document["saved_at"] - FRESH_SECONDS
    kept.write_text(json.dumps({**document, **told}))
    waiting = replace(given, timeouts=replace(given.timeouts, quiet_seconds=3600.0))
    async with SwarmNode(waiting) as node:
        assert astuple(node.shared.speed) == pytest.approx((0.125, 0.25))
        assert is_idle(node.shared)
        async with client_peer(node) as peer, session(peer, node) as client:
            assert not is_idle(node.shared), "nobody measures while somebody is there"
            for position in range(4):
                await client.compute(position, [position])
            assert node.shared.speed.decode_tokens_per_second > 0.125, "real calls are faster"
            assert (await node.records())[0].decode_tokens_per_second >= 0.125
    async with SwarmNode(given) as node:
        await until(lambda: node.shared.speed.prefill_tokens_per_second > 1)
        await until(lambda: node.counts().slots == 0)
        async with client_peer(node) as peer, session(peer, node) as client:
            answer = await client.compute(0, [1, 2, 3])
            assert answer.rows[0].top_ids, "the slot was left empty"
